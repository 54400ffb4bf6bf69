"""Pictures of what the threshold of LIMoE's global entropy loss does."""

import numpy as np

from keras_softmoe.evaluation.modalities import ModalityStatistics
from keras_softmoe.visualization.drawing import (
    MARKERS,
    MODALITY_COLORS,
    check_statistics,
    import_matplotlib,
    is_number,
    legend_beside,
    new_figure,
    plain_axes,
    spread_of,
)

_MOST_TICKS = 10


def plot_experts_in_use(by_threshold, share=0.9):
    """Show how many experts text and images use, against the threshold for text.

    Points are means over the MoE blocks and over seeds, error bars reach one standard
    deviation over seeds up and down. On the dashed line as many experts are in use as
    the threshold asks for.

    Args:
        by_threshold: dict from the threshold for text, as the soft minimum of experts
            `S = exp(threshold)`, to what `evaluation.modality_statistics` returns for a
            model that was trained with it; or to a list of those, one for each seed; or
            to a dict from `"text"` and `"image"` to the experts in use, a number or
            one for each seed.
        share: float in `(0, 1]`. An expert is in use if it is among the fewest that
            serve this share of the tokens of a modality.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not thresholds and statistics or numbers, or `share` is
            not a part of the tokens.
        ImportError: if matplotlib is missing.

    Source: LIMoE, appendix B.2 (figure 10).

    Example:

    >>> statistics = {
    ...     S: [ksm.evaluation.modality_statistics(m, images, captions) for m in models]
    ...     for S, models in models_by_threshold.items()
    ... }
    >>> figure = ksm.visualization.plot_experts_in_use(statistics)
    """
    matplotlib = import_matplotlib()
    points = _points(by_threshold, lambda block: block.experts_needed(share), True)
    figure = new_figure(matplotlib, 5.0, 3.2)
    ax = figure.subplots()
    handles = _draw_lines(ax, points)
    handles["as many as\nasked for"] = _draw_target(ax, points, lambda s: s)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("experts asked for, S = exp(threshold for text)", fontsize=9)
    ax.set_ylabel(f"experts that serve {100 * share:g}%", fontsize=9)
    legend_beside(figure, handles)
    return figure


def plot_routing_entropy(by_threshold):
    """Show how evenly text and images are routed, against the threshold for text.

    To the left the entropy of the mean routing probabilities, which is what the loss
    holds over the threshold; to the right that of the tokens that the experts process,
    after choices were made and tokens dropped. Points are means over the MoE blocks and
    over seeds, error bars reach one standard deviation over seeds up and down. The
    dashed line is the threshold.

    Args:
        by_threshold: as in `plot_experts_in_use`, with statistics.

    Returns:
        `matplotlib.figure.Figure`. Both panels share their axes.

    Raises:
        ValueError: if these are not thresholds and statistics.
        ImportError: if matplotlib is missing.

    Source: LIMoE, appendix B.2 (figure 9).

    Example:

    >>> figure = ksm.visualization.plot_routing_entropy(statistics_by_threshold)
    """
    matplotlib = import_matplotlib()
    measures = {
        "router": lambda block: block.entropy,
        "after dispatch": lambda block: block.dispatch_entropy,
    }
    found = {
        title: _points(by_threshold, measure) for title, measure in measures.items()
    }
    figure = new_figure(matplotlib, 7.4, 3.2)
    axes = figure.subplots(1, len(found), sharex=True, sharey=True)
    for ax, (title, points) in zip(axes, found.items(), strict=True):
        handles = _draw_lines(ax, points)
        handles["threshold"] = _draw_target(ax, points, np.log)
        ax.set_title(title, fontsize=9)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("entropy of routing, in nats", fontsize=9)
    figure.supxlabel("experts asked for, S = exp(threshold for text)", fontsize=9)
    legend_beside(figure, handles)
    return figure


def _points(by_threshold, measure, or_numbers=False):
    """Dict from threshold to a dict from modality to a number for each seed."""
    known = isinstance(by_threshold, dict) and by_threshold
    if not known or not all(is_number(s) and s >= 1 for s in by_threshold):
        raise ValueError(
            "`by_threshold` must be a dict from soft minima of experts, 1 or more, to "
            f"statistics, not empty. Received: by_threshold={by_threshold!r:.200}."
        )
    points = {}
    for threshold in sorted(by_threshold):
        value = by_threshold[threshold]
        is_measured = isinstance(value, dict) and set(value) <= set(MODALITY_COLORS)
        if or_numbers and is_measured and value:
            points[threshold] = {n: np.atleast_1d(x) for n, x in value.items()}
        else:
            points[threshold] = _by_seed(value, measure)
    return points


def _by_seed(value, measure):
    seeds = value if isinstance(value, list | tuple) else [value]
    found = {}
    for statistics in seeds or [None]:
        check_statistics(statistics, ModalityStatistics)
        blocks = [measure(block) for block in statistics.values()]
        for name in blocks[0]:
            mean = np.mean([block[name] for block in blocks])
            found.setdefault(name, []).append(mean)
    return found


def _draw_lines(ax, points):
    """Draw a line for each modality; returns handles for the legend."""
    handles = {}
    for index, (name, color) in enumerate(MODALITY_COLORS.items()):
        line = {s: found[name] for s, found in points.items() if name in found}
        if not line:
            continue
        handles[name] = ax.errorbar(
            list(line),
            [np.mean(values) for values in line.values()],
            [spread_of(values) for values in line.values()],
            color=color,
            marker=MARKERS[index],
            ms=5,
            lw=1.4,
            capsize=3,
        )
    plain_axes(ax)
    return handles


def _draw_target(ax, thresholds, target):
    """Number the thresholds and draw what they ask for; returns the line."""
    ordered = list(thresholds)
    step = -(-len(ordered) // _MOST_TICKS)
    ax.set_xticks(ordered[::step], [f"{s:g}" for s in ordered[::step]])
    along = np.linspace(ordered[0], ordered[-1])
    (line,) = ax.plot(along, target(along), color="0.35", ls="--", lw=1, zorder=1)
    return line
