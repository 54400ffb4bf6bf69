"""Policies of capacity and scores, and the base of all policies.

A sparse router has one policy of each kind: capacity (how many slots an expert has) and
scores (the numbers that choose) in this file; assignment (who chooses whom, and the
gates) in `assignment.py`; LIMoE's has modalities (images and text) in `limoe.py`.
"""

import dataclasses
import functools
from dataclasses import field, fields
from typing import ClassVar

import numpy as np
from keras import ops

from keras_softmoe.checks import check_choice, check_numbers, check_whole_numbers
from keras_softmoe.ops import sinkhorn_plan, sparse_transport_plan
from keras_softmoe.ops.capacity import (
    MULTIPLE_OF,
    ROUNDING,
    ROUNDINGS,
    rounded_capacity,
)
from keras_softmoe.ops.kernels import softmax
from keras_softmoe.ops.numbers import Constant
from keras_softmoe.sharding.constraints import is_distributed

live = functools.partial(field, metadata={"live": True})

# The settings of all policies that may change after the router was made
MUTABLE_SETTINGS = ["random_logits"]


class PolicySettings:
    """The fields of a router's policies as its properties, such as `router.priority`.

    `policy` adds them.
    """

    # Attributes of a router that hold its policies; `None` for no such policy
    policy_names = ("capacity_policy", "scores", "assignment", "modalities")

    @property
    def policies(self) -> list:
        """List of the policies of a router."""
        policies = [getattr(self, name) for name in self.policy_names]
        return [policy for policy in policies if policy is not None]


def policy(cls):
    """Make a class a policy: a frozen record, whose fields are settings of a router.

    They are arguments of its constructor and its configuration, under the same names,
    and its properties. A field made by `live` may change after the router was made.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    # Of any router: an attribute error says which have no such setting.
    for one in fields(cls):
        if not hasattr(PolicySettings, one.name):
            setattr(PolicySettings, one.name, _setting(one.name))
        if "live" in one.metadata and one.name not in MUTABLE_SETTINGS:
            MUTABLE_SETTINGS.append(one.name)
    return cls


def _setting(name):
    def holder(router):
        for attribute in router.policy_names:
            if hasattr(getattr(router, attribute), name):
                return attribute
        raise AttributeError(f"`{type(router).__name__}` has no setting `{name}`.")

    def read(router):
        return getattr(getattr(router, holder(router)), name)

    def change(router, value):
        attribute = holder(router)
        policy = getattr(router, attribute)
        if all(name != f.name for f in fields(policy)):
            raise AttributeError(
                f"`{name}` of `{type(router).__name__}` is always {read(router)!r}: "
                f"leave it. Received: {value!r}."
            )
        setattr(router, attribute, dataclasses.replace(policy, **{name: value}))

    return property(read, change)


# === Capacity ===


# The capacity of predictions in which nothing is dropped
DROPLESS = "dropless"


@policy
class Capacity:
    """The number of slots of an expert."""

    capacity_factor: float | None = live(default=1.05)
    # `DROPLESS` for a router without capacity outside of training
    eval_capacity_factor: float | str | None = live(default=None)
    rounding: str = ROUNDING
    multiple_of: int | None = MULTIPLE_OF

    def __post_init__(self):
        if self.capacity_factor is not None:
            check_numbers(over=0, capacity_factor=self.capacity_factor)
        if self.eval_capacity_factor not in (None, DROPLESS):
            check_numbers(over=0, eval_capacity_factor=self.eval_capacity_factor)
        if self.multiple_of is not None:
            check_whole_numbers(0, multiple_of=self.multiple_of)
        check_choice("rounding", self.rounding, ROUNDINGS)
        other = self.eval_capacity_factor or self.capacity_factor
        # Outside of training, and in training; `None` if nothing is dropped
        factors = None if other == DROPLESS else other, self.capacity_factor
        vars(self).update(factors=factors)

    def slots(self, factor, num_tokens, choices, num_experts):
        """Return the slots of an expert: at most one for each token of a group.

        Args:
            factor: float or `None`, slots per choice.
            num_tokens: int, number of tokens in a group.
            choices: int, number of choices of a token.
            num_experts: int, number of experts.
        """
        if factor is None:
            return num_tokens
        # The settings were checked when the policy was made.
        capacity = rounded_capacity(
            num_tokens * choices, num_experts, factor, self.rounding, self.multiple_of
        )
        # A token takes at most one slot of an expert.
        return min(capacity, num_tokens)


@functools.lru_cache(maxsize=256)
def slots_by_length(capacity, factor, largest, choices, num_experts):
    """Return the slots for 0, 1, ... tokens, at least one, `(largest + 1,)`.

    Cached, as each eager call needs it. The arguments are as in `Capacity.slots`.
    """

    def slots(num_tokens):
        try:
            return capacity.slots(factor, num_tokens, choices, num_experts)
        except ValueError:
            # So few tokens would have less than one slot.
            return 1

    return Constant(np.array([1, *map(slots, range(1, largest + 1))], "int32"))


# === Scores ===


class Scores:
    """Base class of scores."""

    # Source of the gates: the probabilities, or the selection scores ("plan").
    combine = "softmax"
    # Noise on the logits in training
    noise_std = 0.0
    # Whether a bias takes part in the choice
    is_biased = False
    # Whether the probabilities of a token add up to 1
    adds_up = True
    # Whether the scores of a token depend on the other tokens of its group
    compares_tokens = False
    # Weights without gradient: names, and whether there is one for each expert
    state: ClassVar[dict] = {}

    def __post_init__(self):
        check_choice("combine", self.combine, ("softmax", "plan"))
        check_numbers(least=0, noise_std=self.noise_std)

    def probabilities(self, logits):
        """Return the `(G, S, E)` probabilities of `(G, S, E)` logits."""
        return softmax(logits, axis=-1)


@policy
class Softmax(Scores):
    """Selection by the probabilities."""

    noise_std: float = 0.0

    def selection(self, logits, probabilities, slots, valid, limit):
        """Return the `(G, S, E)` scores that choose.

        Args:
            logits: `(G, S, E)` tensor, with noise in training.
            probabilities: `(G, S, E)` tensor, `Scores.probabilities` of them.
            slots: int, number of slots of an expert.
            valid: `(G, S)` bool tensor or `None`.
            limit: `(G,)` int tensor, number of slots in each group, or `None` if all
                groups have `slots`.
        """
        return probabilities


@policy
class TokenScores(Softmax):
    """Selection by a softmax or sigmoid, and by a bias that balances the experts."""

    score: str = "softmax"
    bias_update_rate: float | None = live(default=None)
    bias_update_every: int = 1

    def __post_init__(self):
        check_numbers(least=0, noise_std=self.noise_std)
        check_choice("score", self.score, ("softmax", "sigmoid"))
        is_biased = self.bias_update_rate is not None
        if is_biased:
            check_numbers(least=0, bias_update_rate=self.bias_update_rate)
        check_whole_numbers(1, bias_update_every=self.bias_update_every)
        if self.bias_update_every > 1 and not is_biased:
            raise ValueError(
                "`bias_update_every` needs a `bias_update_rate`. Received: "
                f"bias_update_every={self.bias_update_every}, bias_update_rate=None."
            )
        state = {"bias": True} if is_biased else {}
        if self.bias_update_every > 1:
            # Choices of each expert and calls since the last move
            state |= {"load": True, "calls": False}
        adds_up = self.score == "softmax"
        vars(self).update(is_biased=is_biased, adds_up=adds_up, state=state)

    def probabilities(self, logits):
        return ops.sigmoid(logits) if self.score == "sigmoid" else softmax(logits)


@policy
class Logits(Softmax):
    """Selection by the logits, which are the gates, too."""

    combine = "plan"

    def selection(self, logits, probabilities, slots, valid, limit):
        return logits


@policy
class Sinkhorn(Scores):
    """Selection by a balanced plan of the logits, see `ops.sinkhorn_plan`."""

    compares_tokens = True
    num_iterations: int = 20
    combine: str = "softmax"
    noise_std: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_whole_numbers(1, num_iterations=self.num_iterations)

    def selection(self, logits, probabilities, slots, valid, limit):
        # The plan has a gradient only if gates are its entries.
        if self.combine == "softmax":
            logits = ops.stop_gradient(logits)
        return sinkhorn_plan(logits, self.num_iterations, valid)


@policy
class SparseTransport(Scores):
    """Selection by a plan within the capacity, see `ops.sparse_transport_plan`."""

    compares_tokens = True
    num_iterations: int = 20
    learning_rate: float = 0.01
    combine: str = "softmax"

    def __post_init__(self):
        super().__post_init__()
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
