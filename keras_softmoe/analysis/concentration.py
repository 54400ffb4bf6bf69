"""Concentration of weighted averages: the share that the largest weights hold."""

from typing import NamedTuple

import numpy as np

from keras_softmoe.checks import check_numbers

NUM_BINS = 1000
BANDS = (0.6, 0.8, 0.9, 0.95, 0.99)
# Weights within this distance below the edge of a bin count as on it.
_ROUNDING = 1e-6


class Concentration(NamedTuple):
    """The share of an average that its `n` largest weights hold, over many averages.

    The weights of an average add up to one. The sum of its `n` largest is their
    cumulative weight; a straight line from zero to one is a uniform average.

    Attributes:
        mean: `(N,)` float64 array, entry `n - 1` the mean cumulative weight of the `n`
            largest. The first one is the mean of the largest weight.
        counts: `(N, NUM_BINS)` int64 array: how often the cumulative weight of the `n`
            largest fell into each bin of equal width between 0 and 1 (1 belongs to the
            last).
    """

    mean: np.ndarray
    counts: np.ndarray

    def bands(self, levels=BANDS):
        """Return the ends of the central parts of the distribution.

        Args:
            levels: sequence of `L` floats between 0 and 1, the shares of the averages
                that a band holds: half of the others are below, half above.

        Returns:
            `(L, 2, N)` float64 array, the lower and upper ends of the bands. They are
            right to the width of a bin, `1 / NUM_BINS`.

        Raises:
            ValueError: if a level is not a share.

        Source: Soft MoE, appendix H (figures 26 and 27).
        """
        levels = np.asarray(levels, "float64")
        if levels.ndim != 1 or np.any((levels <= 0) | (levels > 1)):
            raise ValueError(
                "`levels` must be shares over 0 and at most 1, such as (0.6, 0.9). "
                f"Received: levels={levels.tolist()}."
            )
        ends = np.stack([1 - levels, 1 + levels], axis=-1).ravel() / 2
        bands = [_quantiles(counts, ends) for counts in self.counts]
        return np.array(bands).T.reshape(len(levels), 2, -1)

    def reached(self, share):
        """Return the part of the averages of which the `n` largest hold a share.

        Args:
            share: float over 0 and under 1, rounded to the width of a bin.

        Returns:
            `(N,)` float64 array, entry `n - 1` the part of the averages of which the
            `n` largest weights hold at least that share.

        Raises:
            ValueError: if it is not such a share.
        """
        check_numbers(over=0, under=1, share=share)
        # The last bin ends at one, which all weights together reach.
        first = min(round(share * NUM_BINS), NUM_BINS - 1)
        return self.counts[:, first:].sum(axis=1) / self.counts.sum(axis=1)

    def needed(self, share=0.9, part=0.5):
        """Return how many weights are enough for a share of the whole.

        Args:
            share: float over 0 and under 1, rounded to the width of a bin.
            part: float over 0 and at most 1, the part of the averages for which they
                have to be enough: 0.5 for the median.

        Returns:
            int.

        Raises:
            ValueError: if `share` or `part` is not a share.
        """
        reached = self.reached(share)
        if not 0 < part <= 1:
            raise ValueError(
                "`part` is a share of the averages, over 0 and at most 1. "
                f"Received: part={part}."
            )
        return int(np.argmax(reached >= part - 1e-12)) + 1


class ConcentrationTotal:
    """Running sums from which a `Concentration` is made.

    Averages may differ in their number of weights: curves of shorter ones stay at one.
    """

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


def _quantiles(counts, parts):
    """Where these parts of the values lie below, by counts in bins from 0 to 1."""
    above = np.cumsum(counts)
    # Never the empty bins before the first value.
    wanted = np.maximum(parts * above[-1], 1e-9)
    found = np.searchsorted(above, wanted)
    within = 1 - (above[found] - wanted) / counts[found]
    return (found + within) / NUM_BINS
