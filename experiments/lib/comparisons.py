"""Differences between models, with intervals and corrected p-values."""

import math
import statistics
from typing import NamedTuple

from scipy import stats

# Intervals hold the true difference with this probability.
CONFIDENCE = 0.95
# Smaller differences are rounding errors.
_ROUNDING = 1e-9


class Difference(NamedTuple):
    """What one side of a comparison has more than the other.

    Attributes:
        name: str, what is compared.
        mean: float, over the seeds.
        error: float, standard error of the mean; NaN with one seed.
        seeds: int, number of seeds in which all models of both sides are there.
        adjusted_p: float, how likely so large a mean is if there is no difference, by
            a two-sided t-test with Holm's correction for all differences that are
            looked at, see `corrected`; NaN with one seed.
    """

    name: str
    mean: float
    error: float
    seeds: int
    adjusted_p: float = math.nan

    @property
    def margin(self):
        """Float, half the length of the t-interval; NaN with one seed."""
        if self.seeds < 2:
            return math.nan
        return self.error * float(stats.t.ppf((1 + CONFIDENCE) / 2, self.seeds - 1))

    @property
    def p(self):
        """Float, the probability of `adjusted_p` before the correction."""
        if self.seeds < 2:
            return math.nan
        if self.error == 0:
            return float(abs(self.mean) <= _ROUNDING)
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.seeds - 1))


def difference(name, by_seed):
    """The mean of what a comparison gives for each seed, with its error.

    Args:
        name: str, what is compared.
        by_seed: sequence of floats.

    Returns:
        `Difference`.
    """
    error = math.nan
    if len(by_seed) > 1:
        error = statistics.stdev(by_seed) / math.sqrt(len(by_seed))
    return Difference(name, statistics.fmean(by_seed), error, len(by_seed))


def corrected(found):
    """Return the differences of one family with p-values after Holm's correction.

    Args:
        found: list of `Difference`.
    """
    adjusted, least = list(found), 0.0
    tested = [i for i, d in enumerate(found) if d.seeds > 1]
    for rank, i in enumerate(sorted(tested, key=lambda i: found[i].p)):
        # Never below that of a smaller one.
        least = max(least, min((len(tested) - rank) * found[i].p, 1.0))
        adjusted[i] = found[i]._replace(adjusted_p=least)
    return adjusted
