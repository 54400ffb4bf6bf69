"""What all learned sparse routers share."""

import functools
import warnings

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import check_choice, check_numbers, check_whole_numbers
from keras_softmoe.costs import LayerCost
from keras_softmoe.ops import SlotRouting, expert_capacity
from keras_softmoe.ops.backend import normal_like, take_along
from keras_softmoe.ops.capacity import ROUNDINGS
from keras_softmoe.ops.choices import choice_routing
from keras_softmoe.routers._router import Decision, Router
from keras_softmoe.routers._routing_losses import (
    GShardLoss,
    ImportanceLoss,
    LoadLoss,
    Routed,
    ZLoss,
    checked_losses,
    serialize_loss,
)

# How losses were named before they were objects, in the order in which they are added.
_NAMED_LOSSES = {
    "importance_loss_weight": ImportanceLoss,
    "load_loss_weight": LoadLoss,
    "gshard_loss_weight": GShardLoss,
    "z_loss_weight": ZLoss,
}


class SparseRouter(Router):
    """Base class of the routers that learn a score for each token and expert.

    The steps are the same for all: logits, noise in training, probabilities, selection
    scores, slot assignment, gates, losses. Subclasses fill in the ones that differ:
    `assign` and, where they need to, `predict_logits`, `probabilities_of`,
    `selection_scores`, `choose`, `weigh` and `total_loss`.

    Args:
        num_experts: int, number of experts.
        capacity_factor: float, slots per choice; `None`, only where tokens choose, for
            room for all choices.
        rounding: `"round"` or `"ceil"`, see `ops.expert_capacity`.
        multiple_of: int or `None`, see `ops.expert_capacity`.
        noise_std: float. In training, normal noise of standard deviation
            `noise_std / num_experts` is added to the logits. The load loss is about it:
            without noise there is none, and a `LoadLoss` in `losses` is refused.
        losses: sequence of `RoutingLoss`es. `None` for those of `default_losses`. A
            frozen router (`trainable` is `False`) adds none, see `Router`.
        eval_capacity_factor: float or `None`, slots per choice outside training;
            `None` for the same as in training.
        combine: `"softmax"` or `"plan"`: whether gates are softmax probabilities or
            the selection scores.
        random_logits: what routing at random does to a trained model (V-MoE, appendix
            E.1). `True`: the logits are normal noise and the tokens are not looked at.
            `"permuted"`: the logits of each token are permuted among the experts, drawn
            anew for each token and call, so that probabilities and gates stay as large
            as they are. `False`: neither.
        **kwargs: `name` and `trainable`, as in `keras.layers.Layer`; also the weights
            of losses by the names that saved files have for them
            (`importance_loss_weight`, ...).

    Weights: `kernel` `(D, E)`.
    """

    knows_num_tokens = True

    # Whether `capacity_factor=None` has a meaning.
    can_drop_nothing = False

    # Whether the gates feel the noise, or only the slot assignment does.
    noisy_gates = True

    mutable_settings = ("capacity_factor", "eval_capacity_factor", "random_logits")

    # Names in files of older versions, which the constructor still takes.
    former_settings = tuple(_NAMED_LOSSES)

    def __init__(
        self,
        num_experts,
        *,
        capacity_factor,
        rounding,
        multiple_of,
        noise_std=0.0,
        losses=None,
        eval_capacity_factor=None,
        combine="softmax",
        random_logits=False,
        **kwargs,
    ):
        check_choice("combine", combine, ("softmax", "plan"))
        if capacity_factor is not None:
            check_numbers(over=0, capacity_factor=capacity_factor)
        elif not self.can_drop_nothing:
            raise ValueError(
                "`capacity_factor` must be a positive number where experts choose, as "
                "many tokens as they have slots. Received: capacity_factor=None for a "
                f"`{type(self).__name__}`. Pass, for example, 1.0, or take a "
                "`SoftmaxTokenChoiceRouter`, which keeps all choices then."
            )
        if eval_capacity_factor is not None:
            check_numbers(over=0, eval_capacity_factor=eval_capacity_factor)
        if multiple_of is not None:
            check_whole_numbers(0, multiple_of=multiple_of)
        check_numbers(least=0, noise_std=noise_std)
        check_choice("random_logits", random_logits, (False, True, "permuted"))
        check_choice("rounding", rounding, ROUNDINGS)
        named = {name: kwargs.pop(name) for name in _NAMED_LOSSES if name in kwargs}
        super().__init__(num_experts, **kwargs)
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.rounding = rounding
        self.multiple_of = multiple_of
        self.noise_std = noise_std
        self.combine = combine
        self.random_logits = random_logits
        if losses is None:
            losses = self.default_losses()
            if named:
                losses = _with_weights(losses, named)
            if not noise_std:
                if named.get("load_loss_weight"):
                    warnings.warn(
                        "The load loss is about the noise of the router, so without "
                        "noise it is left out. Received: noise_std=0, load_loss_weight="
                        f"{named['load_loss_weight']}. Make the noise positive, or "
                        "leave the weight out.",
                        stacklevel=3,
                    )
                losses = [loss for loss in losses if not isinstance(loss, LoadLoss)]
        elif named:
            raise ValueError(
                "Weights of losses are part of the losses. Received: losses and "
                f"{', '.join(named)}. Pass, for example, "
                "`losses=(ImportanceLoss(weight=0.005),)` alone."
            )
        self.routing_losses = checked_losses(
            losses, self.num_predicted_experts, self.choices_per_token, noise_std
        )
        # Always there: a setting that needs it can be switched on later.
        self.seed_generator = keras.random.SeedGenerator()

    @property
    def num_predicted_experts(self):
        """Int, the experts among which probabilities are distributed."""
        return self.num_experts

    @property
    def choices_per_token(self):
        """Int, the choices of a token, which `capacity` makes room for."""
        return 1

    def default_losses(self):
        """The losses of a router that is given none."""
        return ()

    def build(self, tokens_shape):
        if tokens_shape[1] is not None:
            self.check_group(tokens_shape[1])
        self.kernel = self.add_kernel(tokens_shape, "kernel")

    def check_group(self, num_tokens):
        # An error, if there is no slot at all
        self.capacity(num_tokens)

    def add_kernel(self, tokens_shape, name):
        """A new weight that maps tokens to logits."""
        return self.add_weight(
            shape=(tokens_shape[-1], self.num_predicted_experts),
            initializer="lecun_normal",
            name=name,
        )

    def call(self, tokens, valid=None, training=False, num_tokens=None):
        return self.route(tokens, valid, training, {}, num_tokens)

    def route(self, tokens, valid, training, masks, num_tokens=None):
        """The `Decision` for a batch of groups.

        Args:
            tokens: `(G, S, D)` float tensor.
            valid: `(G, S)` bool tensor, `False` for padding, or `None`.
            training: bool.
            masks: dict from modalities to the `(1, S)` bool tensors of their tokens;
                empty for a router that knows no modalities.
            num_tokens: optional `(G,)` int tensor, the tokens of each group for which
                there are slots; all `S` if `None`.
        """
        # (G, S, E)
        logits = self.predict_logits(tokens, masks)
        if self.random_logits:
            noise = self._noise_like(logits)
            if self.random_logits == "permuted":
                order = ops.argsort(noise, axis=-1)
                logits = take_along(logits, order, axis=-1)
            else:
                logits = noise
        logits = self.mask_logits(logits, masks)
        noisy_logits = logits
        if training and self.noise_std:
            noisy_logits = logits + self._logits_std * self._noise_like(logits)
        routed = self._routed(logits, noisy_logits, valid, masks)
        probabilities = self.probabilities_of(routed.noisy_probabilities)

        capacity_factor = self.slots_per_choice(training, masks)
        capacity = self.slots(tokens.shape[1], capacity_factor)
        limit = None
        if num_tokens is not None and capacity_factor is not None:
            limit = self._group_limit(num_tokens, tokens.shape[1], capacity_factor)
        selection = self.selection_scores(
            noisy_logits, probabilities, capacity, valid, limit
        )
        chosen = self.choose(selection)
        if self.combine == "plan":
            scores = selection
        elif self.noisy_gates:
            scores = probabilities
        else:
            scores = routed.probabilities
        scores = self.weigh(scores, chosen)
        if capacity_factor is None:
            kept = self.kept_tokens(selection, chosen, valid)
            routing = choice_routing(scores, chosen, kept)
        else:
            token, filled = self.assign(selection, chosen, capacity, valid, masks)
            if limit is not None:
                token, filled = _first_slots(token, filled, limit)
            routing = SlotRouting(token, filled, gates(scores, token, filled))
        summary = {
            "logits": logits,
            "probabilities": probabilities,
            "selection": selection,
        }
        if training:
            auxiliary_loss = self._auxiliary_loss(routed)
            if auxiliary_loss is not None:
                summary["auxiliary_loss"] = auxiliary_loss
                # A frozen router could not follow it, only the tokens could.
                if self.trainable:
                    loss = _mean_of_groups(auxiliary_loss, num_tokens)
                    # In the dtype of the loss to which Keras adds it
                    self.add_loss(ops.cast(loss, keras.config.floatx()))
        return Decision(routing, summary)

    def complete(self, decision, tokens, valid, **kwargs):
        summary = decision.summary
        if "auxiliary_loss" not in summary:
            masks = self.modality_masks(tokens.shape[1], **kwargs)
            logits = summary["logits"]
            routed = self._routed(logits, logits, valid, masks)
            # In training `call` has found that none applies.
            loss = None if kwargs.get("training") else self._auxiliary_loss(routed)
            if loss is not None:
                summary = {**summary, "auxiliary_loss": loss}
                decision = decision._replace(summary=summary)
        return super().complete(decision, tokens, valid, **kwargs)

    @property
    def num_directions(self):
        return self.num_experts

    def set_directions(self, directions):
        self.kernel.assign(np.transpose(directions))

    # === Steps that subclasses may replace ===

    def modality_masks(self, group_tokens, **kwargs):
        """Dict from modalities to the `(1, S)` bool tensors of their tokens."""
        return {}

    def predict_logits(self, tokens, masks):
        """`(G, S, E)` logits."""
        return ops.matmul(tokens, self.kernel)

    def mask_logits(self, logits, masks):
        """The logits, without experts that a modality must not use."""
        return logits

    def probabilities_of(self, probabilities):
        """The probabilities of the experts that there are."""
        return probabilities

    def selection_scores(self, logits, probabilities, capacity, valid, limit):
        """The `(G, S, E)` scores that choose the slots.

        `limit`, if not `None`, is the `(G,)` capacity of each group by itself.
        """
        return probabilities

    def choose(self, selection):
        """The `(G, S, K)` experts that tokens choose, best first; `None` if none do."""
        return None

    def kept_tokens(self, selection, chosen, valid):
        """`(G, S)` bool: the tokens that choose at all, where nothing is dropped."""
        return valid

    def assign(self, selection, chosen, capacity, valid, masks):
        """`token` and `filled` of a `SlotRouting`, from the selection scores."""
        raise TypeError(
            f"`{type(self).__name__}` is abstract: it assigns no slots. Use one of the "
            "routers in `keras_softmoe.routers`, or implement `assign`."
        )

    def weigh(self, scores, chosen):
        """The `(G, S, E)` weights at which gates are looked up."""
        return scores

    def total_loss(self, losses):
        """One `(G,)` tensor from the list of weighted losses, at least one."""
        return sum(losses[1:], start=losses[0])

    # === Capacity and cost ===

    def capacity(self, num_tokens, training=False):
        return self.slots(num_tokens, self.slots_per_choice(training))

    def num_rows(self, num_tokens, training=False):
        if self.slots_per_choice(training) is not None:
            return None
        return num_tokens * self.choices_per_token

    def slots_per_choice(self, training=False, masks=()):
        """The capacity factor for groups with tokens of some modalities.

        `None` where all choices have room.
        """
        if not training and self.eval_capacity_factor is not None:
            return self.eval_capacity_factor
        return self.capacity_factor

    def slots(self, num_tokens, capacity_factor):
        """Slots per expert for a group of `num_tokens` tokens and a given factor."""
        return _slots(num_tokens, capacity_factor, *self._capacity_settings())

    def _group_limit(self, num_tokens, largest, capacity_factor):
        """`(G,)` int: the capacity of groups of so many tokens, one slot at least."""
        table = _table_of_slots(largest, capacity_factor, *self._capacity_settings())
        return ops.take(ops.convert_to_tensor(table), num_tokens, axis=0)

    def _capacity_settings(self):
        return (
            self.choices_per_token,
            self.num_experts,
            self.rounding,
            self.multiple_of,
        )

    def cost(self, tokens_shape, training=False):
        num_groups, num_tokens, width = tokens_shape
        num_tokens *= num_groups
        return LayerCost(
            float32_weights=width * self.num_logits,
            products=num_tokens * width * self.num_logits,
            # Logits, probabilities and scores
            kept_float32=3 * num_tokens * self.num_experts,
        )

    @property
    def num_logits(self):
        """Int, products with a token of all kernels together."""
        return self.num_predicted_experts

    # === Losses ===

    def _routed(self, logits, noisy_logits, valid, masks):
        valid_of = {name: _and(mask, valid) for name, mask in masks.items()}
        return Routed(
            logits,
            noisy_logits,
            {None: valid, **valid_of},
            self.choices_per_token,
            self._logits_std,
        )

    def _auxiliary_loss(self, routed):
        """`(G,)`, `None` if no loss applies."""
        losses = [
            loss(routed) if loss.weight == 1.0 else loss.weight * loss(routed)
            for loss in self.routing_losses
            if loss.applies(routed)
        ]
        return self.total_loss(losses) if losses else None

    @property
    def _logits_std(self):
        return self.noise_std / self.num_experts

    def _noise_like(self, logits):
        return normal_like(logits, self.seed_generator)

    @classmethod
    def from_config(cls, config):
        # Files have a weight of the load loss, which did nothing, beside no noise.
        if config.get("noise_std") == 0:
            config = {k: v for k, v in config.items() if k != "load_loss_weight"}
        return super().from_config(config)

    def get_config(self):
        return {
            **super().get_config(),
            "capacity_factor": self.capacity_factor,
            "eval_capacity_factor": self.eval_capacity_factor,
            "rounding": self.rounding,
            "multiple_of": self.multiple_of,
            "losses": [serialize_loss(loss) for loss in self.routing_losses],
            "random_logits": self.random_logits,
        }


def gates(scores, token, filled):
    """Look up the score of each slot's token at its expert; 0 where empty."""
    # (G, E, S)
    by_expert = ops.transpose(scores, (0, 2, 1))
    return ops.where(filled, take_along(by_expert, token, axis=-1), 0.0)


def _slots(num_tokens, capacity_factor, choices, num_experts, rounding, multiple_of):
    """An expert is given no token twice, so at most as many as there are tokens."""
    if capacity_factor is None:
        return num_tokens
    capacity = expert_capacity(
        num_tokens * choices, num_experts, capacity_factor, rounding, multiple_of
    )
    return min(capacity, num_tokens)


@functools.lru_cache(maxsize=256)
def _table_of_slots(largest, *settings):
    """`(largest + 1,)` int32 array: `_slots` of 0, 1, ... tokens, one at least.

    Kept, since an eager call needs it each time.
    """

    def slots(count):
        try:
            return _slots(count, *settings)
        except ValueError:
            # Of that many tokens alone it would be under one slot.
            return 1

    return np.array([1, *map(slots, range(1, largest + 1))], "int32")


def _first_slots(token, filled, limit):
    """The slots that a smaller capacity, `(G,)` int, leaves of an assignment.

    They are filled in the order of the queue, so it is the first ones.
    """
    slots = ops.arange(filled.shape[-1], dtype="int32")
    filled = ops.logical_and(filled, slots < ops.reshape(limit, (-1, 1, 1)))
    return ops.where(filled, token, 0), filled


def _mean_of_groups(losses, num_tokens):
    """Mean over the groups that have tokens; 0 if none has."""
    if num_tokens is None:
        groups = losses.shape[0]
        if groups is not None and groups != 0:
            return ops.mean(losses)
        # On TensorFlow an empty batch may show only when the graph runs.
        groups = ops.cast(ops.shape(losses)[0], losses.dtype)
        return ops.sum(losses) / ops.maximum(groups, 1.0)
    has_tokens = num_tokens > 0
    count = ops.maximum(ops.sum(ops.cast(has_tokens, losses.dtype)), 1.0)
    return ops.sum(ops.where(has_tokens, losses, 0.0)) / count


def _and(mask, valid):
    return mask if valid is None else ops.logical_and(mask, valid)


def _with_weights(losses, weights):
    """Losses with weights by their former names, those without weight left out."""
    by_kind = {type(loss): loss.weight for loss in losses}
    by_kind |= {_NAMED_LOSSES[name]: weight for name, weight in weights.items()}
    return [
        kind(weight=by_kind[kind])
        for kind in _NAMED_LOSSES.values()
        if by_kind.get(kind)
    ]
