"""How alike the slots of a Soft MoE are, by their parameters alone."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_softmoe.analysis._inputs import backbone_of
from keras_softmoe.analysis._streaming import routers_of
from keras_softmoe.routers import SoftRouter

# A slot without parameters is like no other.
_TINY = 1e-12


class SlotCorrelation(NamedTuple):
    """Inner products of the normalized slot parameters of one block.

    Attributes:
        cosine: `(E * C, E * C)` float32 array, from -1 to 1. Slots of one expert follow
            each other: slot `c` of expert `e` is at `e * C + c`.
        slots_per_expert: int, `C`.
    """

    cosine: np.ndarray
    slots_per_expert: int

    @property
    def num_experts(self):
        """Int, `E`."""
        return len(self.cosine) // self.slots_per_expert

    @property
    def within(self):
        """Float, the mean over pairs of different slots of the same expert.

        NaN with one slot per expert.
        """
        same = self._same_expert()
        np.fill_diagonal(same, False)
        return self._mean(same)

    @property
    def between(self):
        """Float, the mean over pairs of slots of different experts.

        NaN with one expert.
        """
        return self._mean(~self._same_expert())

    def _same_expert(self):
        expert = np.arange(len(self.cosine)) // self.slots_per_expert
        return expert[:, None] == expert

    def _mean(self, pairs):
        if not pairs.any():
            return float("nan")
        return float(self.cosine[pairs].mean(dtype="float64"))


def slot_correlation(model: keras.Model) -> dict:
    """Compare the parameters of the slots of a Soft MoE with each other.

    Slots whose parameters point in the same direction take in the same mixture of
    tokens, so that one of them would do.

    Args:
        model: as in `soft_statistics`.

    Returns:
        dict from each block, as in `soft_statistics`, to its `SlotCorrelation`. Blocks
        that mix uniformly have no parameters and are left out.

    Raises:
        ValueError: if the model has no soft routers with parameters or is not built.

    Source: Soft MoE, appendix I (figures 28 to 30).

    Examples:
        >>> correlation = ksm.analysis.slot_correlation(soft)
        >>> {block: (c.within, c.between) for block, c in correlation.items()}
    """
    backbone, _ = backbone_of(model)
    routers = routers_of(backbone, SoftRouter, weight="mu")
    return {name: _correlation(router) for name, router in routers.items()}


def _correlation(router):
    # (E * C, D)
    mu = ops.convert_to_numpy(router.mu).astype("float32")
    directions = mu.reshape(len(mu), -1).T
    length = np.linalg.norm(directions, axis=1, keepdims=True)
    directions = directions / np.maximum(length, _TINY)
    return SlotCorrelation(directions @ directions.T, router.slots_per_expert)
