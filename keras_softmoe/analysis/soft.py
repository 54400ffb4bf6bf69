"""Dispatch and combine weights of Soft MoE blocks, summed up over data."""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_softmoe.analysis.figures import figure_method
from keras_softmoe.analysis.panels_blocks import BANDS
from keras_softmoe.checks import check_numbers
from keras_softmoe.routers import SoftRouter

# 64 bins for each doubling, from 1/1024 to 4096, and two for smaller and larger ones.
TOKEN_WEIGHT_EDGES = np.concatenate(
    [[0.0], 2.0 ** (np.arange(-640, 769) / 64), [np.inf]]
)
NUM_BINS = 1000
# Weights within this distance below the edge of a bin count as on it.
_ROUNDING = 1e-6


class Concentration(NamedTuple):
    """The share of an average that its `n` largest weights hold, over many averages.

    Attributes:
        mean: `(N,)` float64 array, entry `n - 1` the mean sum of `n` weights.
        counts: `(N, 1000)` int64 array, how often the sums fell into bins from 0 to 1.
    """

    mean: np.ndarray
    counts: np.ndarray

    def bands(self, levels=BANDS):
        """Return the ends of the central parts of the distribution.

        `levels` are `L` floats over 0 and at most 1, the shares of the averages that a
        band holds: half of the others are below, half above. Returns `(L, 2, N)`, the
        lower and upper ends. Source: Soft MoE, appendix H (figures 26 and 27).
        """
        levels = np.asarray(levels, "float64")
        if levels.ndim != 1 or np.any((levels <= 0) | (levels > 1)):
            raise ValueError(
                "`levels` must be shares over 0 and at most 1. "
                f"Received: levels={levels.tolist()}."
            )
        ends = np.stack([1 - levels, 1 + levels], axis=-1).ravel() / 2
        bands = []
        for counts in self.counts:
            above = np.cumsum(counts)
            # Never the empty bins before the first value.
            wanted = np.maximum(ends * above[-1], 1e-9)
            found = np.searchsorted(above, wanted)
            within = 1 - (above[found] - wanted) / counts[found]
            bands.append((found + within) / NUM_BINS)
        return np.array(bands).T.reshape(len(levels), 2, -1)

    def needed(self, share=0.9, part=0.5):
        """Return the number of weights that hold a share in a part of the averages.

        `part` is a float over 0 and at most 1, 0.5 for the median of the averages.
        """
        check_numbers(over=0, under=1, share=share)
        check_numbers(over=0, most=1, part=part)
        # The last bin ends at one, which all weights together reach.
        first = min(round(share * NUM_BINS), NUM_BINS - 1)
        reached = self.counts[:, first:].sum(axis=1) / self.counts.sum(axis=1)
        return int(np.argmax(reached >= part - 1e-12)) + 1


class SoftStatistics(NamedTuple):
    """Dispatch and combine weights of one block, summed up over groups of `S` tokens.

    There are `E` experts with `C` slots each. Padding is left out.

    Attributes:
        block: int or str, the block, see `observe`.
        num_groups: int.
        num_tokens: int, tokens in all groups together.
        token_weight_counts: `(bins,)` int64 array: how often a token's dispatch weight,
            summed over all slots, fell between two `token_weight_edges`.
        slot_contribution: `(E, C)` float64 array, the mean combine weight of each slot.
        slot_curves: `(E, C, S)` float64 array, entry `n - 1` the sum of the `n` largest
            dispatch weights of a slot, averaged over groups.
        dispatch: `Concentration` of the dispatch weights of all slots in all groups.
        combine: `Concentration` of the combine weights of all tokens.
        slot_directions: `(E * C, D)` float32 array, parameters of slots, of length 1.

    Examples:
        >>> block = ksm.analysis.analyze(soft, images).soft[3]
        >>> block.dispatch.needed(0.9), block.combine.needed(0.9)  # of 16, of 16
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

        Slots at a cosine of 1 mix alike. Source: Soft MoE, appendix I (figures 28-30).
        """
        if self.slot_directions is None:
            return None
        return self.slot_directions @ self.slot_directions.T

    @property
    def cosine_within_experts(self) -> float:
        """Float, the mean cosine of different slots of the same expert, NaN for one."""
        return self._mean_cosine(of_one_expert=True)

    @property
    def cosine_between_experts(self) -> float:
        """Float, the mean cosine of slots of different experts, NaN for one expert."""
        return self._mean_cosine(of_one_expert=False)

    @property
    def expert_contribution(self) -> np.ndarray:
        """`(E,)` float64 array, the mean combine weight of each expert."""
        return self.slot_contribution.sum(axis=1)

    @property
    def mean_token_weight(self) -> float:
        """Float, the mean of the tokens' total dispatch weights."""
        return self.slot_contribution.size * self.num_groups / self.num_tokens

    @property
    def dispatch_peak(self) -> float:
        """Float from `1 / S` to 1: mean over slots of the largest dispatch weight.

        At 1 each slot takes a single token. Source: Soft MoE, appendix E.
        """
        return float(self.dispatch.mean[0])

    @property
    def combine_peak(self) -> float:
        """Float from `1 / (E * C)` to 1: mean over tokens of the largest weight."""
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

        Source: Soft MoE, appendix H (figure 24, left).
        """
        check_numbers(over=0, weight=weight)
        counts = self.token_weight_counts
        # From each edge on.
        above = np.concatenate([np.cumsum(counts[::-1])[::-1], [0]])
        return float(np.interp(weight, TOKEN_WEIGHT_EDGES, above)) / self.num_tokens

    def tokens_needed(self, share: float = 0.9) -> np.ndarray:
        """Return the `(E, C)` numbers of tokens that make up a share of each slot.

        Source: Soft MoE, appendix H (figure 24, right).
        """
        check_numbers(over=0, under=1, share=share)
        return np.argmax(self.slot_curves >= share - _ROUNDING, axis=-1) + 1

    def _mean_cosine(self, of_one_expert):
        num_experts, slots = self.slot_contribution.shape
        expert = np.repeat(np.arange(num_experts), slots)
        pairs = (expert[:, None] == expert) == of_one_expert
        np.fill_diagonal(pairs, False)
        if not pairs.any():
            return float("nan")
        return float(self.slot_cosines[pairs].mean(dtype="float64"))


class SoftReducer:
    """Reducer to a dict from each block with a soft router to its `SoftStatistics`."""

    def __init__(self, routers):
        soft = ((n, r) for n, r in routers.items() if isinstance(r, SoftRouter))
        self._soft = dict(soft)
        self._sums = {}

    def update(self, name, decision, inputs):
        if name in self._soft:
            self._sums.setdefault(name, _Sums()).add(*decision)

    def result(self):
        return {n: sums.statistics(n, self._soft[n]) for n, sums in self._sums.items()}


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

    def statistics(self, block, router):
        directions = None
        if hasattr(router, "mu"):
            mu = ops.convert_to_numpy(router.mu).astype("float32")
            directions = mu.reshape(len(mu), -1).T
            length = np.linalg.norm(directions, axis=1, keepdims=True)
            # A slot of zeros has the cosine 0 with all others.
            directions /= np.maximum(length, 1e-12)
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


class ConcentrationTotal:
    """Running sums of averages, of any number of weights, for a `Concentration`."""

    def __init__(self):
        self.num_rows = 0
        # Sums of the curves, (K, N), and counts (N, NUM_BINS).
        self.sums = self.counts = None

    def add(self, weights):
        """Add `(M, K, N)` weights: `M` times `K` averages of `N` weights each."""
        largest = -np.sort(-weights, axis=-1)
        curves = np.minimum(np.cumsum(largest, axis=-1, dtype="float64"), 1.0)
        rows, many, length = curves.shape
        if self.sums is None:
            self.sums = np.zeros((many, length))
            self.counts = np.zeros((length, NUM_BINS), "int64")
        curves = self._equally_long(curves)
        length = curves.shape[-1]
        self.num_rows += rows
        self.sums += curves.sum(axis=0)
        bins = np.minimum((curves + _ROUNDING) * NUM_BINS, NUM_BINS - 1).astype("int64")
        bins += np.arange(length) * NUM_BINS
        counts = np.bincount(bins.ravel(), minlength=length * NUM_BINS)
        self.counts += counts.reshape(length, NUM_BINS)

    def _equally_long(self, curves):
        """Return the curves at the length of the longest so far, and grow the sums."""
        many, known = self.sums.shape
        missing = curves.shape[-1] - known
        if missing < 0:
            ends = ((0, 0), (0, 0), (0, -missing))
            return np.pad(curves, ends, constant_values=1.0)
        if missing > 0:
            ends = ((0, 0), (0, missing))
            self.sums = np.pad(self.sums, ends, constant_values=self.num_rows)
            self.counts = np.pad(self.counts, ((0, missing), (0, 0)))
            self.counts[known:, -1] = self.num_rows * many
        return curves

    @property
    def curves(self):
        """`(K, N)` float64 array, the mean cumulative weights of each average."""
        return self.sums / self.num_rows

    def concentration(self):
        """Return the `Concentration` of all averages."""
        return Concentration(self.curves.mean(axis=0), self.counts)
