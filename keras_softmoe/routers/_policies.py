"""Policies: the parts of which a sparse router is put together.

A sparse router has one policy of each kind:

- capacity: how many slots an expert has (`Capacity`)
- scores: which numbers choose (`Softmax`, `Sinkhorn`, `SparseTransport`)
- assignment: who chooses whom, and the gates (`TokenChoice`, `ExpertChoice`)
- modalities: what differs between images and text, in `_modalities`

Each is a frozen record whose fields are settings of the router, by the same names, in
its configuration too. A field marked `live` may change after the router was made.
"""

import functools
from dataclasses import dataclass, field, fields
from typing import ClassVar

import numpy as np
from keras import ops

from keras_softmoe.checks import (
    check_bools,
    check_choice,
    check_numbers,
    check_whole_numbers,
)
from keras_softmoe.ops import (
    expert_capacity,
    expert_choice,
    sinkhorn_plan,
    sparse_transport_plan,
)
from keras_softmoe.ops.assignment import (
    PRIORITIES,
    assign_choices,
    check_keep_fraction,
    check_num_selected_experts,
    kept_tokens,
)
from keras_softmoe.ops.capacity import MULTIPLE_OF, ROUNDING, ROUNDINGS
from keras_softmoe.ops.constants import tiny
from keras_softmoe.ops.selection import take_along, top_indices
from keras_softmoe.sharding.constraints import is_distributed

live = functools.partial(field, metadata={"live": True})


def settings_of(policies):
    """Dict from the names of settings to their values in some policies."""
    return {f.name: getattr(p, f.name) for p in policies for f in fields(p)}


def mutable_settings(policies):
    """Names of the settings that may change, of some policies or their classes."""
    return tuple(f.name for p in policies for f in fields(p) if "live" in f.metadata)


# === Capacity ===


@dataclass(frozen=True)
class Capacity:
    """Slots of an expert, by the number of choices."""

    capacity_factor: float | None = live(default=1.05)
    eval_capacity_factor: float | None = live(default=None)
    rounding: str = ROUNDING
    multiple_of: int | None = MULTIPLE_OF

    def __post_init__(self):
        if self.capacity_factor is not None:
            check_numbers(over=0, capacity_factor=self.capacity_factor)
        if self.eval_capacity_factor is not None:
            check_numbers(over=0, eval_capacity_factor=self.eval_capacity_factor)
        if self.multiple_of is not None:
            check_whole_numbers(0, multiple_of=self.multiple_of)
        check_choice("rounding", self.rounding, ROUNDINGS)

    def factor(self, training):
        """Slots per choice; `None` where all choices have room."""
        if not training and self.eval_capacity_factor is not None:
            return self.eval_capacity_factor
        return self.capacity_factor

    def slots(self, factor, num_tokens, choices, num_experts):
        """Slots per expert for a group: as many as tokens at most.

        Args:
            factor: float or `None`, slots per choice.
            num_tokens: int, tokens of the group.
            choices: int, choices of a token.
            num_experts: int.
        """
        if factor is None:
            return num_tokens
        capacity = expert_capacity(
            num_tokens * choices, num_experts, factor, self.rounding, self.multiple_of
        )
        # An expert is given no token twice.
        return min(capacity, num_tokens)


@functools.lru_cache(maxsize=256)
def slots_by_length(capacity, factor, largest, choices, num_experts):
    """`(largest + 1,)` int32 array: slots for 0, 1, ... tokens, one at least.

    Kept, since an eager call needs it each time. Arguments are those of
    `Capacity.slots`.
    """

    def slots(num_tokens):
        try:
            return capacity.slots(factor, num_tokens, choices, num_experts)
        except ValueError:
            # Of so few tokens alone it would be less than one slot.
            return 1

    return np.array([1, *map(slots, range(1, largest + 1))], "int32")


# === Scores ===


@dataclass(frozen=True)
class Softmax:
    """The probabilities themselves choose."""

    noise_std: float = 0.0
    # Gates are looked up in the probabilities, or in the scores that choose ("plan").
    combine: ClassVar[str] = "softmax"

    def __post_init__(self):
        check_numbers(least=0, noise_std=self.noise_std)

    def selection(self, logits, probabilities, slots, valid, limit):
        """The `(G, S, E)` scores that choose.

        Args:
            logits: `(G, S, E)` tensor, with noise in training.
            probabilities: `(G, S, E)` tensor, their softmax.
            slots: int, the slots of an expert.
            valid: `(G, S)` bool tensor or `None`.
            limit: `(G,)` int tensor, slots of an expert for each group by itself, or
                `None` where all have `slots`.
        """
        return probabilities


@dataclass(frozen=True)
class Sinkhorn:
    """A balanced plan of the logits chooses, see `ops.sinkhorn_plan`."""

    num_iterations: int = 20
    combine: str = "softmax"
    noise_std: float = 0.0

    def __post_init__(self):
        check_choice("combine", self.combine, ("softmax", "plan"))
        check_whole_numbers(1, num_iterations=self.num_iterations)
        check_numbers(least=0, noise_std=self.noise_std)

    def selection(self, logits, probabilities, slots, valid, limit):
        # The plan has a gradient only where the gates are made of it.
        if self.combine == "softmax":
            logits = ops.stop_gradient(logits)
        return sinkhorn_plan(logits, self.num_iterations, valid)


@dataclass(frozen=True)
class SparseTransport:
    """A balanced plan within the capacity, see `ops.sparse_transport_plan`."""

    num_iterations: int = 20
    learning_rate: float = 0.01
    combine: str = "softmax"
    noise_std: ClassVar[float] = 0.0

    def __post_init__(self):
        check_choice("combine", self.combine, ("softmax", "plan"))
        check_whole_numbers(1, num_iterations=self.num_iterations)
        check_numbers(over=0, learning_rate=self.learning_rate)

    def selection(self, logits, probabilities, slots, valid, limit):
        return sparse_transport_plan(
            probabilities,
            slots,
            num_iterations=self.num_iterations,
            learning_rate=self.learning_rate,
            valid=valid,
            sharded=is_distributed(),
            limit=limit,
        )


# === Assignment ===


@dataclass(frozen=True)
class ExpertChoice:
    """Every expert chooses its best tokens."""

    # Of a token, which slots are counted by.
    choices: ClassVar[int] = 1

    def check(self, num_experts, capacity):
        """Raise unless the policies of a router go together."""
        if capacity.capacity_factor is None:
            raise ValueError(
                "`capacity_factor` must be a positive number where experts choose, as "
                "many tokens as they have slots. Received: capacity_factor=None. Pass, "
                "for example, 1.0, or use a `SoftmaxTokenChoiceRouter`, which then "
                "keeps all choices."
            )

    def choose(self, selection):
        """The `(G, S, K)` experts that tokens choose, best first; `None` if none do."""
        return None

    def assign(self, selection, chosen, slots, valid, masks, seed):
        """`token` and `filled` of a `SlotRouting`, `(G, E, C)` each.

        Args:
            selection: `(G, S, E)` tensor, the scores that choose.
            chosen: what `choose` returned.
            slots: int, the slots of an expert.
            valid: `(G, S)` bool tensor or `None`.
            masks: dict from modalities to the `(1, S)` bool tensors of their tokens.
            seed: `keras.random.SeedGenerator`.
        """
        return expert_choice(selection, slots, valid, sharded=is_distributed())

    def gates(self, scores, chosen):
        """The `(G, S, E)` weights at which gates are looked up."""
        return scores


@dataclass(frozen=True)
class TokenChoice:
    """Every token chooses its best experts."""

    num_selected_experts: int = live(default=1)
    priority: str = live(default="position")
    keep_fraction: float = live(default=1.0)
    normalize_gates: bool = live(default=False)
    priorities: ClassVar[tuple] = PRIORITIES

    def __post_init__(self):
        check_whole_numbers(1, num_selected_experts=self.num_selected_experts)
        check_choice("priority", self.priority, self.priorities)
        check_numbers(keep_fraction=self.keep_fraction)
        check_keep_fraction(self.keep_fraction)
        check_bools(normalize_gates=self.normalize_gates)

    @property
    def choices(self):
        return self.num_selected_experts

    def check(self, num_experts, capacity):
        check_num_selected_experts(self.num_selected_experts, num_experts)

    def choose(self, selection):
        return top_indices(
            selection, self.num_selected_experts, sharded=is_distributed()
        )

    def assign(self, selection, chosen, slots, valid, masks, seed):
        return assign_choices(
            selection,
            chosen,
            slots,
            priority=self.rank(selection, masks),
            keep_fraction=self.keep_fraction,
            valid=valid,
            seed=seed,
            sharded=is_distributed(),
        )

    def rank(self, selection, masks):
        """The `priority` argument of `ops.token_choice`."""
        return self.priority

    def kept(self, selection, chosen, valid, seed):
        """`(G, S)` bool: the tokens that choose at all, where nothing is dropped."""
        return kept_tokens(
            selection, chosen, self.priority, self.keep_fraction, valid, seed=seed
        )

    def gates(self, scores, chosen):
        if not self.normalize_gates:
            return scores
        found = take_along(scores, chosen, axis=-1)
        total = ops.stop_gradient(ops.sum(found, axis=-1, keepdims=True))
        # Zero for padding in a plan, and where the probabilities of all choices have
        # come to nothing: there is no gate then.
        nothing = tiny(total)
        inverse = 1.0 / ops.maximum(total, nothing)
        # To numbers near 1 first, whose gradient has no square of a tiny one in it.
        inverse = ops.where(total > nothing, inverse, 0.0)
        total = ops.maximum(ops.sum(found * inverse, axis=-1, keepdims=True), 0.5)
        return scores * (inverse / total)
