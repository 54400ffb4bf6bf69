"""What a point of upstream accuracy is worth on the new task."""

from typing import NamedTuple

import numpy as np
from scipy import stats

from experiments.router_study.claims import value
from experiments.router_study.configurations import FAMILIES
from keras_softmoe.drawing import (
    PALETTE,
    as_percentages,
    new_figure,
    plain_axes,
)

FEW_SHOT = "5-shot"


class Transfer(NamedTuple):
    """The line through all trainings, upstream accuracy against that of another task.

    Attributes:
        slope: float, points of the other accuracy for a point upstream.
        intercept: float.
        correlation: float.
        left: float, standard deviation around the line.
        count: int, trainings.
    """

    slope: float
    intercept: float
    correlation: float
    left: float
    count: int


def transfer(results, metric=FEW_SHOT):
    """How upstream accuracy goes with another one, over models and seeds.

    There is no interval: the seeds of a model, and models with the same images, are not
    independent.

    Args:
        results: dict, what `run_study` returns, or read from its JSON.
        metric: str, as of `claims.value`.

    Returns:
        `Transfer`, or `None` of fewer than four trainings, or if all are equal.

    Example:

    >>> transfer(results).slope
    """
    x, y = _pairs(results, metric).T
    if len(x) < 4 or np.ptp(x) == 0:
        return None
    line = stats.linregress(x, y)
    left = y - line.intercept - line.slope * x
    return Transfer(
        slope=float(line.slope),
        intercept=float(line.intercept),
        correlation=float(line.rvalue),
        left=float(np.sqrt(np.sum(left**2) / (len(x) - 2))),
        count=len(x),
    )


def in_words(found, metric=FEW_SHOT):
    """A `Transfer` as text."""
    return (
        f"Over all {found.count} trainings one point of upstream accuracy goes with "
        f"{found.slope:.2f} points of {metric} accuracy (correlation "
        f"{found.correlation:.2f}). Around that line trainings scatter by a standard "
        f"deviation of {100 * found.left:.2f} points."
    )


def plot_transfer(results, metric=FEW_SHOT):
    """Show the accuracy on a new task against upstream accuracy, training by training.

    The dense model and Soft MoE have colours, all other models are grey; the line is
    that of `transfer`.

    Args:
        results: dict, as of `transfer`.
        metric: str, as there.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if there are too few trainings for a line.
        ImportError: if matplotlib is missing.

    Example:

    >>> plot_transfer(results).savefig("transfer.png")
    """
    found = transfer(results, metric)
    if found is None:
        raise ValueError(
            "A line needs four trainings that are not all equal. Received: "
            f"{len(_pairs(results, metric))} trainings."
        )
    figure = new_figure(4.6, 3.6)
    ax = figure.subplots()
    others = [family for family in FAMILIES if family not in ("dense", "soft")]
    for label, families, color in (
        ("other mixtures", others, "0.7"),
        ("dense", ["dense"], PALETTE[0]),
        ("Soft MoE", ["soft"], PALETTE[1]),
    ):
        pairs = _pairs(results, metric, families)
        ax.plot(*pairs.T, "o", ms=4, color=color, label=label)
    x = np.array(ax.get_xlim())
    ax.plot(x, found.intercept + found.slope * x, color="0.3", lw=0.8)
    ax.set_xlabel("upstream accuracy", fontsize=9)
    ax.set_ylabel(f"{metric} accuracy on digits", fontsize=9)
    plain_axes(ax)
    for axis in (ax.xaxis, ax.yaxis):
        as_percentages(axis)
    ax.legend(fontsize=8)
    return figure


def _pairs(results, metric, families=tuple(FAMILIES)):
    """Upstream accuracy and another one of each training, `(N, 2)`."""
    scale = results["scale"]
    seeds = list(map(str, scale["seeds"] + scale["more_seeds"]))
    pairs = [
        (value(results, name, seed, "upstream_accuracy"), other)
        for name, known in results["configurations"].items()
        if known["family"] in families
        for seed in seeds
        if (other := value(results, name, seed, metric)) is not None
    ]
    return np.array(pairs, float).reshape(-1, 2)
