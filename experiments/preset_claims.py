"""Whether the presets pay for their experts, and what their routing is worth."""

import numpy as np

from experiments.glyph_presets import CAPACITY_FACTORS, TWINS
from experiments.lib.cards import read_runs
from experiments.lib.comparisons import Claim, corrected, difference, paired
from experiments.router_study.claims import HEADLINE

METRICS = {
    "center": "accuracy on glyphs that fill the image",
    "anywhere": "accuracy on glyphs anywhere",
    "few_shot": "5-shot accuracy on digits",
    "fine_tuned": "fine-tuned accuracy on digits",
    "upstream": "accuracy on glyphs of both kinds",
}
_TASKS = ("center", "anywhere", "few_shot", "fine_tuned")
# Those with several seeds, trained on the same images at the same FLOP.
_VARIANTS = {
    "Dense": "dense",
    "Soft MoE": "soft",
    "token choice with batch priority": "token_choice",
}
_PAIRS = (
    ("Soft MoE", "Dense"),
    ("token choice with batch priority", "Dense"),
    ("Soft MoE", "token choice with batch priority"),
)

# Within the token choice model, at inference: text, source, the part of its results
# that is looked at, and what is compared, callables that take that part.
_OF_ROUTING = (
    (
        "With few slots, batch priority keeps more accuracy than the order of patches",
        "V-MoE, section 4.2 and figure 6",
        "fewer_slots",
        {
            f"C = {factor}": lambda rows, factor=factor: (
                _with(rows, factor, "max") - _with(rows, factor, "position")
            )
            for factor in CAPACITY_FACTORS
        },
    ),
    (
        "Learned routers are better than random ones",
        "V-MoE, section 5 and appendix E.1",
        "random_routers",
        {"learned - random": lambda found: found["none"] - found["all"]},
    ),
    (
        "The last routers matter more than the first",
        "V-MoE, section 5 and figure 27",
        "random_routers",
        {
            "lost with the last at random - with the first": lambda found: (
                found["one"][0] - found["one"][-1]
            )
        },
    ),
)


def claims():
    """Compare the presets with each other.

    Returns:
        list of `Claim`. One whose presets have no common seed has no differences.
    """
    found = trainings()
    of_twins = [
        Claim(text, source, {m: paired(found, [pair], _number, m) for m in _TASKS})
        for (text, source), pair in zip(HEADLINE, _PAIRS, strict=True)
    ]
    runs = found["token choice with batch priority"]
    of_routing = [
        Claim(text, source, {"upstream": _within(runs, part, contrasts)})
        for text, source, part, contrasts in _OF_ROUTING
    ]
    return corrected([*of_twins, *of_routing, _control(found)])


def random_and_dense():
    """By seed: accuracies of token choice, of it with random routers, and of the dense.

    Returns:
        dict from seeds to three floats, of the seeds that have all.
    """
    return _random_and_dense(trainings())


def trainings():
    """Dict from the names of the variants to their runs."""
    return {variant: read_runs(TWINS[twin].name) for variant, twin in _VARIANTS.items()}


def _number(run, metric):
    if metric in run["upstream_accuracy_by_layout"]:
        return run["upstream_accuracy_by_layout"][metric]
    values = run["few_shot"]["model"]["5"] if metric == "few_shot" else run[metric]
    return float(np.mean(values))


def _random_and_dense(found):
    dense = {run["seed"]: run["upstream_accuracy"] for run in found["Dense"]}
    return {
        run["seed"]: (
            run["random_routers"]["none"],
            run["random_routers"]["all"],
            dense[run["seed"]],
        )
        for run in found["token choice with batch priority"]
        if "random_routers" in run and run["seed"] in dense
    }


def _control(found):
    by_seed = [dense - random for _, random, dense in _random_and_dense(found).values()]
    text = "With random routers token choice is below the dense model of the same FLOP"
    name = "dense - token choice with random routers"
    differences = [difference(name, by_seed)] if by_seed else []
    return Claim(text, "ours: a control", {"upstream": differences})


def _within(runs, part, contrasts):
    """Differences between results of the same models, those that have the part."""
    parts = [run[part] for run in runs if part in run]
    return [
        difference(name, [contrast(part) for part in parts])
        for name, contrast in contrasts.items()
        if parts
    ]


def _with(rows, capacity_factor, priority):
    """Accuracy with these settings."""
    (row,) = (
        row
        for row in rows
        if (row["capacity_factor"], row["priority"]) == (capacity_factor, priority)
    )
    return row["accuracy"]
