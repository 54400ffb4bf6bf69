"""What a Soft MoE has learned to mix, counted over any data set."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_softmoe.analysis._concentration import (
    Concentration,
    ConcentrationTotal,
    weights_needed,
)
from keras_softmoe.analysis._inputs import backbone_of
from keras_softmoe.analysis._streaming import observe, routers_of
from keras_softmoe.routers import Decision, SoftRouter
from keras_softmoe.types import Data

# 64 bins for each doubling, from 1/1024 to 4096, and what is outside.
TOKEN_WEIGHT_EDGES = np.concatenate(
    [[0.0], 2.0 ** (np.arange(-640, 769) / 64), [np.inf]]
)
_ROUNDING = 1e-6


class SoftStatistics(NamedTuple):
    """Dispatch and combine weights of one block, summed up over many groups of tokens.

    A group is what is routed together: the `S` tokens of an image, or of several under
    `group_images`. There are `E` experts with `C` slots each. Padding is left out.

    Attributes:
        num_groups: int.
        num_tokens: int, tokens in all groups together.
        token_weight_counts: `(bins,)` int64 array: how often a token's total dispatch
            weight, summed over all slots, fell between two neighbouring
            `TOKEN_WEIGHT_EDGES` (an edge belongs to the bin above). On average it is
            `E * C / S`; where every token counted alike, it would be so for each.
        slot_contribution: `(E, C)` float64 array, the mean combine weight of each
            slot's output over all tokens. Its sum is one.
        slot_curves: `(E, C, S)` float64 array, entry `n - 1` the cumulative dispatch
            weight of the `n` tokens that count most for a slot, averaged over groups.
        dispatch: `Concentration` of the dispatch weights of all slots in all groups:
            `n` counts tokens, up to `S`.
        combine: `Concentration` of the combine weights of all tokens: `n` counts slots,
            up to `E * C`.
    """

    num_groups: int
    num_tokens: int
    token_weight_counts: np.ndarray
    slot_contribution: np.ndarray
    slot_curves: np.ndarray
    dispatch: Concentration
    combine: Concentration

    @property
    def expert_contribution(self):
        """`(E,)` float64 array: mean combine weight of each expert, over its slots.

        Source: Soft MoE, appendix H (figure 24, center).
        """
        return self.slot_contribution.sum(axis=1)

    @property
    def mean_token_weight(self):
        """Float, the mean of the tokens' total dispatch weights."""
        return self.slot_contribution.size * self.num_groups / self.num_tokens

    @property
    def dispatch_peak(self):
        """Float from `1 / S` to 1: mean over slots of the largest dispatch weight.

        At 1 the softmax has collapsed: each slot takes a single token. Source: Soft
        MoE, appendix E.
        """
        return float(self.dispatch.mean[0])

    @property
    def combine_peak(self):
        """Float from `1 / (E * C)` to 1, for tokens and their combine weights.

        The mean over tokens of the largest one. Source: Soft MoE, appendix E.
        """
        return float(self.combine.mean[0])

    @property
    def dispatch_sharpness(self):
        """Float from 1: `dispatch_peak` in even shares, `1 / S` each.

        At 1 every slot is the mean of all tokens: the layer does not route.
        """
        return self.dispatch_peak * len(self.dispatch.mean)

    @property
    def combine_sharpness(self):
        """Float from 1: `combine_peak` in even shares, `1 / (E * C)` each."""
        return self.combine_peak * len(self.combine.mean)

    def tokens_above(self, weight):
        """The share of tokens whose total dispatch weight is at least so much.

        Args:
            weight: float over 0. Between two edges of bins the count is interpolated.

        Returns:
            float from 0 to 1.

        Source: Soft MoE, appendix H (figure 24, left): in its S/16 "2-5% of the tokens
        provide a summed weight above 2".
        """
        if not weight > 0:
            raise ValueError(
                "`weight` is a sum of dispatch weights, over zero. "
                f"Received: weight={weight}."
            )
        counts = self.token_weight_counts
        # From each edge on.
        above = np.concatenate([np.cumsum(counts[::-1])[::-1], [0]])
        return float(np.interp(weight, TOKEN_WEIGHT_EDGES, above)) / self.num_tokens

    def tokens_needed(self, share=0.9):
        """How many tokens make up a share of each slot, on average over groups.

        Args:
            share: float over 0 and under 1.

        Returns:
            `(E, C)` int array.

        Raises:
            ValueError: if it is not such a share.

        Source: Soft MoE, appendix H (figure 24, right).
        """
        return weights_needed(self.slot_curves, share)


def soft_statistics(
    model: keras.Model,
    data: Data,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> dict:
    """Count what the slots of a Soft MoE take in, and what its tokens get back.

    One pass over the data. Sums are kept, not weights: memory does not grow with the
    number of images.

    Args:
        model: any built `keras.Model` with `layers.SoftMoE`, or with `layers.MoE` that
            have a `SoftRouter`, as in `observe`.
        data: as in `observe`.
        batch_size: int, inputs of an array at a time. The weights of one batch are in
            memory, `2 * batch_size * S * E * C` numbers for each block and some copies
            of those of one block.
        preprocessor: as in `observe`.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        dict to `SoftStatistics`, from the index of each MoE block with a `SoftRouter`,
        or in a model of one's own from the name of the MoE layer.

    Raises:
        ValueError: if the model has no soft routers or is not built, there are no data,
            or they are not what the model takes.

    Source: Soft MoE, section 3.6, appendices E (figures 13 and 14) and H (figures 24,
    26 and 27).

    Examples:
        >>> statistics = ksm.analysis.soft_statistics(soft, images)
        >>> s = statistics[3]
        >>> s.dispatch.needed(0.9), s.combine.needed(0.9)  # of 64 tokens, of 64 slots
        >>> s.expert_contribution.max() / s.expert_contribution.min()
    """
    reducer = SoftReducer(model)
    (found,) = observe(model, data, [reducer], batch_size, preprocessor, verbose)
    return found


class SoftReducer:
    """Reducer to a dict from each soft block to its `SoftStatistics`, see `observe`.

    Args:
        model: as in `soft_statistics`.

    Raises:
        ValueError: if the model has no soft routers or is not built.

    Examples:
        >>> (found,) = ksm.analysis.observe(
        ...     soft, images, [ksm.analysis.SoftReducer(soft)]
        ... )
    """

    def __init__(self, model: keras.Model):
        self._soft = routers_of(backbone_of(model)[0], SoftRouter)
        self._sums = {}

    def update(self, name: int | str, decision: Decision, inputs: Any) -> None:
        if name in self._soft:
            self._sums.setdefault(name, _Sums()).add(*decision)

    def result(self) -> dict:
        return {name: sums.statistics() for name, sums in self._sums.items()}


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

    def statistics(self):
        return SoftStatistics(
            num_groups=self.num_groups,
            num_tokens=self.num_tokens,
            token_weight_counts=self.token_weights,
            slot_contribution=(self.contribution / self.num_tokens).reshape(self.slots),
            slot_curves=self.dispatch.curves.reshape(*self.slots, -1),
            dispatch=self.dispatch.concentration(),
            combine=self.combine.concentration(),
        )
