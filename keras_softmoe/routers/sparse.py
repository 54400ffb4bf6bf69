"""The sparse router: one algorithm, made of policies."""

import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import TypedDict

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import check_choice, check_names, keyword_names, quote
from keras_softmoe.keras_adapter.layers import flatten_layers
from keras_softmoe.keras_adapter.runs import before_compiling_distillers
from keras_softmoe.ops import SlotRouting
from keras_softmoe.ops.assignment import gates_of_slots
from keras_softmoe.ops.kernels import matmul, take_rows
from keras_softmoe.ops.numbers import at_least, normal_like, positions, where
from keras_softmoe.ops.routing import choice_routing
from keras_softmoe.ops.selection import take_along
from keras_softmoe.routers.losses import (
    FORMER_WEIGHTS,
    Routed,
    RoutingLoss,
    checked_losses,
    serialize_loss,
    with_losses,
)
from keras_softmoe.routers.router import Decision, Router
from keras_softmoe.routers.scores import Capacity, PolicySettings, slots_by_length
from keras_softmoe.sharding.constraints import is_distributed


class SparseSettings(TypedDict, total=False):
    """Keyword arguments of all sparse routers, see `SoftmaxTokenChoiceRouter`."""

    losses: Sequence[RoutingLoss] | None
    eval_capacity_factor: float | str | None
    rounding: str
    multiple_of: int | None
    random_logits: bool | str
    name: str | None
    trainable: bool


class SparseRouter(Router, PolicySettings):
    """A router that learns a score for each token and expert.

    `_decide` has all steps. Policies implement the steps that differ between routers. A
    subclass only makes the policies from the arguments of its constructor; `get_config`
    reads the arguments back from the policies.

    Args:
        num_experts: int, number of experts.
        scores: `Softmax`, `TokenScores`, `Logits`, `Sinkhorn` or `SparseTransport`.
        assignment: `TokenChoice`, `ExpertChoice` or `Race`.
        modalities: `Modalities`; `None` if images and text are not distinguished.
        losses: sequence of `RoutingLoss`es. `None` for `default_losses`, without the
            load loss if there is no noise.
        loss_weight: float or `None`. If given, the total is this weight times the mean
            of the weighted losses; if `None`, their sum.
        random_logits: see `SoftmaxTokenChoiceRouter`.
        **settings: fields of `Capacity`; `name` and `trainable`.

    Weights: `kernel` `(D, E)`, or those that `modalities` names; and those without
    gradient in the `state` of scores and assignment, which start at zero.
    """

    knows_num_tokens = True
    # Whether the noise changes the gates, or only the slot assignment
    noisy_gates = True
    # Default of the argument `losses`
    default_losses = ()

    def __init__(
        self,
        num_experts,
        scores,
        assignment,
        modalities=None,
        *,
        losses=None,
        loss_weight=None,
        random_logits=False,
        **settings,
    ):
        of_capacity = [field.name for field in fields(Capacity)]
        known = [*SparseSettings.__annotations__, *of_capacity, "dtype"]
        if not settings.keys() <= {*known}:
            accepted = [*keyword_names(type(self).__init__), *known]
            check_names(f"`{type(self).__name__}`", settings, accepted)
        slots = {name: settings.pop(name) for name in of_capacity if name in settings}
        super().__init__(num_experts, **settings)
        # Policies check their own fields, and then whether they fit together.
        self.capacity_policy = Capacity(**slots)
        self.scores = scores
        self.assignment = assignment
        self.modalities = modalities
        self._kernel_names = modalities.kernels if modalities else ("kernel",)
        assignment.check(num_experts, self.capacity_policy)
        if modalities is not None:
            modalities.check(num_experts, assignment.choices)
        check_choice("random_logits", random_logits, (False, True, "permuted"))
        self.random_logits = random_logits
        if losses is None:
            # The load loss is defined through the noise.
            losses = [
                loss
                for loss in self.default_losses
                if scores.noise_std or not loss.needs_noise
            ]
        self.routing_losses = checked_losses(
            losses, self.num_predicted_experts, scores, assignment
        )
        self._objects = {"losses": self.routing_losses}
        self.loss_weight = loss_weight
        # Always made: `set_routing` may ask for random numbers later.
        self.seed_generator = keras.random.SeedGenerator()

    def build(self, tokens_shape):
        # Not for LIMoE: its number of slots depends on the modalities of a call.
        if tokens_shape[1] is not None and not self.knows_modalities:
            # Raises if there is no slot.
            self.capacity(tokens_shape[1])
        for name in self._kernel_names:
            kernel = self.add_weight(
                shape=(tokens_shape[-1], self.num_predicted_experts),
                initializer="lecun_normal",
                name=name,
            )
            setattr(self, name, kernel)
        state = {**self.scores.state, **self.assignment.state}
        for name, is_per_expert in state.items():
            weight = self.add_weight(
                shape=(self.num_experts,) * is_per_expert,
                initializer="zeros",
                trainable=False,
                # TensorFlow replicas each see a part of the batch.
                aggregation="mean",
                name=name,
            )
            setattr(self, name, weight)

    def call(self, tokens, valid=None, training=False, num_tokens=None):
        return self._decide(tokens, valid, training, num_tokens, {})

    def _decide(self, tokens, valid, training, num_tokens, masks):
        """Return the `Decision` for `(G, S, D)` tokens; `valid` is `False` for padding.

        `num_tokens` is `(G,)` ints or `None`, see `Router.knows_num_tokens`; `masks` a
        dict from the modalities of a LIMoE to the `(1, S)` masks of their tokens.
        """
        group_tokens, sharded = tokens.shape[1], is_distributed()
        # 1. Logits: the score of each expert for each token, (G, S, E)
        logits = noisy_logits = self._logits(tokens, masks)
        # 2. Noise, in training only: tokens also try experts that are not their best.
        if training and self.scores.noise_std:
            noise = normal_like(logits, self.seed_generator, self._logits_std)
            noisy_logits = logits + noise
        # 3. Probabilities: over the experts, from the logits with noise, (G, S, E)
        unpruned = probabilities = self.scores.probabilities(noisy_logits)
        if self.modalities is not None:
            probabilities = self.modalities.kept(unpruned)
        # 4. Slots of each expert, C; fewer in groups with few real tokens, (G,)
        factor = self._capacity_factor(training, len(masks))
        sizes = factor, group_tokens, self.assignment.choices, self.num_experts
        slots = self.capacity_policy.slots(*sizes)
        limit = None
        if num_tokens is not None and factor is not None:
            # A table, as the numbers may be known only when a compiled function runs
            table = slots_by_length(self.capacity_policy, *sizes)
            limit = take_rows(table.on(num_tokens), num_tokens)
        # 5. Choice: by scores that may be the probabilities or a balanced plan of them
        scores = self.scores.selection(noisy_logits, probabilities, slots, valid, limit)
        selection, chosen = self._choose(scores, valid, training, sharded)
        # 6. Gates: the weight of each expert in the output of a token, (G, S, E)
        gates = probabilities
        if self.scores.combine == "plan":
            gates = scores
        elif not self.noisy_gates and noisy_logits is not logits:
            gates = self.scores.probabilities(logits)
        if getattr(self.assignment, "normalize_gates", False):
            gates = self.assignment.normalized(gates, chosen)
        # 7. Assignment: tokens to slots, or rows for all choices if nothing is dropped
        seed = self.seed_generator
        has_rows = self.assignment.has_rows and not (sharded or self.pads_rows)
        if factor is None and has_rows:
            kept = self.assignment.kept(scores, chosen, valid, seed)
            routing = choice_routing(gates, chosen, kept)
        else:
            # (G, E, C) each
            known = {"valid": valid, "masks": masks, "seed": seed, "sharded": sharded}
            token, filled = self.assignment.assign(scores, chosen, slots, **known)
            if limit is not None:
                token, filled = _first_slots(token, filled, limit)
            gate = gates_of_slots(gates, token, filled)
            routing = SlotRouting(ops.cast(token, "int32"), filled, gate)
        summary = {
            "logits": logits,
            "probabilities": probabilities,
            "selection": selection,
        }
        if limit is not None:
            summary["capacity"] = limit
        # 8. Losses that balance the experts, in training only
        if training:
            routed = self._routed(logits, noisy_logits, unpruned, chosen, valid, masks)
            self._add_losses(summary, routed, num_tokens)
        return Decision(routing, summary)

    def _choose(self, scores, valid, training, sharded):
        """Return the `(G, S, E)` scores that choose, and the choices.

        A subclass with weights that follow the choices moves them here.
        """
        return scores, self.assignment.choose(scores, sharded)

    @property
    def differs_in_training(self) -> bool:
        """Bool, `True` if a call in training may differ from one outside of it."""
        has_state = self.scores.state or self.assignment.state
        learns = self.trainable and bool(self.routing_losses or has_state)
        factors = self._capacity_factor(True), self._capacity_factor(False)
        return learns or bool(self.scores.noise_std) or factors[0] != factors[1]

    # === Logits ===

    def _logits(self, tokens, masks):
        if self.modalities is None:
            logits = matmul(tokens, self.kernel)
        else:
            kernels = [getattr(self, name) for name in self._kernel_names]
            logits = self.modalities.logits(tokens, kernels, masks)
        if self.random_logits:
            # To measure the benefit of routing in a trained model: scores that say
            # nothing about the tokens, or the token's own for other experts
            noise = normal_like(logits, self.seed_generator)
            if self.random_logits == "permuted":
                noise = take_along(logits, ops.argsort(noise, axis=-1), axis=-1)
            logits = noise
        if self.modalities is not None:
            # Last: random scores do not open experts that are closed to a modality.
            logits = self.modalities.allowed(logits, masks)
        return logits

    @property
    def _logits_std(self):
        # As in V-MoE, whose noise has a standard deviation of 1 / E
        return self.scores.noise_std / self.num_experts

    @property
    def num_predicted_experts(self):
        """Int, number of experts in the softmax, including pruned ones."""
        predicted = self.modalities and self.modalities.num_predicted_experts
        return predicted or self.num_experts

    @property
    def num_directions(self):
        policy = self.modalities
        if policy and (policy.per_modality or policy.kept_experts is not None):
            return 0
        return self.num_experts

    def set_directions(self, directions):
        if not self.num_directions:
            super().set_directions(directions)
        self.kernel.assign(np.transpose(directions))

    # === Capacity ===

    @property
    def chooses_alone(self):
        # Not by a plan of a group, nor as one of the best tokens of a group
        policy = self.assignment
        is_own = policy.has_rows and not self.scores.compares_tokens
        return is_own and policy.keep_fraction == 1

    @property
    def choices_per_token(self):
        """Int, experts that a token chooses; 1 if experts choose.

        The capacity factor counts slots per choice.
        """
        return self.assignment.choices

    def capacity(self, num_tokens, training=False, single_modality=False):
        factor = self._capacity_factor(training, 1 if single_modality else 0)
        return self.capacity_policy.slots(
            factor, num_tokens, self.assignment.choices, self.num_experts
        )

    def num_rows(self, num_tokens, training=False):
        if self._capacity_factor(training) is not None or not self.assignment.has_rows:
            return None
        return num_tokens * self.choices_per_token

    def check_group(self, num_tokens):
        # Raises if there is no slot
        self.capacity(num_tokens)

    def _capacity_factor(self, training, num_modalities=0):
        """Return the capacity factor of a call; `None` if nothing is dropped."""
        # `num_modalities` is 0 for routers without modalities. Tokens of one modality
        # alone use a part of the experts, each of which then needs more slots.
        factor = self.capacity_policy.factors[bool(training)]
        if num_modalities == 1 and factor is not None:
            return self.modalities.single_modality_capacity_factor
        return factor

    # === Losses ===

    def _routed(self, logits, noisy_logits, noisy_probabilities, chosen, valid, masks):
        # A second softmax only where noise made a difference
        probabilities = noisy_probabilities
        if noisy_logits is not logits:
            probabilities = self.scores.probabilities(logits)
        # Losses of one modality are means over its real tokens, (G or 1, S).
        of_modalities = {
            name: mask if valid is None else mask & valid
            for name, mask in masks.items()
        }
        return Routed(
            logits=logits,
            noisy_logits=noisy_logits,
            probabilities=probabilities,
            noisy_probabilities=noisy_probabilities,
            chosen=chosen,
            valid={None: valid, **of_modalities},
            num_selected_experts=self.choices_per_token,
            noise_std=self._logits_std,
        )

    def _add_losses(self, summary, routed, num_tokens):
        auxiliary_loss = self._auxiliary_loss(routed)
        if auxiliary_loss is None:
            return
        summary["auxiliary_loss"] = auxiliary_loss
        # With a frozen router the loss would only train the layers before it.
        if not self.trainable:
            return
        # The mean over the groups with tokens, 0 if there are none
        if num_tokens is not None:
            has_tokens = num_tokens > 0
            count = at_least(ops.sum(ops.cast(has_tokens, auxiliary_loss.dtype)), 1.0)
            loss = ops.sum(where(has_tokens, auxiliary_loss, 0.0)) / count
        elif auxiliary_loss.shape[0]:
            loss = ops.mean(auxiliary_loss)
        else:
            # On TensorFlow the batch size may be known only when the graph runs.
            count = ops.cast(ops.shape(auxiliary_loss)[0], auxiliary_loss.dtype)
            loss = ops.sum(auxiliary_loss) / at_least(count, 1.0)
        # Keras adds losses in `floatx`.
        self.add_loss(ops.cast(loss, keras.config.floatx()))

    def _auxiliary_loss(self, routed):
        """Return the total loss, `(G,)`, or `None` if no loss applies."""
        losses = [
            loss(routed) if loss.weight == 1.0 else loss.weight * loss(routed)
            for loss in self.routing_losses
            if loss.applies(routed)
        ]
        if not losses:
            return None
        # Not from 0: a sum of tensors alone
        total = sum(losses[1:], start=losses[0])
        if self.loss_weight is None:
            return total
        return self.loss_weight * (total / len(losses))

    def complete(self, decision, tokens, valid, **kwargs):
        summary = decision.summary
        # In training `call` has added it already, if any loss applies.
        if "auxiliary_loss" not in summary and not kwargs.get("training"):
            masks = {}
            if self.modalities is not None:
                modalities = kwargs.get("modalities", ())
                masks = self.modalities.masks(tokens, modalities)
            logits, chosen = summary["logits"], None
            # Only the loss of a race depends on who won.
            if any(loss.needs_race for loss in self.routing_losses):
                selection, sharded = summary["selection"], is_distributed()
                _, chosen = self._choose(selection, valid, False, sharded)
            probabilities = self.scores.probabilities(logits)
            routed = self._routed(logits, logits, probabilities, chosen, valid, masks)
            loss = self._auxiliary_loss(routed)
            if loss is not None:
                summary = {**summary, "auxiliary_loss": loss}
                decision = decision._replace(summary=summary)
        return super().complete(decision, tokens, valid, **kwargs)

    # === Settings ===

    @property
    def mutable_settings(self):
        settings = (one for policy in self.policies for one in fields(policy))
        live = [one.name for one in settings if "live" in one.metadata]
        return (*live, "random_logits")

    @classmethod
    def from_config(cls, config):
        if not FORMER_WEIGHTS.keys().isdisjoint(config):
            config = with_losses(config, cls.default_losses)
        return super().from_config(config)

    def get_config(self):
        averaged = self.loss_weight is not None
        return {
            **super().get_config(),
            **{
                one.name: getattr(p, one.name)
                for p in self.policies
                for one in fields(p)
            },
            "losses": [serialize_loss(loss) for loss in self.routing_losses],
            **({"loss_weight": self.loss_weight} if averaged else {}),
            "random_logits": self.random_logits,
        }


def _first_slots(token, filled, limit):
    """Keep the first `limit` slots of each expert, `(G,)` int.

    Slots are filled by priority: a smaller capacity would have filled these.
    """
    slots = positions(filled.shape[-1], filled)
    filled = filled & (slots < limit[:, None, None])
    return where(filled, token, 0), filled


def _warn_of_losses_left_out(distiller):
    """Warn if the student of a `keras.distillation.Distiller` has balancing losses."""
    routers = [
        layer.path
        for layer in flatten_layers(distiller.student)
        if isinstance(layer, SparseRouter) and layer.trainable and layer.routing_losses
    ]
    if routers:
        warnings.warn(
            "`keras.distillation.Distiller` leaves out the balancing losses of "
            "routers; `keras_softmoe.training.Distiller` adds them. Received: a "
            f"student with the routers {quote(routers)}.",
            stacklevel=3,
        )


before_compiling_distillers(_warn_of_losses_left_out)
