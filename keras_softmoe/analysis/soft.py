"""Dispatch and combine weights of Soft MoE blocks, summed up over data."""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_softmoe.analysis.concentration import Concentration, ConcentrationTotal
from keras_softmoe.analysis.figures import figure_method
from keras_softmoe.checks import check_numbers
from keras_softmoe.routers import SoftRouter

# 64 bins for each doubling, from 1/1024 to 4096, and two for smaller and larger ones.
TOKEN_WEIGHT_EDGES = np.concatenate(
    [[0.0], 2.0 ** (np.arange(-640, 769) / 64), [np.inf]]
)
_ROUNDING = 1e-6
# Avoids division by zero: a slot of zeros has the cosine 0 with all others.
_TINY = 1e-12


class SoftStatistics(NamedTuple):
    """Dispatch and combine weights of one block, summed up over many groups of tokens.

    The `S` tokens of a group, those of an image or of several under `group_images`, are
    routed together. There are `E` experts with `C` slots each. Padding is left out.

    Attributes:
        block: int or str, the block, see `observe`.
        num_groups: int.
        num_tokens: int, tokens in all groups together.
        token_weight_counts: `(bins,)` int64 array: how often a token's total dispatch
            weight, summed over all slots, fell between two neighbouring
            `TOKEN_WEIGHT_EDGES` (an edge belongs to the bin above). On average it is
            `E * C / S`, and exactly that for each token if all have equal weight.
        slot_contribution: `(E, C)` float64 array, the mean combine weight of each
            slot's output over all tokens. Its sum is one.
        slot_curves: `(E, C, S)` float64 array, entry `n - 1` the cumulative dispatch
            weight of the `n` tokens that count most for a slot, averaged over groups.
        dispatch: `Concentration` of the dispatch weights of all slots in all groups:
            `n` counts tokens, up to `S`.
        combine: `Concentration` of the combine weights of all tokens: `n` counts slots,
            up to `E * C`.
        slot_directions: `(E * C, D)` float32 array, the parameters of the slots, scaled
            to length 1. Slots of one expert follow each other: slot `c` of expert `e`
            is at `e * C + c`. `None` for a block that mixes uniformly.

    Examples:
        >>> block = ksm.analysis.analyze(soft, images).soft[3]
        >>> block.dispatch.needed(0.9), block.combine.needed(0.9)  # of 64, of 64
        >>> block.expert_contribution.max() / block.expert_contribution.min()
        >>> figure = block.plot("concentration", weights="combine")
    """

    block: int | str
    num_groups: int
    num_tokens: int
    token_weight_counts: np.ndarray
    slot_contribution: np.ndarray
    slot_curves: np.ndarray
    dispatch: Concentration
    combine: Concentration
    slot_directions: np.ndarray | None = None

    @property
    def token_weight_edges(self) -> np.ndarray:
        """`(bins + 1,)` float64 array, the edges of the bins of token weights."""
        return TOKEN_WEIGHT_EDGES

    @property
    def slot_cosines(self) -> np.ndarray | None:
        """`(E * C, E * C)` float32 array: cosines between the parameters of the slots.

        Slots whose parameters point in the same direction take in the same mixture of
        tokens, so one of them suffices. `None` for a block that mixes uniformly.
        Source: Soft MoE, appendix I (figures 28 to 30).
        """
        if self.slot_directions is None:
            return None
        return self.slot_directions @ self.slot_directions.T

    @property
    def cosine_within_experts(self) -> float:
        """Float, the mean cosine over pairs of different slots of the same expert.

        NaN with one slot per expert.
        """
        same = self._same_expert()
        np.fill_diagonal(same, False)
        return self._mean_cosine(same)

    @property
    def cosine_between_experts(self) -> float:
        """Float, the mean cosine over pairs of slots of different experts.

        NaN with one expert.
        """
        return self._mean_cosine(~self._same_expert())

    @property
    def expert_contribution(self) -> np.ndarray:
        """`(E,)` float64 array: mean combine weight of each expert, over its slots.

        Source: Soft MoE, appendix H (figure 24, center).
        """
        return self.slot_contribution.sum(axis=1)

    @property
    def mean_token_weight(self) -> float:
        """Float, the mean of the tokens' total dispatch weights."""
        return self.slot_contribution.size * self.num_groups / self.num_tokens

    @property
    def dispatch_peak(self) -> float:
        """Float from `1 / S` to 1: mean over slots of the largest dispatch weight.

        At 1 the softmax has collapsed: each slot takes a single token. Source: Soft
        MoE, appendix E.
        """
        return float(self.dispatch.mean[0])

    @property
    def combine_peak(self) -> float:
        """Float from `1 / (E * C)` to 1, for tokens and their combine weights.

        The mean over tokens of the largest one. Source: Soft MoE, appendix E.
        """
        return float(self.combine.mean[0])

    @property
    def dispatch_sharpness(self) -> float:
        """Float from 1: `dispatch_peak` in even shares, `1 / S` each.

        At 1 every slot is the mean of all tokens: the layer does not route.
        """
        return self.dispatch_peak * len(self.dispatch.mean)

    @property
    def combine_sharpness(self) -> float:
        """Float from 1: `combine_peak` in even shares, `1 / (E * C)` each."""
        return self.combine_peak * len(self.combine.mean)

    plot = figure_method("soft")

    def tokens_above(self, weight: float) -> float:
        """Return the share of tokens whose total dispatch weight is at least `weight`.

        Args:
            weight: float over 0. Between two edges of bins the count is interpolated.

        Returns:
            float from 0 to 1.

        Source: Soft MoE, appendix H (figure 24, left): in its S/16 "2-5% of the tokens
        provide a summed weight above 2".
        """
        check_numbers(over=0, weight=weight)
        counts = self.token_weight_counts
        # From each edge on.
        above = np.concatenate([np.cumsum(counts[::-1])[::-1], [0]])
        return float(np.interp(weight, TOKEN_WEIGHT_EDGES, above)) / self.num_tokens

    def tokens_needed(self, share: float = 0.9) -> np.ndarray:
        """Return the number of tokens that make up a share of each slot, on average.

        Args:
            share: float over 0 and under 1.

        Returns:
            `(E, C)` int array.

        Raises:
            ValueError: if it is not such a share.

        Source: Soft MoE, appendix H (figure 24, right).
        """
        check_numbers(over=0, under=1, share=share)
        return np.argmax(self.slot_curves >= share - _ROUNDING, axis=-1) + 1

    def _same_expert(self):
        num_experts, slots = self.slot_contribution.shape
        expert = np.repeat(np.arange(num_experts), slots)
        return expert[:, None] == expert

    def _mean_cosine(self, pairs):
        if not pairs.any():
            return float("nan")
        return float(self.slot_cosines[pairs].mean(dtype="float64"))


class SoftReducer:
    """Reducer to a dict from each block with a soft router to its `SoftStatistics`."""

    def __init__(self, routers):
        self._soft = {
            name: router
            for name, router in routers.items()
            if isinstance(router, SoftRouter)
        }
        self._sums = {}

    def update(self, name, decision, inputs):
        if name in self._soft:
            self._sums.setdefault(name, _Sums()).add(*decision)

    def result(self):
        return {
            name: sums.statistics(name, _directions(self._soft[name]))
            for name, sums in self._sums.items()
        }


class _Sums:
    """Running sums over the groups of one block."""

    def __init__(self):
        self.num_groups = self.num_tokens = self.contribution = 0
        self.token_weights = np.zeros(len(TOKEN_WEIGHT_EDGES) - 1, "int64")
        self.dispatch, self.combine = ConcentrationTotal(), ConcentrationTotal()

    def add(self, routing, summary):
        self.slots = routing.combine.shape[2:]
        # (G, S, E * C)
        dispatch, combine = (x.reshape(*x.shape[:2], -1) for x in routing)
        valid = summary["valid"]
        # (tokens, E * C), without padding
        combine = combine[valid]
        weight = dispatch.sum(axis=-1, dtype="float64")[valid]
        # A sequence may be masked as a whole.
        dispatch = dispatch[valid.any(axis=1)]
        self.num_groups += len(dispatch)
        self.num_tokens += len(combine)
        self.contribution += combine.sum(axis=0, dtype="float64")
        edges = TOKEN_WEIGHT_EDGES[1:-1]
        bins = np.searchsorted(edges, weight * (1 + _ROUNDING), side="right")
        self.token_weights += np.bincount(bins, minlength=len(edges) + 1)
        # Padding has no weight, so it comes last and changes no sum.
        self.dispatch.add(dispatch.swapaxes(1, 2))
        self.combine.add(combine[:, None])

    def statistics(self, block, directions):
        return SoftStatistics(
            block=block,
            num_groups=self.num_groups,
            num_tokens=self.num_tokens,
            token_weight_counts=self.token_weights,
            slot_contribution=(self.contribution / self.num_tokens).reshape(self.slots),
            slot_curves=self.dispatch.curves.reshape(*self.slots, -1),
            dispatch=self.dispatch.concentration(),
            combine=self.combine.concentration(),
            slot_directions=directions,
        )


def _directions(router):
    """Return the parameters of slots at length 1, `(E * C, D)`, `None` without any."""
    if not hasattr(router, "mu"):
        return None
    mu = ops.convert_to_numpy(router.mu).astype("float32")
    directions = mu.reshape(len(mu), -1).T
    length = np.linalg.norm(directions, axis=1, keepdims=True)
    return directions / np.maximum(length, _TINY)
