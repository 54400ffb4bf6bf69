"""LIMoE's router: one choice of experts for the tokens of images and text."""

import keras
import numpy as np
from keras import ops

from keras_softmoe.ops.assignment import (
    PRIORITIES,
    check_num_selected_experts,
    token_choice,
)
from keras_softmoe.ops.routing import SlotRouting
from keras_softmoe.ops.softmax import softmax
from keras_softmoe.routers.router import Decision
from keras_softmoe.routers.routing_losses import (
    MODALITIES,
    Routed,
    RoutingLoss,
    classic_losses,
    entropy_losses,
)
from keras_softmoe.routers.sparse import SparseRouter, gates
from keras_softmoe.sharding import is_distributed

_FIRST = {"image_first": "image", "text_first": "text"}
# A logit that no noise brings back. Infinity would make gradients NaN.
_NEVER = -1e9


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoERouter(SparseRouter):
    """Tokens of images and text choose among the same experts.

    A token chooses its most probable experts, as in V-MoE. What is new are losses that
    know the modality of a token: without them text, of which there is less, ends up
    with one expert or none.

    Args:
        num_experts: int, number of experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        capacity_factor: float, slots per choice while images and text are routed
            together.
        priority: who is seated first: `"sum"` (batch prioritized routing, by the sum of
            a token's `K` largest probabilities; for `K = 1` the same as `"max"`),
            `"max"`, `"position"`, `"pair"` or `"random"` as in `ops.token_choice`;
            `"image_first"` or `"text_first"`, one modality before the other and by
            position among themselves.
        losses: sequence of the `RoutingLoss`es of this module that are averaged.
            `None` for `classic_losses() + entropy_losses(num_experts)`.
        loss_weight: float, weight of that average.
        per_modality: bool, whether images and text have a router of their own over the
            shared experts.
        image_experts: int, how many experts images may use, from the first on. All if
            `None`.
        text_experts: int, how many experts text may use, up to the last. All if
            `None`. Experts are disjoint if the two add up to `num_experts`.
        single_modality_capacity_factor: float, slots per choice where there are only
            images or only text, which do not use all experts.
        rounding: `"ceil"` or `"round"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits that choose and weigh.
        eval_capacity_factor: float or `None`, `capacity_factor` outside training;
            `None` for the same.
        random_logits: bool, whether the logits are normal noise instead.
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`, or `image_kernel` and `text_kernel` if `per_modality`.

    Call arguments:
        tokens: `(G, S, D)` float tensor.
        valid: optional `(G, S)` bool tensor, `False` for padding.
        modalities: pairs of a modality's name and the number of its tokens, in the
            order in which they follow each other, again and again, in a group.
            `layers.MoE` tells them when it is called on a dict.

    Returns: `Decision` with a `SlotRouting`. In training, the mean of
        `auxiliary_loss` over the groups is added to the losses. It averages those of
        `losses` whose modality is there; entropies and importance are those of the
        probabilities without noise.

    Raises:
        ValueError: if a threshold is over `log(num_experts)`, the experts of the
            modalities leave some out, a token would choose more experts than its
            modality has, the modalities are not known, or another argument is not among
            the accepted values.

    Source: LIMoE, section 2 and appendices B (losses), C (priorities), D.1 (capacity
    for one modality) and E.1 to E.3 (`K > 1`, number of experts, kinds of routers).

    Example:

    >>> router = ksm.routers.LIMoERouter(num_experts=8)
    >>> tokens = np.random.normal(size=(2, 24, 32))
    >>> decision = router(tokens, modalities=(("image", 16), ("text", 8)))
    >>> decision.routing.token.shape
    (2, 8, 4)
    """

    knows_modalities = True

    mutable_settings = (
        *SparseRouter.mutable_settings,
        "num_selected_experts",
        "priority",
        "single_modality_capacity_factor",
    )

    def __init__(
        self,
        num_experts,
        num_selected_experts=1,
        capacity_factor=1.05,
        priority="sum",
        losses=None,
        loss_weight=0.04,
        per_modality=False,
        image_experts=None,
        text_experts=None,
        single_modality_capacity_factor=16.0,
        rounding="ceil",
        multiple_of=4,
        noise_std=1.0,
        eval_capacity_factor=None,
        random_logits=False,
        **kwargs,
    ):
        super().__init__(
            num_experts,
            capacity_factor,
            rounding,
            multiple_of,
            eval_capacity_factor=eval_capacity_factor,
            noise_std=noise_std,
            random_logits=random_logits,
            **kwargs,
        )
        check_num_selected_experts(num_selected_experts, num_experts)
        accepted = (*PRIORITIES, *_FIRST)
        if priority not in accepted:
            raise ValueError(
                f"Unknown `priority`. Accepted: {', '.join(map(repr, accepted))}. "
                f"Received: priority={priority!r}."
            )
        if not single_modality_capacity_factor > 0:
            raise ValueError(
                "Experts without slots process nothing. "
                "`single_modality_capacity_factor` must be positive. Received: "
                f"single_modality_capacity_factor={single_modality_capacity_factor}."
            )
        self.num_selected_experts = num_selected_experts
        self.priority = priority
        self.loss_weight = loss_weight
        self.per_modality = per_modality
        self.image_experts = image_experts
        self.text_experts = text_experts
        self.single_modality_capacity_factor = single_modality_capacity_factor
        self._check_experts()
        if losses is None:
            losses = classic_losses() + entropy_losses(
                self.num_predicted_experts, num_selected_experts=num_selected_experts
            )
        self.routing_losses = _checked_losses(losses)
        for loss in self.routing_losses:
            loss.check(self.num_predicted_experts, num_selected_experts, noise_std)

    @property
    def num_predicted_experts(self):
        """Int, the experts among which probabilities are distributed."""
        return self.num_experts

    def build(self, tokens_shape):
        kernels = ["kernel"]
        if self.per_modality:
            kernels = [f"{name}_kernel" for name in MODALITIES]
        for name in kernels:
            kernel = self.add_weight(
                shape=(tokens_shape[-1], self.num_predicted_experts),
                initializer="lecun_normal",
                name=name,
            )
            setattr(self, name, kernel)

    def call(self, tokens, valid=None, training=False, modalities=()):
        num_tokens = tokens.shape[1]
        members = _members(modalities, num_tokens)
        # (G, S, E)
        logits = self._logits(tokens, members)
        noisy_logits = self.add_noise(logits, training)
        probabilities = self.available(softmax(noisy_logits, axis=-1))

        token, filled = token_choice(
            probabilities,
            self.num_selected_experts,
            self.capacity(num_tokens, training, len(members) == 1),
            priority=self._priority(probabilities, members),
            valid=valid,
            seed=self.seed_generator,
            sharded=is_distributed(),
        )
        routing = SlotRouting(token, filled, gates(probabilities, token, filled))

        routed = Routed(
            logits,
            noisy_logits,
            softmax(logits, axis=-1),
            {None: valid} | {name: _and(m, valid) for name, m in members.items()},
            self.num_selected_experts,
            self.noise_std / self.num_experts,
        )
        losses = [loss(routed) for loss in self.routing_losses if loss.applies(routed)]
        if losses:
            mean = sum(losses[1:], start=losses[0]) / len(losses)
            auxiliary_loss = self.loss_weight * mean
            if training:
                self.add_loss(ops.mean(auxiliary_loss))
        else:
            auxiliary_loss = ops.zeros_like(logits[:, 0, 0])
        summary = {
            "logits": logits,
            "probabilities": probabilities,
            "selection": probabilities,
            "auxiliary_loss": auxiliary_loss,
        }
        return Decision(routing, summary)

    def capacity(self, num_tokens, training=False, single_modality=False):
        """Slots per expert for a group of `num_tokens` tokens, as a Python int."""
        if not single_modality:
            return super().capacity(num_tokens, training)
        slots = self.slots(num_tokens, self.single_modality_capacity_factor)
        # No expert is given more than all tokens.
        return min(slots, num_tokens)

    def choices_per_token(self):
        return self.num_selected_experts

    def available(self, probabilities):
        """The probabilities of the experts that there are."""
        return probabilities

    def _logits(self, tokens, members):
        if not self.per_modality:
            logits = ops.matmul(tokens, self.kernel)
        elif len(members) == 1:
            (name,) = members
            logits = ops.matmul(tokens, getattr(self, f"{name}_kernel"))
        else:
            image, text = (
                ops.matmul(tokens, getattr(self, f"{name}_kernel"))
                for name in MODALITIES
            )
            logits = ops.where(ops.expand_dims(members["image"], -1), image, text)
        if self.random_logits:
            logits = self.noise_like(logits)
        for name, member in members.items():
            barred = self._barred(name)
            if barred.any():
                # (1, S, E)
                barred = ops.logical_and(ops.expand_dims(member, -1), barred)
                logits = ops.where(barred, _NEVER, logits)
        return logits

    def _barred(self, modality):
        """`(E,)` bool array: the experts that a modality must not use."""
        num_experts = self.num_predicted_experts
        index = np.arange(num_experts)
        if modality == "image":
            return index >= (self.image_experts or num_experts)
        return index < num_experts - (self.text_experts or num_experts)

    def _priority(self, probabilities, members):
        if self.priority not in _FIRST:
            return self.priority
        first = members.get(_FIRST[self.priority])
        if first is None:
            return "position"
        return ops.zeros_like(probabilities[..., 0]) + ops.cast(first, "float32")

    def _check_experts(self):
        counts = {"image": self.image_experts, "text": self.text_experts}
        total = self.num_predicted_experts
        for name, count in counts.items():
            if count is not None and not self.num_selected_experts <= count <= total:
                raise ValueError(
                    f"`{name}_experts` must lie between the number of choices, "
                    f"{self.num_selected_experts}, and that of experts, {total}. "
                    f"Received: {name}_experts={count}."
                )
        if sum(total if c is None else c for c in counts.values()) < total:
            raise ValueError(
                "Some experts would be used by neither modality: `image_experts` and "
                f"`text_experts` must add up to at least {total}. Received: "
                f"image_experts={self.image_experts}, "
                f"text_experts={self.text_experts}."
            )

    def get_config(self):
        config = super().get_config()
        # Here it is one of `losses`.
        del config["z_loss_weight"]
        losses = map(keras.saving.serialize_keras_object, self.routing_losses)
        return {
            **config,
            "num_selected_experts": self.num_selected_experts,
            "priority": self.priority,
            "losses": list(losses),
            "loss_weight": self.loss_weight,
            "per_modality": self.per_modality,
            "image_experts": self.image_experts,
            "text_experts": self.text_experts,
            "single_modality_capacity_factor": self.single_modality_capacity_factor,
            "noise_std": self.noise_std,
        }


def _members(modalities, num_tokens):
    """For each modality the `(1, S)` bool tensor of its tokens in a group."""
    names = [name for name, count in modalities for _ in range(count)]
    if not names or set(names) - set(MODALITIES) or num_tokens % len(names):
        raise ValueError(
            "This router has to know which tokens are of images and which of text: "
            "call `layers.MoE` on a dict with `'image'`, `'text'` or both, or pass "
            "`modalities=(('image', 64), ('text', 16))`. Received: "
            f"modalities={modalities} for {num_tokens} tokens in a group."
        )
    names = np.tile(names, num_tokens // len(names))
    return {
        name: ops.convert_to_tensor((names == name)[None]) for name, _ in modalities
    }


def _and(member, valid):
    return member if valid is None else ops.logical_and(member, valid)


def _checked_losses(losses):
    losses = [
        keras.saving.deserialize_keras_object(loss) if isinstance(loss, dict) else loss
        for loss in losses
    ]
    wrong = [loss for loss in losses if not isinstance(loss, RoutingLoss)]
    if wrong:
        raise ValueError(
            "`losses` are objects like `LocalEntropyLoss('text')` from "
            "`keras_softmoe.routers`, or the sets that `classic_losses` and "
            f"`entropy_losses` return. Received: losses with {wrong}."
        )
    if len(set(losses)) < len(losses):
        raise ValueError(f"Each loss is given once. Received: losses={losses}.")
    return tuple(losses)
