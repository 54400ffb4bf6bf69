"""Figures of what routers do with tokens and images: load, weights, experts in use."""

from collections.abc import Sequence

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis._load import ExpertLoad
from keras_softmoe.analysis._statistics import RoutingStatistics
from keras_softmoe.types import Figure

_CHOICES = ("largest", "2nd largest", "3rd largest")


def plot_expert_load(loads: dict, layers: Sequence | None = None) -> Figure:
    """Show how many tokens each expert takes, and how many are dropped.

    One panel for each MoE block, one bar for each expert: the tokens that it takes (of
    a router that mixes tokens: the sum of its combine weights), over an even share,
    which is the dashed line.

    Args:
        loads: what `analysis.expert_load` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`. All its panels share their vertical axis.

    Raises:
        ValueError: if these are not loads of these blocks.

    Source: V-MoE, section 5; Soft MoE, appendices B and H.

    Examples:
        >>> loads = ksm.analysis.expert_load(sparse, images)
        >>> figure = ksm.analysis.plot_expert_load(loads)
    """
    figure, panels = drawing.block_panels(
        loads, layers, ExpertLoad, 2.3, 2.0, sharey=True
    )
    for ax, block in panels:
        # Of experts that take nothing at all, zeros.
        relative = block.load / max(block.load.mean(), np.finfo("float32").tiny)
        ax.bar(np.arange(len(relative)), relative, width=0.85, color=drawing.PALETTE[0])
        ax.axhline(1.0, color="black", ls="--", lw=1.0)
        dropped = f"dropped {100 * block.dropped:.3g}% of tokens"
        ax.set_title(f"{ax.get_title()}\n{dropped}", fontsize=8)
        drawing.whole_ticks(ax.xaxis, 6)
        drawing.plain_axes(ax, 7)
    drawing.format_ticks(figure.axes[0].yaxis, lambda value: f"{value:.3g}×")
    drawing.label_axes(figure, "expert", "load, in even shares")
    return figure


def plot_choice_weights(statistics: dict, layers: Sequence | None = None) -> Figure:
    """Show how large the largest router weights of the tokens are.

    One panel for each MoE block: how the largest, the second largest, ... weight that
    the router gives a token is distributed, as many as tokens choose experts (at most
    two where experts choose or mix). A dotted line marks `1/E`, the least that the
    largest of `E` probabilities can be: a router that piles up there is indifferent.

    Args:
        statistics: what `analysis.routing_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`. All its panels share their axes.

    Raises:
        ValueError: if these are not statistics of these blocks.

    Source: V-MoE, appendix E.3 (figure 31).

    Examples:
        >>> statistics = ksm.analysis.routing_statistics(sparse, images)
        >>> figure = ksm.analysis.plot_choice_weights(statistics)
    """
    figure, panels = drawing.block_panels(
        statistics, layers, RoutingStatistics, 2.3, 2.0, sharex=True, sharey=True
    )
    for ax, block in panels:
        histogram = block.choice_histogram
        edges = np.linspace(0, 1, histogram.shape[1] + 1)
        names = [*_CHOICES, *(f"{k}th largest" for k in range(4, len(histogram) + 1))]
        names = names[: len(histogram)]
        for counts, name, color in zip(
            histogram, names, drawing.line_colors(names), strict=True
        ):
            shares = counts / max(counts.sum(), 1)
            ax.stairs(shares, edges, fill=True, color=color, alpha=0.2)
            ax.stairs(shares, edges, color=color, lw=1.2, label=name)
        ax.axvline(1 / len(block.load), color="0.3", ls=":", lw=1, label="1/E")
        drawing.plain_axes(ax, 7)
    first = figure.axes[0]
    # Once all is drawn: it ends the search for limits that show everything.
    first.set(xlim=(0, 1), ylim=(0, None))
    drawing.as_percentages(first.yaxis)
    first.legend(fontsize=7, title="weight", title_fontsize=7)
    drawing.label_axes(figure, "router weight", "tokens")
    return figure


def plot_experts_per_image(statistics: dict, layers: Sequence | None = None) -> Figure:
    """Show how many experts take tokens of an image.

    One panel for each MoE block: the share of images on which that many experts work,
    from none to all, and a dashed line at the mean.

    Args:
        statistics: what `analysis.routing_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`. All its panels share their axes.

    Raises:
        ValueError: if these are not statistics of these blocks.

    Source: V-MoE, appendix E.3 (figure 32).

    Examples:
        >>> statistics = ksm.analysis.routing_statistics(sparse, images)
        >>> figure = ksm.analysis.plot_experts_per_image(statistics)
    """
    figure, panels = drawing.block_panels(
        statistics, layers, RoutingStatistics, 2.3, 2.0, sharex=True, sharey=True
    )
    for ax, block in panels:
        used, num_experts = block.experts_per_image, len(block.load)
        shares = np.bincount(used, minlength=num_experts + 1) / len(used)
        ax.bar(range(num_experts + 1), shares, width=0.9, color=drawing.PALETTE[0])
        label = f"mean {used.mean():.1f} of {num_experts}"
        ax.axvline(used.mean(), color=drawing.PALETTE[1], ls="--", lw=1.2, label=label)
        ax.legend(fontsize=7)
        drawing.plain_axes(ax, 7)
    drawing.whole_ticks(figure.axes[0].xaxis)
    drawing.as_percentages(figure.axes[0].yaxis)
    drawing.label_axes(figure, "experts that take a token of the image", "images")
    return figure
