"""Differences between models with intervals, and what they say about a claim."""

import math
import statistics
from typing import NamedTuple

from scipy import stats

# Intervals hold the true difference with this probability.
CONFIDENCE = 0.95
# Smaller differences are rounding errors.
_ROUNDING = 1e-9
_VERDICTS = {
    "yes": "appears",
    "no": "does not appear, an interval is below zero",
    "open": "within the noise",
    "not run": "not run",
}


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


def paired(found, pairs, value, metric):
    """What one variant of each pair has more than the other, seed by seed.

    Args:
        found: dict from variants to lists of runs, dicts with a `"seed"`.
        pairs: sequence of pairs of variants, the one that should be better first.
        value: callable `(run, metric)` that returns a float, or `None` of a run that
            has no such number.
        metric: str.

    Returns:
        list of `Difference`, one for each pair; none at all unless all have a seed in
        common.
    """
    differences = []
    for better, worse in pairs:
        sides = [
            {
                run["seed"]: number
                for run in found.get(name, [])
                if (number := value(run, metric)) is not None
            }
            for name in (better, worse)
        ]
        seeds = sorted(sides[0].keys() & sides[1].keys())
        if not seeds:
            return []
        by_seed = [sides[0][seed] - sides[1][seed] for seed in seeds]
        differences.append(difference(f"{better} - {worse}", by_seed))
    return differences


def corrected(found):
    """Claims whose differences have p-values after Holm's correction.

    All differences are one family, whatever their metric.

    Args:
        found: list of `Claim`.
    """
    # Two claims may look at the same difference.
    every = {
        (metric, d._replace(adjusted_p=0.0))
        for claim in found
        for metric, differences in claim.differences.items()
        for d in differences
        if d.seeds > 1
    }
    adjusted, least = {}, 0.0
    ordered = sorted(every, key=lambda entry: (entry[1].p, entry[0], entry[1].name))
    for rank, entry in enumerate(ordered):
        # Never below that of a smaller one.
        least = max(least, min((len(ordered) - rank) * entry[1].p, 1.0))
        adjusted[entry] = least
    return [
        claim._replace(
            differences={
                metric: [
                    d._replace(
                        adjusted_p=adjusted.get(
                            (metric, d._replace(adjusted_p=0.0)), math.nan
                        )
                    )
                    for d in differences
                ]
                for metric, differences in claim.differences.items()
            }
        )
        for claim in found
    ]


def run_and_not(claims):
    """Claims that were run under some metric, and a sentence on the others, or `""`."""
    run = [claim for claim in claims if any(claim.differences.values())]
    others = [claim.text for claim in claims if claim not in run]
    return run, f"Not run: {'; '.join(others)}." if others else ""


def verdict_in_words(claim, metric):
    """The verdict under a metric, and whether it stands after the correction, str."""
    verdict = _VERDICTS[claim.verdict(metric)]
    return verdict + ", after the correction too" * claim.survives(metric)


def overview(claims, metrics):
    """Rows of a Markdown table: a claim, and its verdict under each metric.

    Args:
        claims: list of `Claim`.
        metrics: dict, as for `in_words`.
    """
    rows = []
    for claim in claims:
        verdicts = (
            f"{metrics[metric]}: {verdict_in_words(claim, metric)}"
            for metric in claim.differences
        )
        rows.append(f"| {claim.text} | {'; '.join(verdicts)} |")
    return "\n".join(rows)


def in_words(claims, metrics):
    """What the claims say, and what the results say about them.

    Args:
        claims: list of `Claim`.
        metrics: dict from metrics to what they are called.

    Returns:
        str, Markdown: for each claim the verdict under each metric, and the differences
        in percentage points with their t-intervals.
    """
    lines = []
    for claim in claims:
        lines.append(f"- **{claim.text}** ({claim.source}).")
        for metric, found in claim.differences.items():
            verdict = verdict_in_words(claim, metric)
            listed = "; ".join(map(_listed, found))
            ending = f" {listed}." if listed else ""
            lines.append(f"    - {metrics[metric]}: {verdict}.{ending}")
    return "\n".join(lines)


def reading(claims):
    """How to read `in_words`, and how many differences are looked at, str."""
    different = {
        (metric, d.name, d.mean)
        for claim in claims
        for metric, found in claim.differences.items()
        for d in found
    }
    return (
        "Differences in percentage points, taken within each seed; ± is half of the "
        f"{100 * CONFIDENCE:g} % t-interval of their mean. *Appears*: all intervals of "
        f"a claim are above zero. {len(different)} differences are looked at, so that "
        "some intervals miss zero by chance: *after the correction too* means Holm's, "
        "for all of them together, whatever the experiment and the metric. One scale "
        "shows what happens at that scale: it neither proves nor refutes what the "
        "papers found at another."
    )


def _listed(found):
    text = f"{found.name}: {100 * found.mean:+.2f}"
    if found.seeds == 1:
        return f"{text} (one seed)"
    return f"{text} ± {100 * found.margin:.2f} ({found.seeds} seeds)"
