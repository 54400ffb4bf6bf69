"""Tables and a figure of the study on icons: the questions of `PLAN.md`."""

from pathlib import Path

import numpy as np

from experiments.icons.study import MODELS
from experiments.lib.comparisons import corrected, difference
from keras_softmoe.drawing import (
    as_percentages,
    label_axes,
    labelled,
    legend_beside,
    line_styles,
    panel_grid,
    plain_axes,
)
from keras_softmoe.files import atomic_file

# A corrected p under it answers.
LEVEL = 0.05
QUESTIONS = {
    "a": (
        "Is learned routing better than random routing, and than fixed routing?",
        [("vmoe", "random"), ("vmoe", "position")],
    ),
    "b": (
        "Are mixtures better than dense at equal FLOP?",
        [("vmoe", "dense"), ("soft", "dense"), ("expert", "dense")],
    ),
    "c": ("And at equal seconds?", [("vmoe", "longer")]),
    "d": (
        "How much of the gain of width do they bring?",
        [("wide", "dense"), ("vmoe", "wide")],
    ),
    "e": ("Are more experts better?", [("vmoe", "vmoe_4"), ("vmoe_64", "vmoe")]),
}


def differences(results):
    """The `Difference` of each pair that the plan names, corrected together.

    Args:
        results: dict from models to lists of results with their seeds.

    Returns:
        dict from pairs of models to `Difference`, in points; those of which no seed has
        both models are left out.
    """
    found = {}
    for pair in (pair for _, pairs in QUESTIONS.values() for pair in pairs):
        left, right = (
            {row["seed"]: row["accuracy"] for row in results.get(name, ())}
            for name in pair
        )
        both = sorted(left.keys() & right.keys())
        if both:
            gains = [100 * (left[seed] - right[seed]) for seed in both]
            found[pair] = difference(" less ".join(pair), gains)
    return dict(zip(found, corrected(list(found.values())), strict=True))


def questions_table(results):
    """Each question with its differences, in Markdown."""
    found = differences(results)
    lines = ["| | difference | 95 % | seeds | p, corrected | answer |"]
    lines.append("|---|---|---|---|---|---|")
    for letter, (text, pairs) in QUESTIONS.items():
        lines.append(f"| **({letter})** | **{text}** |  |  |  |  |")
        for pair in pairs:
            names = _names(pair)
            if pair not in found:
                lines.append(f"|  | {names} | not measured |  |  |  |")
                continue
            of = found[pair]
            interval, p = _interval_and_p(of, " points")
            cells = "", names, interval, str(of.seeds), p, answer(of)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def answer(of):
    """The answer that a corrected `Difference` is: yes or no by its sign, or open."""
    if not of.adjusted_p < LEVEL:
        return "open"
    return "yes" if of.mean > 0 else "no"


def _names(pair):
    return " less ".join(f'"{MODELS[name].title}"' for name in pair)


def _interval_and_p(of, unit=""):
    return f"{of.mean:+.1f} ± {of.margin:.1f}{unit}", f"{of.adjusted_p:.2g}"


def lengths_table(by_length):
    """Differences after trainings of several lengths, then accuracies, in Markdown.

    Args:
        by_length: dict from titles of lengths to the results of the same models.
    """
    found = {length: differences(results) for length, results in by_length.items()}
    heads = [cell for length in found for cell in (length, "p, corrected", "answer")]
    lines = [f"| difference, points | {' | '.join(heads)} |"]
    lines.append("|---" * (1 + len(heads)) + "|")
    for pair in next(iter(found.values())):
        cells = [_names(pair)]
        for differs in found.values():
            of = differs.get(pair)
            cells += (
                [*_interval_and_p(of), answer(of)] if of else ["not trained", "", ""]
            )
        lines.append(f"| {' | '.join(cells)} |")
    heads = [cell for length in found for cell in (length, "seconds")]
    lines += ["", f"| accuracy, % | parameters | {' | '.join(heads)} |"]
    lines.append("|---" * (2 + len(heads)) + "|")
    for key, rows in next(iter(by_length.values())).items():
        cells = [MODELS[key].title, f"{rows[0]['parameters']:,}"]
        for of_length in by_length.values():
            rows = of_length.get(key)
            cells.append(_mean_accuracy(rows) if rows else "not trained")
            cells.append(f"{np.mean([r['seconds'] for r in rows]):.0f}" if rows else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_accuracy(rows):
    values = [100 * row["accuracy"] for row in rows]
    spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return f"{np.mean(values):.1f} ± {spread:.1f}"


def models_table(results):
    """What each model has reached, in Markdown.

    Seconds are of the whole training; steps and seconds "to dense" are those after
    which the mean curve of a model is where the curve of the dense model ends, as
    shares of that model's.
    """
    lines = [
        "| model | parameters | accuracy, % | known styles, % | dropped | seconds "
        "| share of steps to dense | of seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    end = None
    for key, rows in results.items():
        curve = np.mean([[x["accuracy"] for x in row["curve"]] for row in rows], 0)
        seconds = np.mean([row["seconds"] for row in rows])
        if key == "dense":
            end, dense_seconds, dense_epochs = curve[-1], seconds, len(curve)
        reached = np.flatnonzero(curve >= end) if end is not None else []
        epochs = reached[0] + 1 if len(reached) else None
        drops = [np.mean(row["dropped"]) for row in rows if row.get("dropped")]
        cells = (
            MODELS[key].title,
            f"{rows[0]['parameters']:,}",
            _mean_accuracy(rows),
            f"{100 * np.mean([row['trained_styles'] for row in rows]):.1f}",
            f"{100 * np.mean(drops):.0f} %" if drops else "",
            f"{seconds:.0f}",
            f"{epochs / dense_epochs:.2f}" if epochs else "",
            f"{epochs / len(curve) * seconds / dense_seconds:.2f}" if epochs else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(results):
    """Figure of the accuracy over the part of the steps, and over seconds."""
    figure, axes = panel_grid(2, 3.4, 3.2, sharey=True)
    for (key, rows), style in zip(results.items(), line_styles(results), strict=True):
        curve = np.mean([[x["accuracy"] for x in row["curve"]] for row in rows], 0)
        part = np.arange(1, len(curve) + 1) / len(curve)
        seconds = np.mean([row["seconds"] for row in rows])
        axes[0].plot(part, curve, label=MODELS[key].title, **style)
        axes[1].plot(part * seconds, curve, **style)
    for axis, label in zip(axes, ("part of its own steps", "seconds"), strict=True):
        plain_axes(axis)
        as_percentages(axis.yaxis)
        label_axes(axis, label)
    label_axes(axes[0], y="accuracy, styles held out")
    legend_beside(figure, labelled(axes[0]))
    return figure


def write_answers(results, directory):
    """Print the tables, and write the figure `curves.png` to a directory."""
    print(questions_table(results), models_table(results), sep="\n\n")
    with atomic_file(Path(directory, "curves.png")) as aside:
        curves(results).savefig(aside, dpi=120, format="png")
