"""Policies: the parts of a sparse router.

A sparse router has one policy of each kind:

- capacity: how many slots an expert has (`Capacity`)
- scores: the numbers that choose (`Softmax`, `TokenScores`, `Logits`, `Sinkhorn`,
  `SparseTransport`)
- assignment: who chooses whom, and the gates, in `policies_of_assignment.py`
- modalities: the differences between images and text (`OneKind`, `Modalities`)

Each is a frozen record. Its fields are settings of the router and of its configuration,
under the same names. A field marked `live` may change after the router was made.
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
from keras_softmoe.ops import expert_capacity, sinkhorn_plan, sparse_transport_plan
from keras_softmoe.ops.backend import softmax
from keras_softmoe.ops.capacity import MULTIPLE_OF, ROUNDING, ROUNDINGS
from keras_softmoe.ops.numbers import lowest
from keras_softmoe.routers._losses import MODALITIES
from keras_softmoe.sharding.constraints import is_distributed

live = functools.partial(field, metadata={"live": True})


def settings_of(policies):
    """Return a dict from the settings of policies to their values."""
    return {f.name: getattr(p, f.name) for p in policies for f in fields(p)}


def mutable_settings(policies):
    """Return the names of the settings that may change, of policies or classes."""
    return tuple(f.name for p in policies for f in fields(p) if "live" in f.metadata)


# === Capacity ===


@dataclass(frozen=True)
class Capacity:
    """The number of slots of an expert."""

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
        """Return the slots per choice; `None` if nothing is dropped."""
        if not training and self.eval_capacity_factor is not None:
            return self.eval_capacity_factor
        return self.capacity_factor

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
        capacity = expert_capacity(
            num_tokens * choices, num_experts, factor, self.rounding, self.multiple_of
        )
        # A token takes at most one slot of an expert.
        return min(capacity, num_tokens)


# === Scores ===


class Scores:
    """What the scores of all routers share."""

    # Gates are looked up in the probabilities, or in the scores that choose ("plan").
    combine = "softmax"
    # Whether a bias takes part in the choice
    is_biased = False
    # Whether the probabilities of a token add up to 1
    adds_up = True

    def probabilities(self, logits):
        """Return the `(G, S, E)` probabilities of `(G, S, E)` logits."""
        return softmax(logits, axis=-1)

    def state(self, num_experts):
        """Return a dict from names of weights without gradient to their shapes."""
        return {}


@dataclass(frozen=True)
class Softmax(Scores):
    """Selection by the probabilities."""

    noise_std: float = 0.0

    def __post_init__(self):
        check_numbers(least=0, noise_std=self.noise_std)

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


@dataclass(frozen=True)
class TokenScores(Softmax):
    """Selection by a softmax or sigmoid, and by a bias that balances the experts."""

    score: str = "softmax"
    bias_update_rate: float | None = live(default=None)
    bias_update_every: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_choice("score", self.score, ("softmax", "sigmoid"))
        if self.is_biased:
            check_numbers(least=0, bias_update_rate=self.bias_update_rate)
        check_whole_numbers(1, bias_update_every=self.bias_update_every)
        if self.bias_update_every > 1 and not self.is_biased:
            raise ValueError(
                "Only a bias is moved after several calls. Received: "
                f"bias_update_every={self.bias_update_every}, bias_update_rate=None. "
                "Leave it out, or pass `bias_update_rate=0.001`."
            )

    @property
    def is_biased(self):
        return self.bias_update_rate is not None

    @property
    def adds_up(self):
        return self.score == "softmax"

    def probabilities(self, logits):
        if self.score == "sigmoid":
            return ops.sigmoid(logits)
        return super().probabilities(logits)

    def state(self, num_experts):
        if not self.is_biased:
            return {}
        if self.bias_update_every == 1:
            return {"bias": (num_experts,)}
        # Choices of each expert and calls since the last move
        return {"bias": (num_experts,), "load": (num_experts,), "calls": ()}


@dataclass(frozen=True)
class Logits(Softmax):
    """Selection by the logits, which are the gates, too."""

    combine = "plan"

    def selection(self, logits, probabilities, slots, valid, limit):
        return logits


@dataclass(frozen=True)
class Sinkhorn(Scores):
    """Selection by a balanced plan of the logits, see `ops.sinkhorn_plan`."""

    num_iterations: int = 20
    combine: str = "softmax"
    noise_std: float = 0.0

    def __post_init__(self):
        check_choice("combine", self.combine, ("softmax", "plan"))
        check_whole_numbers(1, num_iterations=self.num_iterations)
        check_numbers(least=0, noise_std=self.noise_std)

    def selection(self, logits, probabilities, slots, valid, limit):
        # The plan has a gradient only if gates are its entries.
        if self.combine == "softmax":
            logits = ops.stop_gradient(logits)
        return sinkhorn_plan(logits, self.num_iterations, valid)


@dataclass(frozen=True)
class SparseTransport(Scores):
    """Selection by a plan within the capacity, see `ops.sparse_transport_plan`."""

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


# === Modalities ===


@dataclass(frozen=True)
class OneKind:
    """One kernel, and all experts for all tokens."""

    # Names of the weights that map tokens to logits
    kernels = ("kernel",)
    is_pruned = False
    num_predicted_experts = None

    def check(self, num_experts, choices):
        """Raise unless the policies of a router fit together."""

    def masks(self, group_tokens, modalities):
        """Return a dict from modalities to the `(1, S)` bool masks of their tokens."""
        if modalities:
            raise ValueError(
                "Only a `LIMoERouter` distinguishes the tokens of images and text. "
                f"Received: modalities={modalities}. Leave them out."
            )
        return {}

    def logits(self, tokens, kernels, masks):
        """Return the `(G, S, E)` products of tokens and kernels."""
        return ops.matmul(tokens, kernels[0])

    def allowed(self, logits, masks):
        """Return the logits, the lowest for experts closed to a modality."""
        return logits

    def left(self, probabilities):
        """Return the probabilities of the experts that are kept."""
        return probabilities


@dataclass(frozen=True)
class Modalities(OneKind):
    """Images and text, which may differ in kernels, experts and capacity."""

    per_modality: bool = False
    image_experts: int | None = None
    text_experts: int | None = None
    single_modality_capacity_factor: float = live(default=16.0)
    kept_experts: tuple | None = None
    num_predicted_experts: int | None = None

    def __post_init__(self):
        check_bools(per_modality=self.per_modality)
        names = ("image_experts", "text_experts", "num_predicted_experts")
        counts = {name: getattr(self, name) for name in names}
        check_whole_numbers(1, **{k: n for k, n in counts.items() if n is not None})
        factor = self.single_modality_capacity_factor
        check_numbers(over=0, single_modality_capacity_factor=factor)
        if self.kept_experts is not None:
            kept_experts = tuple(int(expert) for expert in self.kept_experts)
            object.__setattr__(self, "kept_experts", kept_experts)

    @property
    def kernels(self):
        if not self.per_modality:
            return ("kernel",)
        return tuple(f"{name}_kernel" for name in MODALITIES)

    @property
    def is_pruned(self):
        return self.kept_experts is not None

    def check(self, num_experts, choices):
        self._check_kept_experts(num_experts)
        counts = {"image": self.image_experts, "text": self.text_experts}
        total = self.num_predicted_experts or num_experts
        for name, count in counts.items():
            if count is not None and not choices <= count <= total:
                raise ValueError(
                    f"`{name}_experts` must lie between the number of choices, "
                    f"{choices}, and that of experts, {total}. Received: "
                    f"{name}_experts={count}."
                )
        if sum(total if c is None else c for c in counts.values()) < total:
            raise ValueError(
                "Some experts would be used by neither modality: `image_experts` and "
                f"`text_experts` must add up to at least {total}. Received: "
                f"image_experts={self.image_experts}, "
                f"text_experts={self.text_experts}."
            )

    def _check_kept_experts(self, num_experts):
        kept_experts, total = self.kept_experts, self.num_predicted_experts
        if kept_experts is None:
            if total not in (None, num_experts):
                raise ValueError(
                    "A router that predicts more experts than it has needs "
                    "`kept_experts`. Received: kept_experts=None, "
                    f"num_experts={num_experts}, num_predicted_experts={total}."
                )
            return
        total = total or num_experts
        inside = set(kept_experts) <= set(range(total))
        if list(kept_experts) != sorted(set(kept_experts)) or not inside:
            raise ValueError(
                "`kept_experts` are indices of experts, ascending, from 0 to "
                f"{total - 1}. Received: kept_experts={kept_experts}."
            )
        if len(kept_experts) != num_experts:
            raise ValueError(
                "`num_experts` is the number of kept experts. Received: "
                f"num_experts={num_experts}, kept_experts={kept_experts}."
            )

    def masks(self, group_tokens, modalities):
        names = [name for name, count in modalities for _ in range(count)]
        if not names or set(names) - set(MODALITIES) or group_tokens % len(names):
            raise ValueError(
                "This router needs the modality of each token: call "
                "`layers.MoE` on a dict with `'image'`, `'text'` or both, or pass "
                "`modalities=(('image', 64), ('text', 16))`. Received: "
                f"modalities={modalities} for {group_tokens} tokens in a group."
            )
        names = np.tile(names, group_tokens // len(names))
        return {
            name: ops.convert_to_tensor((names == name)[None]) for name, _ in modalities
        }

    def logits(self, tokens, kernels, masks):
        if not self.per_modality:
            return ops.matmul(tokens, kernels[0])
        kernels = dict(zip(MODALITIES, kernels, strict=True))
        if len(masks) == 1:
            (name,) = masks
            return ops.matmul(tokens, kernels[name])
        image, text = (ops.matmul(tokens, kernels[name]) for name in MODALITIES)
        return ops.where(ops.expand_dims(masks["image"], -1), image, text)

    def allowed(self, logits, masks):
        for name, mask in masks.items():
            barred = self._barred(name, logits.shape[-1])
            if barred.any():
                # (1, S, E)
                barred = ops.logical_and(ops.expand_dims(mask, -1), barred)
                # Lower than any noise
                logits = ops.where(barred, lowest(logits), logits)
        return logits

    def _barred(self, modality, num_experts):
        """Return an `(E,)` bool array of the experts closed to a modality."""
        index = np.arange(num_experts)
        if modality == "image":
            return index >= (self.image_experts or num_experts)
        return index < num_experts - (self.text_experts or num_experts)

    def left(self, probabilities):
        if not self.is_pruned:
            return probabilities
        return ops.take(probabilities, np.array(self.kept_experts), axis=-1)
