"""Differences between models with intervals, and what they say about a claim."""

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
            looked at under the same metric; NaN with one seed.
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


class Claim(NamedTuple):
    """A claim of the papers, and what a study says about it.

    Attributes:
        text: str, the claim.
        source: str, paper and section, table or figure.
        differences: dict from a metric to a list of `Difference`: the claim holds if
            all of them are positive.
    """

    text: str
    source: str
    differences: dict

    def verdict(self, metric):
        """Whether the claim appears.

        Args:
            metric: str, a key of `differences`.

        Returns:
            str: `"yes"` (all t-intervals are above zero), `"no"` (one is below),
            `"open"` (neither), or `"not run"`.
        """
        found = self.differences[metric]
        if not found:
            return "not run"
        # With one seed nothing is clear: comparisons with NaN are false.
        if any(d.mean < -d.margin - _ROUNDING for d in found):
            return "no"
        return "yes" if all(d.mean > d.margin + _ROUNDING for d in found) else "open"

    def survives(self, metric):
        """Whether the verdict stands after the correction for many differences.

        Args:
            metric: str, a key of `differences`.

        Returns:
            bool; `False` for verdicts other than `"yes"` and `"no"`.
        """
        clear = [d for d in self.differences[metric] if d.adjusted_p < 1 - CONFIDENCE]
        if self.verdict(metric) == "yes":
            return len(clear) == len(self.differences[metric])
        return self.verdict(metric) == "no" and any(d.mean < 0 for d in clear)


def value(results, name, seed, metric):
    """One number of a cell.

    Args:
        results: dict, as for `claims`.
        name: str, a configuration.
        seed: str.
        metric: str, `"upstream_accuracy"`, `"fine_tuned_accuracy"`; of the blocks with
            experts, in the mean, `"dropped"`, `"imbalance"`, `"position_share"`,
            `"label_share"` or `"sharpness"` (of the dispatch weights); or `"1-shot"`,
            `"5-shot"` and so on.

    Returns:
        float, or `None` if there is no such number: the cell is missing or diverged, or
        the model has no experts.
    """
    cell = results["cells"].get(name, {}).get(seed)
    if cell is None or cell["diverged"]:
        return None
    if metric.endswith("-shot"):
        return cell["few_shot"].get(metric.removesuffix("-shot"))
    number = cell[metric]
    if metric == "sharpness" and number is not None:
        number = [dispatch for dispatch, _ in number]
    return statistics.fmean(number) if isinstance(number, list) else number


def differences(results, contrasts, metric):
    """One `Difference` for each contrast; none at all unless all can be computed."""
    found = []
    for name, contrast in contrasts.items():
        by_seed = _by_seed(results, contrast or {}, metric)
        if not by_seed:
            return []
        error = math.nan
        if len(by_seed) > 1:
            error = statistics.stdev(by_seed) / math.sqrt(len(by_seed))
        difference = statistics.fmean(by_seed)
        found.append(Difference(name, difference, error, len(by_seed)))
    return found


def corrected(found):
    """Claims whose differences have p-values after Holm's correction, by metric."""
    adjusted = {}
    for metric in {metric for claim in found for metric in claim.differences}:
        every = [
            d
            for claim in found
            for d in claim.differences.get(metric, ())
            if d.seeds > 1
        ]
        every.sort(key=lambda d: d.p)
        least = 0.0
        for rank, difference in enumerate(every):
            # Never below that of a smaller one.
            least = max(least, min((len(every) - rank) * difference.p, 1.0))
            adjusted[id(difference)] = least
    return [
        claim._replace(
            differences={
                metric: [
                    d._replace(adjusted_p=adjusted.get(id(d), math.nan))
                    for d in differences
                ]
                for metric, differences in claim.differences.items()
            }
        )
        for claim in found
    ]


def _by_seed(results, contrast, metric):
    """The sum of coefficients times numbers, for each seed that has them all."""
    sums = []
    scale = results["scale"]
    for seed in map(str, scale["seeds"] + scale["more_seeds"]):
        terms = [
            (factor, value(results, name, seed, metric))
            for name, factor in contrast.items()
        ]
        if terms and all(number is not None for _, number in terms):
            sums.append(sum(factor * number for factor, number in terms))
    return sums
