"""Tables and a figure of the study: each question of PLAN.md with its answer.

python -m experiments.letters.answers --output build/letters/answers.md
"""

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

from experiments.letters.models import CURVES, MODELS
from experiments.lib.comparisons import corrected, difference
from experiments.lib.runs import read_json
from keras_softmoe.drawing import (
    as_percentages,
    draw_seeds,
    label_axes,
    line_styles,
    new_figure,
    plain_axes,
)
from keras_softmoe.files import atomic_file

# Primary outcomes are one family for Holm's correction.
PRIMARY = "primary"
# A corrected p under it answers.
LEVEL = 0.05


class Effect(NamedTuple):
    """A difference between two numbers of the same seed.

    Attributes:
        title: str.
        left, right: pairs of a run, such as `"anywhere_vmoe"`, and the path of a number
            in its results: the number on the left less that on the right.
        unit: str, `"points"` (of 100) or `""`.
    """

    title: str
    left: tuple
    right: tuple
    unit: str = "points"


class Question(NamedTuple):
    """A question of the plan.

    Attributes:
        text: str.
        primary, secondary: tuples of `Effect`.
    """

    text: str
    primary: tuple
    secondary: tuple = ()


def gain(left, right, placement="anywhere", metric="accuracy"):
    """Accuracy of one model less that of another, an `Effect`."""
    where = "" if placement == "anywhere" else f", {placement}"
    kind = {"accuracy": "", "new_fonts": ", new fonts"}[metric]
    names = (MODELS[name].title for name in (left, right))
    return Effect(
        " less ".join(f'"{name}"' for name in names) + where + kind,
        *((f"{placement}_{name}", (metric,)) for name in (left, right)),
    )


def _within(title, run, left, right, unit="points"):
    return Effect(title, (run, left), (run, right), unit)


_MIXTURES = ("soft", "vmoe", "expert")
# With one slot an expert has no others to align with.
_VMOE, _SLOTS = "anywhere_vmoe", "anywhere_soft_5"

QUESTIONS = {
    "a": Question(
        "Is learned routing better than random routing of the same cost, and than "
        "fixed routing by position?",
        (gain("vmoe", "random"), gain("vmoe", "position")),
        (
            gain("vmoe", "random", "centred"),
            gain("vmoe", "position", "centred"),
            gain("vmoe", "random", metric="new_fonts"),
            gain("random", "dense"),
        ),
    ),
    "b": Question(
        "Are Soft MoE, V-MoE and expert choice better than the dense model of the same "
        "cost?",
        tuple(gain(name, "dense") for name in _MIXTURES),
        (
            *(gain(name, "longer") for name in _MIXTURES),
            *(gain(name, "dense", "centred") for name in ("soft", "vmoe")),
            *(gain(name, "dense", metric="new_fonts") for name in _MIXTURES),
            gain("wide", "dense"),
            *(gain("wide", name) for name in _MIXTURES),
        ),
    ),
    "c": Question(
        "Are more experts better at the same cost?",
        (gain("vmoe", "vmoe_5"), gain("soft", "soft_1")),
        tuple(
            gain(more, fewer)
            for curve in CURVES.values()
            for fewer, more in zip(
                list(curve.values())[:-1], list(curve.values())[1:], strict=True
            )
        ),
    ),
    "d": Question(
        "Does batch priority keep accuracy where a trained V-MoE has few slots?",
        (
            _within(
                "priority less order of position, a quarter of the slots",
                _VMOE,
                ("slots", "0.25", "max"),
                ("slots", "0.25", "position"),
            ),
        ),
        (
            _within(
                "priority less order of position, half of the slots",
                _VMOE,
                ("slots", "0.5", "max"),
                ("slots", "0.5", "position"),
            ),
            _within(
                "all slots less a quarter of them with priority",
                _VMOE,
                ("accuracy",),
                ("slots", "0.25", "max"),
            ),
        ),
    ),
    "e": Question(
        "Does the content of a token choose its expert, or its position?",
        (
            _within(
                "routers see content alone less position alone",
                _VMOE,
                ("views", "content_only"),
                ("views", "position_only"),
            ),
        ),
        (
            _within(
                "routers see all less content alone",
                _VMOE,
                ("accuracy",),
                ("views", "content_only"),
            ),
            _within(
                "routers see all less position alone",
                _VMOE,
                ("accuracy",),
                ("views", "position_only"),
            ),
            _within(
                "routers see all less another image",
                _VMOE,
                ("accuracy",),
                ("views", "other_image"),
            ),
        ),
    ),
    "f": Question(
        "Do later blocks route by class, do slots of one expert align, and does "
        "dropping grow with the number of experts?",
        (
            _within(
                "share of the class in the expert's entropy, block 3 less block 1",
                _VMOE,
                ("blocks", "3", "label_share"),
                ("blocks", "1", "label_share"),
            ),
            _within(
                "cosine of slots, within an expert less between experts, block 3",
                _SLOTS,
                ("blocks", "3", "cosine_within"),
                ("blocks", "3", "cosine_between"),
                "",
            ),
            Effect(
                "dropped tokens, 25 experts less 5, block 3",
                (_VMOE, ("blocks", "3", "dropped")),
                ("anywhere_vmoe_5", ("blocks", "3", "dropped")),
            ),
        ),
        (
            _within(
                "cosine of slots, within an expert less between experts, block 1",
                _SLOTS,
                ("blocks", "1", "cosine_within"),
                ("blocks", "1", "cosine_between"),
                "",
            ),
            _within(
                "share of the position in the expert's entropy, block 3 less block 1",
                _VMOE,
                ("blocks", "3", "position_share"),
                ("blocks", "1", "position_share"),
            ),
        ),
    ),
}


# Asked after the answers: neither corrected nor part of the questions.
AFTERWARDS = (
    gain("position", "dense"),
    gain("position", "random"),
    gain("soft", "random"),
    gain("expert", "random"),
    gain("longer", "dense"),
    gain("longer", "position"),
    gain("vmoe_all", "random_all"),
    gain("vmoe_all", "vmoe"),
    gain("vmoe_all", "dense"),
    gain("random_all", "dense"),
    gain("vmoe_bias", "random"),
    gain("vmoe_bias", "dense"),
)


def values(results, run, path):
    """Return a number of each seed of a run that has it, a dict."""
    found = {}
    for row in results["runs"].get(run, ()):
        value = row
        for key in path:
            value = None if value is None else value.get(key)
        if value is not None:
            found[row["seed"]] = value
    return found


def measured(results, effect):
    """Return the `Difference` of an effect over seeds, a list of one or of none."""
    left, right = (values(results, *side) for side in (effect.left, effect.right))
    seeds = sorted(left.keys() & right.keys())
    if not seeds:
        return []
    return [difference(effect.title, [left[s] - right[s] for s in seeds])]


def outcomes(results):
    """Return the differences of each question: dict from letters to primary, secondary.

    Both are lists of `Difference`. The primary ones of all questions are corrected
    together.
    """
    primary = {k: _all(results, q.primary) for k, q in QUESTIONS.items()}
    family = iter(corrected([d for found in primary.values() for d in found]))
    return {
        letter: (
            [next(family) for _ in primary[letter]],
            _all(results, question.secondary),
        )
        for letter, question in QUESTIONS.items()
    }


def answer(effect, found):
    """Return what the `Difference` of a primary outcome says, a word or some."""
    if found.adjusted_p < LEVEL:
        return "yes" if found.mean > 0 else "no"
    is_small = abs(found.mean) + found.margin < 0.01
    return "less than a point" if is_small and effect.unit == "points" else "open"


def _all(results, effects):
    return [found for effect in effects for found in measured(results, effect)]


def report(results):
    """Write all answers: for each question its table, and one of all models.

    Args:
        results: dict, what `trainings.gather` returns.

    Returns:
        str, Markdown.
    """
    found = outcomes(results)
    family = sum(len(primary) for primary, _ in found.values())
    parts = [
        "# Answers of the study on letters",
        "Made by `python -m experiments.letters.answers`; [the plan](../PLAN.md) was "
        "written first. Differences are taken within each seed; ± is half of the 95 % "
        f"t-interval of their mean. p is corrected for the {family} primary outcomes "
        f"that are here (Holm), and answers where it is under {LEVEL}; secondary ones "
        "have no test. A question is answered yes if all its primary outcomes are.",
    ]
    for letter, question in QUESTIONS.items():
        primary, secondary = found[letter]
        known = {d.name: d for d in (*secondary, *primary)}
        rows = [_row(e, known.get(e.title), PRIMARY) for e in question.primary]
        rows += [_row(e, known.get(e.title), "secondary") for e in question.secondary]
        answers = [
            answer(effect, known[effect.title])
            for effect in question.primary
            if effect.title in known
        ]
        verdict = "yes" if set(answers) == {"yes"} else "open"
        if missing := len(question.primary) - len(answers):
            verdict = f"not run: {missing} of {len(question.primary)} primary outcomes"
        parts.append(
            f"## ({letter}) {question.text}\n\n**{verdict}**\n\n"
            "| effect | outcome | difference | seeds | p | answer |\n"
            "|---|---|---|---|---|---|\n" + "\n".join(rows)
        )
    parts += [
        "## Afterwards\n\nAsked after the answers were read, and not corrected.",
        afterwards(results),
        _models(results),
        "![the answers](../../../docs/images/letters.png)",
    ]
    return "\n\n".join(parts) + "\n"


def afterwards(results):
    """A table of what was asked after the answers, Markdown."""
    rows = [
        f"| {effect.title} | {with_unit(effect, d)} | {d.seeds} |"
        for effect in AFTERWARDS
        for d in measured(results, effect)
    ]
    return "| difference | 95 % | seeds |\n|---|---|---|\n" + "\n".join(rows)


def _row(effect, found, kind):
    if found is None:
        return f"| {effect.title} | {kind} | not run | 0 | | |"
    tested = [""] * 2
    if kind == PRIMARY and found.seeds > 1:
        tested = [f"{found.adjusted_p:.2g}", answer(effect, found)]
    cells = [effect.title, kind, with_unit(effect, found), f"{found.seeds}", *tested]
    return f"| {' | '.join(cells)} |"


def with_unit(effect, found):
    """The `Difference` of an effect with its interval and unit, str."""
    factor, digits = (100, 1) if effect.unit == "points" else (1, 3)
    text = f"{factor * found.mean:+.{digits}f}"
    if found.seeds > 1:
        text += f" ± {factor * found.margin:.{digits}f}"
    return f"{text} {effect.unit}".rstrip()


def _models(results):
    """A table of all models that were trained."""
    steps = results.get("steps", {})
    rows = []
    for name, rows_of in results["runs"].items():
        model = results["models"][name]
        dense = results["models"][f"{name.partition('_')[0]}_dense"]
        ratio = model["training_gflop"] / dense["training_gflop"]
        cells = [
            f"{100 * statistics.fmean(row[metric] for row in rows_of):.1f}"
            for metric in ("accuracy", "new_fonts")
        ]
        probe = statistics.fmean(row["few_shot"]["5"] for row in rows_of)
        minutes = statistics.median(results["seconds"][name]) / 60
        rows.append(
            f"| {model['title']}, {name.partition('_')[0]} | {model['parameters']:,} | "
            f"{ratio:.2f} | {steps.get(name, '')} | {cells[0]} | {cells[1]} | "
            f"{100 * probe:.1f} | {len(rows_of)} | {minutes:.0f} |"
        )
    return (
        "## All models\n\nFLOP of the training and processor time of a step are over "
        "those of the dense model. Accuracy in percent, means over the seeds.\n\n"
        "| model | parameters | FLOP | step | accuracy | in new fonts | 5-shot, new "
        "classes | seeds | minutes |\n|---|---|---|---|---|---|---|---|---|\n"
        + "\n".join(rows)
    )


# === Figure ===


def plot_answers(results):
    """Draw the answers: models, numbers of experts, slots and views.

    Args:
        results: dict, what `trainings.gather` returns.

    Returns:
        `matplotlib.figure.Figure`.
    """
    figure = new_figure(10.0, 6.6)
    (models, experts), (slots, views) = figure.subplots(2, 2)
    _draw_models(models, results)
    _draw_curves(experts, results)
    _draw_slots(slots, results)
    _draw_views(views, results)
    for ax in (models, experts, slots, views):
        plain_axes(ax)
    as_percentages(models.xaxis)
    for ax in (experts, slots, views):
        as_percentages(ax.yaxis)
    return figure


def _draw_models(ax, results):
    """Each seed of each model, on both placements."""
    keys = [key for key in MODELS if f"anywhere_{key}" in results["runs"]]
    styles = line_styles(("anywhere", "centred"))
    for placement, style in zip(("anywhere", "centred"), styles, strict=True):
        places, found = [], []
        for place, key in enumerate(keys):
            of_seeds = values(results, f"{placement}_{key}", ("accuracy",)).values()
            found += of_seeds
            places += [place] * len(of_seeds)
        style = {**style, "ls": "none", "alpha": 0.7, "ms": 3.5}
        ax.plot(found, places, label=placement, **style)
    ax.set_yticks(range(len(keys)), [MODELS[key].title for key in keys], fontsize=7)
    ax.invert_yaxis()
    ax.set_title("(a), (b) accuracy of each seed", fontsize=9, loc="left")
    ax.legend(fontsize=7)


def _draw_curves(ax, results):
    for (title, curve), style in zip(CURVES.items(), line_styles(CURVES), strict=True):
        found = {
            count: list(values(results, f"anywhere_{key}", ("accuracy",)).values())
            for count, key in curve.items()
        }
        found = {count: of_seeds for count, of_seeds in found.items() if of_seeds}
        if found:
            draw_seeds(ax, list(found), list(found.values()), label=title, **style)
    ax.set_xscale("log", base=5)
    ax.set_xticks([1, 5, 25], ["1", "5", "25"])
    label_axes(ax, "experts, at the same cost", "accuracy")
    ax.set_title("(c) more experts", fontsize=9, loc="left")
    ax.legend(fontsize=7)


def _draw_slots(ax, results):
    names = {"max": "batch priority", "position": "order of position"}
    for (priority, title), style in zip(names.items(), line_styles(names), strict=True):
        paths = {share: ("slots", share, priority) for share in ("0.25", "0.5")}
        paths["1"] = ("accuracy",)
        found = [list(values(results, _VMOE, path).values()) for path in paths.values()]
        if all(found):
            draw_seeds(ax, [float(s) for s in paths], found, label=title, **style)
    label_axes(ax, "slots per token of a trained V-MoE", "accuracy")
    ax.set_title("(d) batch priority", fontsize=9, loc="left")
    ax.legend(fontsize=7)


def _draw_views(ax, results):
    paths = {
        "all": ("accuracy",),
        "content": ("views", "content_only"),
        "position": ("views", "position_only"),
        "another\nimage": ("views", "other_image"),
    }
    for place, path in enumerate(paths.values()):
        found = list(values(results, _VMOE, path).values())
        ax.plot([place] * len(found), found, "o", color="0.2", ms=3.5, alpha=0.7)
    ax.set_xticks(range(len(paths)), list(paths), fontsize=8)
    label_axes(ax, "what the routers of a trained V-MoE see", "accuracy")
    ax.set_title("(e) position or content", fontsize=9, loc="left")


def main(arguments=None):
    """Write the answers of a file of results."""
    parser = argparse.ArgumentParser(prog="python -m experiments.letters.answers")
    parser.add_argument("--results", type=Path, default="build/letters/results.json")
    parser.add_argument("--output", type=Path, required=True, help="Markdown file")
    arguments = parser.parse_args(arguments)
    results = read_json(arguments.results, ("models", "runs", "seconds"))
    with atomic_file(arguments.output) as file:
        file.write_text(report(results), encoding="utf-8")


if __name__ == "__main__":
    main()
