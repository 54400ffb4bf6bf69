"""What the papers found, and whether it shows in the results of a study."""

import math
import statistics
from typing import NamedTuple

from experiments.router_study.configurations import families

# A difference counts if it is larger than this many standard errors.
_CLEAR = 2.0
# Smaller differences are rounding errors.
_ROUNDING = 1e-9
METRICS = {
    "upstream_accuracy": "upstream accuracy",
    "10-shot": "10-shot accuracy",
}


class Difference(NamedTuple):
    """What one side of a comparison has more than the other.

    Attributes:
        name: str, what is compared.
        mean: float, over the seeds.
        error: float, standard error of the mean; NaN with one seed.
        seeds: int, number of seeds in which all models of both sides are there.
    """

    name: str
    mean: float
    error: float
    seeds: int


class Claim(NamedTuple):
    """A claim of the papers, and what a study says about it.

    Attributes:
        text: str, the claim.
        source: str, paper and section, table or figure.
        differences: dict from a metric (a key of `METRICS`) to a list of `Difference`:
            the claim holds if all of them are positive.
    """

    text: str
    source: str
    differences: dict

    def verdict(self, metric):
        """Whether the claim appears.

        Args:
            metric: str, `"upstream_accuracy"` or `"10-shot"`.

        Returns:
            str: `"yes"` (all differences are above two standard errors), `"no"` (one is
            below minus two), `"open"` (neither), or `"not run"`.
        """
        found = self.differences[metric]
        if not found:
            return "not run"
        # With one seed nothing is clear: comparisons with NaN are false.
        if any(d.mean < -_CLEAR * d.error - _ROUNDING for d in found):
            return "no"
        clear = all(d.mean > _CLEAR * d.error + _ROUNDING for d in found)
        return "yes" if clear else "open"


def claims(results):
    """Compare the models of a study as the papers do.

    Every difference is taken within each seed, whose images all models saw, and then
    averaged. Nothing is tuned for a claim: all models have the hyperparameters of the
    dense one.

    Args:
        results: dict, what `run_study` returns, or read from its JSON.

    Returns:
        list of `Claim`. One whose models are not there, or not in any common seed, has
        no differences.

    Source: router study, sections 3.2 to 3.4; Soft MoE, sections 3.5 and 3.6 and
    appendices A, C and D.

    Example:

    >>> for claim in claims(results):
    ...     print(claim.text, claim.verdict("upstream_accuracy"))
    """
    return [
        Claim(
            text,
            source,
            {metric: _differences(results, contrasts, metric) for metric in METRICS},
        )
        for text, source, contrasts in _statements(results)
    ]


def value(results, name, seed, metric):
    """One number of a cell.

    Args:
        results: dict, as for `claims`.
        name: str, a configuration.
        seed: str.
        metric: str, `"upstream_accuracy"`, `"fine_tuned_accuracy"`, `"dropped"` or
            `"imbalance"` (mean over the blocks), or `"1-shot"`, `"5-shot"` and so on.

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
    return statistics.fmean(number) if isinstance(number, list) else number


# === The claims ===


def _statements(results):
    """Text, source, and contrasts: dicts from configurations to coefficients."""
    by_capacity = _by_capacity(results)
    routers = results["studies"].get("routers", [])
    soft, token, expert = (
        {f: c for f, c in by_capacity.items() if f in families(kind)}
        for kind in ("soft", "token", "expert")
    )
    yield (
        "Soft MoE is better than expert choice",
        "router study, sections 3.2 and 3.3",
        {"soft - expert choice": _mean_minus_mean(soft, expert)},
    )
    yield (
        "Expert choice is better than token choice",
        "router study, sections 3.2 and 3.3",
        {"expert - token choice": _mean_minus_mean(expert, token)},
    )
    yield (
        "Sinkhorn helps token choice more than expert choice",
        "router study, section 3.2",
        _sinkhorn_gains(by_capacity),
    )
    yield (
        "Every mixture of experts is better than the dense model",
        "Soft MoE, section 3.6 and table 3; router study, introduction",
        {
            f"{_title(results, name)} - dense": {name: 1, "dense": -1}
            for name in routers
            if name != "dense"
        },
    )
    yield (
        "Dispatch mixing matters more than combine mixing",
        "Soft MoE, section 3.6 and table 3",
        {"soft / uniform - uniform / soft": {"soft_uniform": 1, "uniform_soft": -1}},
    )
    one = by_capacity.get("soft", {}).get(1)
    fixed = [n for n in routers if _known(results, n, "family") in families("fixed")]
    yield (
        "Identity and uniform are between the dense model and Soft MoE",
        "Soft MoE, section 3.6 and table 3",
        {f"soft - {name}": {one: 1, name: -1} for name in fixed if one}
        | {f"{name} - dense": {name: 1, "dense": -1} for name in fixed},
    )
    yield (
        "One slot per expert is best at a given number of slots",
        "Soft MoE, section 3.5 and figure 6",
        _one_slot(results),
    )
    yield (
        "More slots for the same experts help expert choice more than Soft MoE",
        "Soft MoE, appendix C and figure 12",
        _more_slots(results),
    )
    yield (
        "Sinkhorn token choice is better with softmax combine",
        "router study, section 3.4 and figure 3",
        {
            f"with - without, {_title(results, name)}": {name: 1, f"{name}_plan": -1}
            for name in results["studies"].get("combine", [])
            if not name.endswith("_plan")
        },
    )
    yield (
        "The same experts are best in the last few layers",
        "Soft MoE, appendix D and tables 5 to 7",
        _placement(results),
    )


def _by_capacity(results):
    """Family -> K or capacity, 1 and 2 -> name, in the comparison of the routers."""
    found = {}
    for name in results["studies"].get("routers", []):
        # The smaller one comes first.
        place = found.setdefault(_known(results, name, "family"), {})
        place[len(place) + 1] = name
    return found


def _mean_minus_mean(above, below):
    """Coefficients of the mean of some families minus that of others."""
    contrast = {}
    for sign, side in ((1, above), (-1, below)):
        names = [name for family in side.values() for name in family.values()]
        contrast |= {name: sign / len(names) for name in names}
    return contrast if above and below else None


def _sinkhorn_gains(by_capacity):
    gains = {}
    for kind in ("token", "expert"):
        gains[kind] = gain = {}
        for factor in (1, 2):
            for way, affinity in ((1, "sinkhorn"), (-1, "softmax")):
                name = by_capacity.get(f"{affinity}_{kind}_choice", {}).get(factor)
                if name is None:
                    return {}
                gain[name] = way / 2
    return {
        "gain of token choice": gains["token"],
        "gain of token choice - of expert choice": gains["token"]
        | {name: -factor for name, factor in gains["expert"].items()},
    }


def _one_slot(results):
    names = _of_family(results, "experts", "soft")
    if len(names) < 2:
        return {}
    *others, most = sorted(names, key=lambda n: _known(results, n, "num_experts"))
    return {
        f"{_title(results, most)} - {_title(results, name)}": {most: 1, name: -1}
        for name in others
    }


def _more_slots(results):
    gains = []
    for family in ("softmax_expert_choice", "soft"):
        names = [
            name
            for name in _of_family(results, "slots", family)
            if family == "soft" or _known(results, name, "group_images") > 1
        ]
        names.sort(key=lambda name: _known(results, name, "slots_per_token"))
        gains.append(names)
    if min(map(len, gains)) < 2:
        return {}
    expert, soft = gains
    return {
        "gain of expert choice": {expert[-1]: 1, expert[0]: -1},
        "gain of expert choice - of soft": {
            expert[-1]: 1,
            expert[0]: -1,
            soft[-1]: -1,
            soft[0]: 1,
        },
    }


def _placement(results):
    contrasts = {}
    num_layers = results["scale"]["num_layers"]
    # A third is where the paper's models have about as many experts as tokens.
    few = max(num_layers // 3, 2)
    for family in ("soft", "softmax_token_choice", "softmax_expert_choice"):
        at = {
            tuple(_known(results, name, "moe_layers")): name
            for name in _of_family(results, "placement", family)
        }
        last = at.pop(tuple(range(num_layers - few, num_layers)), None)
        if last is not None:
            contrasts |= {
                f"{_title(results, last)} - {_title(results, name)}": {
                    last: 1,
                    name: -1,
                }
                for name in at.values()
            }
    return contrasts


def _of_family(results, study, family):
    return [
        name
        for name in results["studies"].get(study, [])
        if _known(results, name, "family") == family
    ]


def _known(results, name, key):
    return results["configurations"][name][key]


def _title(results, name):
    return _known(results, name, "title")


# === Numbers ===


def _differences(results, contrasts, metric):
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


def _by_seed(results, contrast, metric):
    """The sum of coefficients times numbers, for each seed that has them all."""
    sums = []
    for seed in map(str, results["scale"]["seeds"]):
        terms = [
            (factor, value(results, name, seed, metric))
            for name, factor in contrast.items()
        ]
        if terms and all(number is not None for _, number in terms):
            sums.append(sum(factor * number for factor, number in terms))
    return sums
