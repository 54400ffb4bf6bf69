"""Pictures of a study, from its results alone."""

import itertools
import statistics

import numpy as np

from experiments.router_study.configurations import FAMILIES, STUDIES, families
from experiments.router_study.tables import numbers, seeds_of
from keras_softmoe.drawing import (
    MARKERS,
    PALETTE,
    as_percentages,
    new_figure,
    plain_axes,
)

_NAMES = {
    "upstream_accuracy": "upstream accuracy",
    "fine_tuned_accuracy": "fine-tuned accuracy",
}


def plot_study(results, metric="upstream_accuracy"):
    """Show the accuracy of the routers against what training costs.

    Left: the time of a training step over the dense model's. Right: the operations of
    the whole training. Points are means over the seeds, error bars reach one standard
    deviation up and down. Each family of routers has a colour and a marker, the
    ablations are grey; where a family comes in several capacities, the smallest is
    hollow and a line joins them.

    Args:
        results: dict, what `run_study` returns, or read from its JSON.
        metric: str, `"upstream_accuracy"`, `"fine_tuned_accuracy"`, or `"10-shot"` and
            the like.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if the results hold no such numbers of the study `"routers"`.
        ImportError: if matplotlib is missing.

    Source: router study, figures 1 and 2.

    Example:

    >>> figure = plot_study(results, "10-shot")
    >>> figure.savefig("study_10_shot.png")
    """
    shots = [f"{count}-shot" for count in results["scale"]["shots"]]
    accepted = [*_NAMES, *shots]
    if metric not in accepted or "routers" not in results["studies"]:
        raise ValueError(
            f"Metrics are {accepted}, and the study must be 'routers'. Received: "
            f"metric={metric!r}, studies={list(results['studies'])}."
        )
    points = _points(results, metric)
    if not points:
        raise ValueError(
            "No model of this study is finished, or all have diverged. Received: "
            f"metric={metric!r}."
        )
    figure = new_figure(9.0, 3.8)
    left, right = figure.subplots(1, 2, sharey=True)
    markers = dict(zip(FAMILIES, itertools.cycle(MARKERS)))
    colored = families("dense", "token", "expert", "soft")
    colors = dict(zip(colored, PALETTE, strict=True))
    for family, row in points.items():
        color, marker = colors.get(family, "0.5"), markers[family]
        for ax, cost in ((left, "ratio"), (right, "training_gflop")):
            _draw_family(ax, row, cost, color, marker, FAMILIES[family].title)
    left.set_xlabel("time of a training step, dense = 1", fontsize=9)
    right.set_xlabel("operations of the whole training, TFLOP", fontsize=9)
    task = f"{metric} accuracy on digits" if metric in shots else _NAMES[metric]
    left.set_ylabel(task, fontsize=9)
    for ax in (left, right):
        plain_axes(ax)
    as_percentages(left.yaxis)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize=8)
    count = len(results["scale"]["seeds"])
    title = f"Scale {results['scale']['name']}, {count} seed{'s' * (count > 1)}"
    if any(len(row) > 1 for row in points.values()):
        title += "; hollow: the fewest slots per token"
    figure.suptitle(title, fontsize=10)
    return figure


def plot_curves(results, studies=("headline", "initial_scale")):
    """Show how models learn, and how sharply their soft routers route meanwhile.

    One row for each study. Left: accuracy on images that were not trained on, against
    the images seen; lines are means over seeds, bands reach from the least to the most.
    Right: the largest dispatch weight of a slot in even shares, the mean of the blocks;
    at 1 (dashed) every slot is the mean of the image.

    Args:
        results: dict, what `run_study` returns, or read from its JSON.
        studies: sequence of names of studies.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if nothing of a study is finished.
        ImportError: if matplotlib is missing.

    Example:

    >>> plot_curves(results).savefig("curves.png")
    """
    curves = {study: _curves(results, study) for study in studies}
    if not all(curves.values()):
        raise ValueError(
            "Nothing of these studies is finished. Received: "
            f"studies={[study for study in studies if not curves[study]]}."
        )
    figure = new_figure(9.0, 3.2 * len(studies))
    for row, study in zip(
        figure.subplots(len(studies), 2, squeeze=False), studies, strict=True
    ):
        accuracy, sharpness = row
        for color, (title, found) in zip(
            itertools.cycle(PALETTE), curves[study].items()
        ):
            for ax, values in zip(row, found, strict=True):
                if values is not None:
                    images = _images_seen(results, values.shape[1])
                    ax.plot(images, values.mean(0), color=color, lw=1.2, label=title)
                    ends = values.min(0), values.max(0)
                    ax.fill_between(images, *ends, color=color, alpha=0.2, lw=0)
        as_percentages(accuracy.yaxis)
        accuracy.set_ylabel("upstream accuracy", fontsize=9)
        accuracy.legend(fontsize=7, loc="lower right")
        sharpness.axhline(1.0, color="0.5", ls="--", lw=0.8)
        sharpness.set_ylabel("largest dispatch weight, even shares", fontsize=9)
        for ax in row:
            plain_axes(ax)
            ax.set_xlabel("images seen, thousands", fontsize=9)
        accuracy.set_title(STUDIES[study], fontsize=9, loc="left")
    return figure


def _images_seen(results, epochs):
    scale = results["scale"]
    part = scale["steps_per_epoch"] * scale["batch_size"] / 1e3
    return [part * (epoch + 1) for epoch in range(epochs)]


def _curves(results, study):
    """Title -> accuracy and sharpness, `(seeds, epochs)` arrays, or `None`."""
    found = {}
    for name in results["studies"].get(study, ()):
        cells = results["cells"].get(name, {})
        curves = [
            cells[seed]["curve"]
            for seed in seeds_of(results, study)
            if seed in cells and not cells[seed]["diverged"]
        ]
        if not curves:
            continue
        accuracy = [[point["accuracy"] for point in curve] for curve in curves]
        sharpness = None
        if curves[0][0]["sharpness"]:
            sharpness = np.array(
                [
                    [np.mean(point["sharpness"], axis=0)[0] for point in curve]
                    for curve in curves
                ]
            )
        title = results["configurations"][name]["title"]
        found[title] = np.array(accuracy), sharpness
    return found


def _points(results, metric):
    """Family -> list of dicts with both costs, mean and spread."""
    points = {}
    for name in results["studies"]["routers"]:
        found = numbers(results, name, metric, seeds_of(results, "routers"))
        if not found:
            continue
        known = results["configurations"][name]
        point = {
            "ratio": results["times"]["steps"][name]["ratio"],
            "training_gflop": known["training_gflop"] / 1e3,
            "mean": statistics.fmean(found),
            "spread": statistics.stdev(found) if len(found) > 1 else 0.0,
            "slots": known["slots_per_token"] or 0,
        }
        points.setdefault(known["family"], []).append(point)
    return {
        family: sorted(row, key=lambda point: point["slots"])
        for family, row in points.items()
    }


def _draw_family(ax, row, cost, color, marker, label):
    x, y = ([point[key] for point in row] for key in (cost, "mean"))
    ax.plot(x, y, color=color, lw=0.8, alpha=0.6)
    for index, (place, point) in enumerate(zip(x, row, strict=True)):
        hollow = len(row) > 1 and index == 0
        ax.errorbar(
            place,
            point["mean"],
            point["spread"],
            color=color,
            marker=marker,
            ms=6,
            mfc="white" if hollow else color,
            lw=0.8,
            capsize=2,
            ls="none",
            # The filled one stands for both.
            label=None if hollow else label,
        )
