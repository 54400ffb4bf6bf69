"""LIMoE's router: one choice of experts for the tokens of images and text."""

from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import (
    check_bools,
    check_choice,
    check_numbers,
    check_whole_numbers,
)
from keras_softmoe.ops.assignment import (
    PRIORITIES,
    assign_choices,
    check_num_selected_experts,
)
from keras_softmoe.ops.backend import top_indices
from keras_softmoe.ops.capacity import MULTIPLE_OF, ROUNDING
from keras_softmoe.ops.constants import lowest
from keras_softmoe.routers._router import check_num_experts
from keras_softmoe.routers._routing_losses import (
    MODALITIES,
    classic_losses,
    entropy_losses,
)
from keras_softmoe.routers._sparse import SparseRouter
from keras_softmoe.routers._token_choice import TokenChoiceRouter
from keras_softmoe.sharding import is_distributed
from keras_softmoe.types import Tensor

_FIRST = {"image_first": "image", "text_first": "text"}


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoERouter(SparseRouter):
    """Tokens of images and text choose among the same experts.

    A token chooses its most probable experts, as in V-MoE. What is new are losses that
    know the modality of a token: without them text, of which there is less, ended up
    with one expert or none in the paper.

    Args:
        num_experts: int, number of experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        capacity_factor: float, slots per choice while images and text are routed
            together. `None`: nothing is dropped, see `SoftmaxTokenChoiceRouter`.
        priority: which tokens are assigned first: `"sum"` (batch prioritized routing,
            by the sum of a token's `K` largest probabilities; for `K = 1` the same as
            `"max"`),
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
        rounding: `"round"` or `"ceil"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits that choose and weigh.
            The load loss is about it: 0 takes `losses` without a `LoadLoss`.
        eval_capacity_factor: float or `None`, `capacity_factor` outside training;
            `None` for the same.
        random_logits: bool, whether the logits are normal noise instead; `"permuted"`:
            each token's own, in random order. What routing at random does to a trained
            model (V-MoE, appendix E.1).
        kept_experts: `None`, or of a pruned router the experts that are left: a
            sequence of `num_experts` ints, ascending, under `num_predicted_experts`.
            Probabilities are still distributed among all experts that the model was
            trained with, and tokens choose among those that are left, by the
            probabilities that these have. So gates are as large as in training
            ("router-pred", appendix E.4). Not trained, it takes `losses=()`.
        num_predicted_experts: int, how many experts there were before. `None` for
            `num_experts`.
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`.

    Weights: `kernel` `(D, E)`, or `image_kernel` and `text_kernel` if `per_modality`.

    Call arguments:
        - `tokens`: `(G, S, D)` float tensor.
        - `valid`: optional `(G, S)` bool tensor, `False` for padding.
        - `modalities`: pairs of a modality's name and the number of its tokens, in the
          order in which they follow each other, again and again, in a group.
          `layers.MoE` passes them when it is called on a dict.

    Returns:
        `Decision` with a `SlotRouting`. In training, the mean of `auxiliary_loss` over
        the groups is added to the losses. It averages those of `losses` whose modality
        is there; entropies and importance are those of the probabilities without noise.

    Raises:
        ValueError: if a threshold is over `log(num_experts)`, the experts of the
            modalities leave some out, a token would choose more experts than its
            modality has, the modalities are not known, the kept experts are not
            `num_experts` different ones of those that there were, or another argument
            is not among the accepted values.

    Source: LIMoE, section 2 and appendices B (losses), C (priorities), D.1 (capacity
    for one modality) and E.1 to E.4 (`K > 1`, number of experts, kinds of routers,
    pruning).

    Examples:
        >>> router = ksm.routers.LIMoERouter(num_experts=8)
        >>> tokens = np.random.normal(size=(2, 24, 32))
        >>> decision = router(tokens, modalities=(("image", 16), ("text", 8)))
        >>> decision.routing.token.shape
        (2, 8, 3)
    """

    can_drop_nothing = True

    knows_modalities = True

    mutable_settings = (
        *SparseRouter.mutable_settings,
        "num_selected_experts",
        "priority",
        "single_modality_capacity_factor",
    )

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 1,
        capacity_factor: float | None = 1.05,
        priority: str = "sum",
        losses: Sequence | None = None,
        loss_weight: float = 0.04,
        per_modality: bool = False,
        image_experts: int | None = None,
        text_experts: int | None = None,
        single_modality_capacity_factor: float = 16.0,
        rounding: str = ROUNDING,
        multiple_of: int | None = MULTIPLE_OF,
        noise_std: float = 1.0,
        eval_capacity_factor: float | None = None,
        random_logits: bool = False,
        kept_experts: Sequence[int] | None = None,
        num_predicted_experts: int | None = None,
        **kwargs,
    ):
        check_num_experts(num_experts)
        check_whole_numbers(1, num_selected_experts=num_selected_experts)
        check_num_selected_experts(num_selected_experts, num_experts)
        counts = {
            "image_experts": image_experts,
            "text_experts": text_experts,
            "num_predicted_experts": num_predicted_experts,
        }
        counts = {name: n for name, n in counts.items() if n is not None}
        check_whole_numbers(1, **counts)
        check_numbers(loss_weight=loss_weight)
        check_bools(per_modality=per_modality)
        check_choice("priority", priority, (*PRIORITIES, *_FIRST))
        check_numbers(
            over=0, single_modality_capacity_factor=single_modality_capacity_factor
        )
        self.num_selected_experts = num_selected_experts
        self.priority = priority
        self.loss_weight = loss_weight
        self.per_modality = per_modality
        self.image_experts = image_experts
        self.text_experts = text_experts
        self.single_modality_capacity_factor = single_modality_capacity_factor
        self.kept_experts = _checked_kept_experts(
            kept_experts, num_experts, num_predicted_experts
        )
        self._num_predicted_experts = num_predicted_experts or num_experts
        self._check_experts()
        super().__init__(
            num_experts,
            capacity_factor=capacity_factor,
            rounding=rounding,
            multiple_of=multiple_of,
            noise_std=noise_std,
            # All of them, the load loss without noise too: that is an error.
            losses=self.default_losses() if losses is None else losses,
            eval_capacity_factor=eval_capacity_factor,
            random_logits=random_logits,
            **kwargs,
        )

    @property
    def num_predicted_experts(self) -> int:
        """Int, the experts among which probabilities are distributed."""
        return self._num_predicted_experts

    @property
    def num_logits(self) -> int:
        # Of two kernels both are applied to all tokens.
        return self.num_predicted_experts * (1 + self.per_modality)

    @property
    def num_directions(self) -> int:
        is_pruned = self.kept_experts is not None
        return 0 if self.per_modality or is_pruned else self.num_experts

    def default_losses(self) -> tuple:
        return classic_losses() + entropy_losses(
            self.num_predicted_experts, num_selected_experts=self.num_selected_experts
        )

    def build(self, tokens_shape):
        kernels = ["kernel"]
        if self.per_modality:
            kernels = [f"{name}_kernel" for name in MODALITIES]
        for name in kernels:
            setattr(self, name, self.add_kernel(tokens_shape, name))

    def call(self, tokens, valid=None, training=False, modalities=(), num_tokens=None):
        masks = self.modality_masks(tokens.shape[1], modalities)
        return self.route(tokens, valid, training, masks, num_tokens)

    def modality_masks(
        self, group_tokens: int, modalities: Sequence = (), **kwargs
    ) -> dict:
        names = [name for name, count in modalities for _ in range(count)]
        if not names or set(names) - set(MODALITIES) or group_tokens % len(names):
            raise ValueError(
                "This router has to know which tokens are of images and which of text: "
                "call `layers.MoE` on a dict with `'image'`, `'text'` or both, or pass "
                "`modalities=(('image', 64), ('text', 16))`. Received: "
                f"modalities={modalities} for {group_tokens} tokens in a group."
            )
        names = np.tile(names, group_tokens // len(names))
        return {
            name: ops.convert_to_tensor((names == name)[None]) for name, _ in modalities
        }

    def predict_logits(self, tokens: Tensor, masks: dict) -> Tensor:
        if not self.per_modality:
            return ops.matmul(tokens, self.kernel)
        if len(masks) == 1:
            (name,) = masks
            return ops.matmul(tokens, getattr(self, f"{name}_kernel"))
        image, text = (
            ops.matmul(tokens, getattr(self, f"{name}_kernel")) for name in MODALITIES
        )
        return ops.where(ops.expand_dims(masks["image"], -1), image, text)

    def mask_logits(self, logits: Tensor, masks: dict) -> Tensor:
        for name, mask in masks.items():
            masked = self._masked_experts(name)
            if masked.any():
                # (1, S, E)
                masked = ops.logical_and(ops.expand_dims(mask, -1), masked)
                # No noise brings it back.
                logits = ops.where(masked, lowest(logits), logits)
        return logits

    def probabilities_of(self, probabilities: Tensor) -> Tensor:
        if self.kept_experts is None:
            return probabilities
        return ops.take(probabilities, np.array(self.kept_experts), axis=-1)

    @property
    def choices_per_token(self) -> int | None:
        return self.num_selected_experts

    def choose(self, selection: Tensor) -> Tensor | None:
        return top_indices(
            selection, self.num_selected_experts, sharded=is_distributed()
        )

    def assign(
        self,
        selection: Tensor,
        chosen: Tensor,
        capacity: int,
        valid: Tensor | None,
        masks: dict,
    ) -> tuple[Tensor, Tensor]:
        priority = self.priority
        if priority in _FIRST:
            first = masks.get(_FIRST[priority])
            priority = "position"
            if first is not None:
                priority = ops.zeros_like(selection[..., 0])
                priority = priority + ops.cast(first, "float32")
        return assign_choices(
            selection,
            chosen,
            capacity,
            priority=priority,
            valid=valid,
            seed=self.seed_generator,
            sharded=is_distributed(),
        )

    def total_loss(self, losses: Sequence) -> Tensor:
        return self.loss_weight * (super().total_loss(losses) / len(losses))

    def capacity(
        self, num_tokens: int, training: bool = False, single_modality: bool = False
    ) -> int:
        masks = MODALITIES[:1] if single_modality else ()
        return self.slots(num_tokens, self.slots_per_choice(training, masks))

    def slots_per_choice(
        self, training: bool = False, masks: dict | Sequence = ()
    ) -> float:
        if len(masks) == 1 and self.capacity_factor is not None:
            return self.single_modality_capacity_factor
        return super().slots_per_choice(training)

    def _masked_experts(self, modality):
        """`(E,)` bool array: the experts that a modality must not use."""
        num_experts = self.num_predicted_experts
        index = np.arange(num_experts)
        if modality == "image":
            return index >= (self.image_experts or num_experts)
        return index < num_experts - (self.text_experts or num_experts)

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
        is_pruned = self.kept_experts is not None
        return {
            **super().get_config(),
            "num_selected_experts": self.num_selected_experts,
            "priority": self.priority,
            "loss_weight": self.loss_weight,
            "per_modality": self.per_modality,
            "image_experts": self.image_experts,
            "text_experts": self.text_experts,
            "single_modality_capacity_factor": self.single_modality_capacity_factor,
            "noise_std": self.noise_std,
            "kept_experts": self.kept_experts,
            "num_predicted_experts": self.num_predicted_experts if is_pruned else None,
        }


# The settings that any of the routers has, which may change after it was made.
MUTABLE_SETTINGS = tuple(
    dict.fromkeys((*TokenChoiceRouter.mutable_settings, *LIMoERouter.mutable_settings))
)


class PrunedLIMoERouter:
    """Another name of a `LIMoERouter` with `kept_experts`, which saved files may have.

    What it makes is a `LIMoERouter`, and no instance of this class.

    Args:
        num_experts: int, number of experts that are left.
        kept_experts: see `LIMoERouter`.
        num_predicted_experts: int, how many there were.
        losses: as in `LIMoERouter`, none by default.
        **kwargs: as in `LIMoERouter`.

    Returns:
        `LIMoERouter`.

    Source: LIMoE, appendix E.4.

    Examples:
        >>> router = ksm.routers.PrunedLIMoERouter(2, (0, 5), num_predicted_experts=8)
        >>> type(router).__name__
        'LIMoERouter'
    """

    def __new__(
        cls, num_experts, kept_experts, num_predicted_experts, losses=(), **kwargs
    ):
        return LIMoERouter(
            num_experts,
            kept_experts=kept_experts,
            num_predicted_experts=num_predicted_experts,
            losses=losses,
            **kwargs,
        )

    @classmethod
    def from_config(cls, config: dict) -> "PrunedLIMoERouter":
        return cls(**config)


keras.saving.get_custom_objects()["keras_softmoe>PrunedLIMoERouter"] = PrunedLIMoERouter


def _checked_kept_experts(kept_experts, num_experts, num_predicted_experts):
    if kept_experts is None:
        if num_predicted_experts not in (None, num_experts):
            raise ValueError(
                "A router that predicts more experts than there are has to know which "
                "of them are left. Received: kept_experts=None, "
                f"num_experts={num_experts}, "
                f"num_predicted_experts={num_predicted_experts}."
            )
        return None
    kept_experts = tuple(int(expert) for expert in kept_experts)
    total = num_predicted_experts or num_experts
    inside = set(kept_experts) <= set(range(total))
    if list(kept_experts) != sorted(set(kept_experts)) or not inside:
        raise ValueError(
            "`kept_experts` counts the experts that are left from 0, ascending, "
            f"under {total}. Received: kept_experts={kept_experts}."
        )
    if len(kept_experts) != num_experts:
        raise ValueError(
            "`num_experts` is the number of experts that are left. Received: "
            f"num_experts={num_experts}, kept_experts={kept_experts}."
        )
    return kept_experts
