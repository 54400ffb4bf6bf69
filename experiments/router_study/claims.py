"""What the papers found, and whether it shows in the results of a study."""

import itertools
import statistics

from experiments.lib.comparisons import Claim, corrected, difference
from experiments.router_study.configurations import families, placements

_ACCURACIES = ("upstream_accuracy", "5-shot")
_DROPPED = ("dropped",)

# What both papers of vision mixtures claim first, asked of the presets too: text and
# source of Soft MoE over dense, token choice over dense, Soft MoE over token choice.
HEADLINE = (
    (
        "Soft MoE is better than the dense model of the same FLOP",
        "Soft MoE, section 3.3 and figure 3",
    ),
    (
        "Token choice with batch priority is better than the dense model of the same "
        "FLOP",
        "V-MoE, section 3.3 and appendix C.3",
    ),
    ("Soft MoE is better than token choice", "Soft MoE, section 3.3 and figure 3"),
)


def claims(results):
    """Compare the models of a study as the papers do.

    Every difference is taken within each seed, whose images all models saw, and then
    averaged. Nothing is tuned for a claim.

    Args:
        results: dict, what `run_study` returns, or read from its JSON.

    Returns:
        list of `Claim`. One whose models are not there, or not in any common seed, has
        no differences.

    Source: router study, sections 3.2 to 3.4; Soft MoE, sections 3.3, 3.5 and 3.6 and
    appendices A to D and F; V-MoE, section 3.3 and appendices B, C and E.6.

    Example:

    >>> for claim in claims(results):
    ...     print(claim.text, claim.verdict("upstream_accuracy"))
    """
    found = [
        Claim(
            text,
            source,
            {metric: _differences(results, contrasts, metric) for metric in metrics},
        )
        for text, source, contrasts, metrics in _statements(results)
    ]
    return corrected(found)


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


# === The claims ===


def _statements(results):
    """Text, source, contrasts and metrics of each claim.

    Contrasts are dicts from configurations to coefficients.
    """
    for text, source, contrasts, *metrics in (
        *_of_headline(results),
        *_of_routers(results),
        *_of_fixed(results),
        *_of_side_studies(results),
    ):
        yield text, source, contrasts, metrics[0] if metrics else _ACCURACIES


def _of_headline(results):
    soft, last_soft = _of_placements(results, "soft")
    token, last_token = _of_placements(results, "softmax_token_choice")
    for statement, name in zip(HEADLINE, (soft, token), strict=False):
        yield *statement, _over_dense(results, name)
    contrasts = {}
    if soft and token:
        contrasts = {"soft - token choice with batch priority": {soft: 1, token: -1}}
    yield *HEADLINE[2], contrasts
    for (text, source), name in zip(HEADLINE, (last_soft, last_token), strict=False):
        where = "with experts in the last half of the blocks"
        text = text.replace(" is better", f" {where} is better")
        yield text, source, _over_dense(results, name)


def _of_placements(results, family):
    """The first model of a family in the headline, and that of the last half of blocks.

    `None` for one that is not there. They are the same in a model of two blocks.
    """
    names = _of_family(results, "headline", family)
    blocks = results["scale"]["num_layers"]
    last = list(range(blocks // 2, blocks))
    in_last = (n for n in names if _known(results, n, "moe_layers") == last)
    return next(iter(names), None), next(in_last, None)


def _over_dense(results, name):
    return {f"{_title(results, name)} - dense": {name: 1, "dense": -1}} if name else {}


def _of_routers(results):
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
        "Who chooses matters more than the affinity",
        "router study, sections 3.2 and 3.3",
        _allocation_and_affinity(by_capacity),
    )
    yield (
        "Sinkhorn helps token choice more than expert choice",
        "router study, section 3.2",
        _sinkhorn_gains(by_capacity),
    )
    yield (
        "Every mixture of experts is better than the dense model of the same FLOP",
        "ours, after the introduction of the router study",
        {
            f"{_title(results, name)} - dense": {name: 1, "dense": -1}
            for name in routers
            if _known(results, name, "slots_per_token") == 1
        },
    )
    two = by_capacity.get("softmax_token_choice", {})
    yield (
        "Two experts per token are better than one",
        "V-MoE, appendix B.5 and table 8",
        {"K = 2 - K = 1": {two[2]: 1, two[1]: -1}} if two else {},
    )


def _of_fixed(results):
    by_family = {
        _known(results, name, "family"): name
        for name in results["studies"].get("fixed", [])
    }
    soft, soft_uniform, uniform_soft, uniform, identity, permuted = (
        by_family.get(family)
        for family in (
            "soft",
            "soft_uniform",
            "uniform_soft",
            "uniform",
            "identity",
            "permuted_identity",
        )
    )
    yield (
        "Dispatch mixing matters more than combine mixing",
        "Soft MoE, section 3.6 and table 3",
        {"soft / uniform - uniform / soft": {soft_uniform: 1, uniform_soft: -1}}
        if by_family
        else {},
    )
    for title, name in (("uniform", uniform), ("identity", identity)):
        yield (
            f"{title.capitalize()} is between the dense model and Soft MoE",
            "Soft MoE, section 3.6 and table 3",
            {
                f"soft - {title}": {soft: 1, name: -1},
                f"{title} - dense": {name: 1, "dense": -1},
            }
            if by_family
            else {},
        )
    yield (
        "Identity is better than identity of permuted tokens: it uses their places",
        "ours: a control",
        {"identity - identity of permuted tokens": {identity: 1, permuted: -1}}
        if by_family
        else {},
    )


def _of_side_studies(results):
    yield (
        "A scale that starts at sqrt(D) helps Soft MoE in a short training",
        "ours",
        _initial_scale(results),
    )
    yield (
        "Batch priority helps, the more the lower the capacity",
        "V-MoE, appendix C; Soft MoE, table 8",
        _batch_priority(results),
    )
    yield (
        "With little data the mixture's gain over the dense model is lost",
        "V-MoE, appendix E.6 and figure 37",
        _less_data(results),
    )
    yield (
        "One slot per expert is best at a given number of slots",
        "Soft MoE, section 3.5 and figure 6",
        _one_slot(results),
    )
    yield (
        "The more experts, the more tokens are dropped",
        "Soft MoE, appendix B and figures 8 to 11",
        _dropping(results),
        _DROPPED,
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
    for where, contrasts in _placement(results).items():
        yield (
            f"The same experts are better in the last few layers than in {where}",
            "Soft MoE, appendix D and tables 5 to 7",
            contrasts,
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


def _allocation_and_affinity(by_capacity):
    allocation, affinity = {}, {}
    for way, kind in ((1, "expert"), (-1, "token")):
        for sign, score in ((1, "sinkhorn"), (-1, "softmax")):
            names = by_capacity.get(f"{score}_{kind}_choice", {}).values()
            if not names:
                return {}
            allocation |= {name: way / 2 / len(names) for name in names}
            affinity |= {name: sign / 2 / len(names) for name in names}
    # Both are positive if the first is larger than the second is in size.
    return {
        f"expert - token choice {sign} (Sinkhorn - softmax)": {
            name: allocation[name] + (1 if sign == "+" else -1) * affinity[name]
            for name in allocation
        }
        for sign in "-+"
    }


def _initial_scale(results):
    names = {
        _known(results, name, "router")["initial_scale"]: name
        for name in results["studies"].get("initial_scale", [])
        if not name.endswith("_plain")
    }
    if not names:
        return {}
    started = names["unit_variance"]
    return {
        f"from sqrt(D) - from {start:g}": {started: 1, name: -1}
        for start, name in names.items()
        if name != started
    }


def _batch_priority(results):
    gains = {}
    for name in results["studies"].get("priority", []):
        if name.endswith("_bpr"):
            other = name.removesuffix("_bpr")
            factor = _known(results, name, "router")["capacity_factor"]
            gains[factor] = {name: 1, other: -1}
    if not gains:
        return {}
    least, most = min(gains), max(gains)
    return {f"gain at C = {c:g}": gain for c, gain in gains.items()} | {
        f"gain at C = {least:g} - at C = {most:g}": gains[least]
        | {name: -factor for name, factor in gains[most].items()}
    }


def _less_data(results):
    gains = {}
    for name in results["studies"].get("data", []):
        known = results["configurations"][name]
        sign = -1 if known["family"] == "dense" else 1
        gains.setdefault(known["data_share"], {})[name] = sign
    if not gains:
        return {}
    least = min(gains)
    return {
        "gain with all images": gains[1.0],
        f"gain with all images - with {least:g} of them": gains[1.0]
        | {name: -sign for name, sign in gains[least].items()},
    }


def _dropping(results):
    contrasts = {}
    for family in ("softmax_expert_choice", "softmax_token_choice"):
        names = _of_family(results, "experts", family)
        names.sort(key=lambda name: _known(results, name, "num_experts"))
        for few, many in itertools.pairwise(names):
            text = f"{_title(results, many)} - {_title(results, few)}"
            contrasts[text] = {many: 1, few: -1}
    return contrasts


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
        names = _of_family(results, "slots", family)
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
    """Where else the experts can be -> contrasts, for every such place of the scale."""
    num_layers = results["scale"]["num_layers"]
    # A third is where the paper's models have about as many experts as tokens.
    few = max(num_layers // 3, 2)
    last = tuple(range(num_layers - few, num_layers))
    found = {}
    for layers in placements(num_layers):
        if layers != last:
            contrasts = found.setdefault(_elsewhere(layers, few), {})
            contrasts |= _differences_of_places(results, last, layers)
    return found


def _elsewhere(layers, few):
    if len(layers) == few:
        return "as many that are spread"
    return "fewer" if len(layers) < few else "more"


def _differences_of_places(results, last, layers):
    contrasts = {}
    for family in ("soft", "softmax_token_choice", "softmax_expert_choice"):
        at = {
            tuple(_known(results, name, "moe_layers")): name
            for name in _of_family(results, "placement", family)
        }
        if last in at and layers in at:
            title = f"{_title(results, at[last])} - {_title(results, at[layers])}"
            contrasts[title] = {at[last]: 1, at[layers]: -1}
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
        found.append(difference(name, by_seed))
    return found


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
