"""Figures of what the slots of a Soft MoE mix, from statistics of its weights."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis._concentration import BANDS
from keras_softmoe.analysis._soft_statistics import TOKEN_WEIGHT_EDGES, SoftStatistics
from keras_softmoe.checks import check_choice
from keras_softmoe.types import Figure

# For "dispatch" and "combine": colours of the bands, what is counted, of what.
_KINDS = {
    "dispatch": ("Blues", "tokens", "a slot"),
    "combine": ("Oranges", "slots", "a token"),
}
_ORDER = "from the one with the largest weight on"
_LEAST_COLOR, _MOST_COLOR = drawing.PALETTE[1], drawing.PALETTE[0]
# Contributions that differ by more stand on a logarithmic axis.
_WIDE_RANGE = 20
# Tokens this rare are at the end of the scale.
_RAREST = 1e-4


def plot_token_weights(statistics: dict, layers: Sequence | None = None) -> Figure:
    """Show how much the tokens contribute to all slots together.

    One line for each block: the share of tokens whose dispatch weights, summed over all
    slots, reach the weight along the axis. The dotted line is the mean, where the line
    of a block would fall straight down if all tokens counted alike.

    Args:
        statistics: what `analysis.soft_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not statistics of these blocks.

    Source: Soft MoE, section 3.6 and appendix H (figure 24, left).

    Examples:
        >>> statistics = ksm.analysis.soft_statistics(soft, images)
        >>> figure = ksm.analysis.plot_token_weights(statistics)
    """
    blocks = drawing.chosen_blocks(statistics, layers, SoftStatistics)
    figure = drawing.new_figure(5.6, 3.2)
    ax = figure.subplots()
    ends = []
    for (layer, block), color, dashes in _lines(blocks):
        counts = block.token_weight_counts
        above = np.cumsum(counts[::-1])[::-1] / counts.sum()
        # Not the first edge, zero, which has no place on the axis.
        points = TOKEN_WEIGHT_EDGES[1:-1], above[1:]
        ax.plot(
            *points, lw=1.4, color=color, ls=dashes, label=drawing.block_title(layer)
        )
        ends += [points[0][points[1] > 1 - _RAREST].max(initial=points[0][0])]
        ends += [points[0][points[1] < _RAREST].min(initial=points[0][-1])]
    for mean in sorted({block.mean_token_weight for block in blocks.values()}):
        line = ax.axvline(mean, color="0.3", ls=":", lw=1.1, zorder=1)
        # At least from half of it to twice.
        ends += [mean / 2, mean * 2]
    ax.set_xscale("log", base=2)
    ax.set_xlim(min(ends), max(ends))
    drawing.format_ticks(ax.xaxis, lambda value: f"{value:.3g}")
    ax.set_ylim(0, 1.03)
    drawing.as_percentages(ax.yaxis)
    drawing.plain_axes(ax)
    drawing.label_axes(
        ax,
        "total dispatch weight of a token, over all slots",
        "tokens with at least this weight",
    )
    drawing.legend_beside(figure, {**drawing.labelled(ax), "mean": line})
    return figure


def plot_expert_contributions(
    statistics: dict, layers: Sequence | None = None
) -> Figure:
    """Show how much more some experts count for the output than others.

    One line for each block: its experts from the least to the most important, by their
    mean combine weight over all tokens, as a multiple of the least one's.

    Args:
        statistics: what `analysis.soft_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not statistics of these blocks.

    Source: Soft MoE, appendix H (figure 24, center): in its S/16 "some experts can
    impact output tokens between 3x and 14x more than others".

    Examples:
        >>> statistics = ksm.analysis.soft_statistics(soft, images)
        >>> figure = ksm.analysis.plot_expert_contributions(statistics)
    """
    blocks = drawing.chosen_blocks(statistics, layers, SoftStatistics)
    figure = drawing.new_figure(5.6, 3.2)
    ax = figure.subplots()
    most = 1.0
    for (layer, block), color, dashes in _lines(blocks):
        ordered = np.sort(block.expert_contribution)
        # Of those that count at all.
        relative = ordered / ordered[ordered > 0].min()
        name = f"{drawing.block_title(layer)}: {relative[-1]:.3g}×"
        ranks = np.arange(1, len(ordered) + 1)
        style = {"color": color, "ls": dashes, "lw": 1.4, "marker": ".", "ms": 3.5}
        ax.plot(ranks, relative, label=name, **style)
        most = max(most, relative[-1])
    if most > _WIDE_RANGE:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=1 - 0.04 * (most - 1))
    drawing.format_ticks(ax.yaxis, lambda value: f"{value:.4g}×")
    drawing.whole_ticks(ax.xaxis)
    drawing.plain_axes(ax)
    drawing.label_axes(
        ax,
        "experts, from the least important on",
        "mean combine weight,\nrelative to the least",
    )
    drawing.legend_beside(figure, drawing.labelled(ax))
    return figure


def plot_tokens_per_slot(
    statistics: dict, layers: Sequence | None = None, share: float = 0.9
) -> Figure:
    """Show how many tokens each slot mixes.

    One panel for each block, one line for each slot: how much of its dispatch weight
    the tokens hold that count most, on average over images. In colour the slots that
    need the fewest and the most tokens for a share of their weight. The dashed line is
    a uniform average.

    Args:
        statistics: what `analysis.soft_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.
        share: float over 0 and under 1, by which the coloured slots are chosen.

    Returns:
        `matplotlib.figure.Figure`. All its panels share one vertical axis.

    Raises:
        ValueError: if these are not statistics of these blocks, or it is no share.

    Source: Soft MoE, appendix H (figure 24, right).

    Examples:
        >>> statistics = ksm.analysis.soft_statistics(soft, images)
        >>> figure = ksm.analysis.plot_tokens_per_slot(statistics)
    """
    figure, panels = drawing.block_panels(
        statistics, layers, SoftStatistics, 2.4, 2.2, sharey=True
    )
    for ax, block in panels:
        curves = block.slot_curves.reshape(-1, block.slot_curves.shape[-1])
        tokens = np.arange(curves.shape[1] + 1)
        points = np.pad(curves, ((0, 0), (1, 0)))
        faint = min(1.0, max(0.06, 6 / len(curves)))
        ax.plot(tokens, points.T, color="0.35", lw=0.6, alpha=faint)
        # Of equals the one that has more in its largest.
        needed = block.tokens_needed(share).ravel()
        order = np.lexsort((-curves.mean(axis=1), needed))
        for slot, color in ((order[0], _LEAST_COLOR), (order[-1], _MOST_COLOR)):
            expert, place = divmod(slot, block.slot_curves.shape[1])
            name = f"expert {expert}, slot {place}: {needed[slot]}"
            ax.plot(tokens, points[slot], color=color, lw=1.4, label=name)
        ax.plot([0, tokens[-1]], [0, 1], color="black", ls="--", lw=0.8)
        # Curves lie above the diagonal.
        ax.legend(
            loc="lower right",
            fontsize=6.5,
            title=f"tokens for {100 * share:g}%",
            title_fontsize=6.5,
        )
        ax.set(xlim=(0, tokens[-1]), ylim=(0, 1.03))
        drawing.whole_ticks(ax.xaxis, 6)
        drawing.plain_axes(ax, 7)
    drawing.as_percentages(figure.axes[0].yaxis)
    drawing.label_axes(figure, f"tokens, {_ORDER}", "share of the slot's weight")
    return figure


def plot_concentration(
    statistics: dict,
    weights: str = "dispatch",
    layers: Sequence | None = None,
    levels: Sequence = BANDS,
) -> Figure:
    """Show how many tokens make up a slot, or how many slots a token's output.

    One panel for each block: what the tokens with the largest dispatch weights hold of
    a slot's weight together, on average over all slots and images (the line), and
    between which values this lies for the central 60%, 80%, ... of them (the bands,
    from dark to light). Or, for `weights="combine"`, what the slots with the largest
    combine weights hold of a token's. The dashed line is a uniform average.

    Args:
        statistics: what `analysis.soft_statistics` returns.
        weights: `"dispatch"` or `"combine"`.
        layers: sequence of blocks to show. All of them if `None`.
        levels: sequence of floats over 0 and at most 1, the parts of the distribution
            that the bands hold.

    Returns:
        `matplotlib.figure.Figure`. All its panels share one vertical axis.

    Raises:
        ValueError: if these are not statistics of these blocks, or an argument is not
            among the accepted values.

    Source: Soft MoE, appendix H (figures 26 and 27).

    Examples:
        >>> statistics = ksm.analysis.soft_statistics(soft, images)
        >>> figure = ksm.analysis.plot_concentration(statistics, "combine")
    """
    drawing.import_matplotlib()
    check_choice("weights", weights, tuple(_KINDS))
    colormap, counted, whole = _KINDS[weights]
    levels = sorted(levels)
    # From dark to light
    colors = drawing.shades(len(levels), colormap, 0.65, 0.15)
    figure, panels = drawing.block_panels(
        statistics, layers, SoftStatistics, 2.2, 2.0, sharey=True
    )
    handles = {}
    for ax, block in panels:
        found = getattr(block, weights)
        places = np.arange(len(found.mean) + 1)
        # The widest first, below the others.
        for (low, high), level, color in list(
            zip(found.bands(levels), levels, colors, strict=True)
        )[::-1]:
            name = f"central {100 * level:g}%"
            low, high = np.pad(low, (1, 0)), np.pad(high, (1, 0))
            handles[name] = ax.fill_between(places, low, high, color=color, lw=0)
        mean = np.pad(found.mean, (1, 0))
        (handles["mean"],) = ax.plot(places, mean, color="black", lw=1.3)
        ends = ([0, places[-1]], [0, 1])
        (handles["uniform"],) = ax.plot(*ends, color="0.3", ls="--", lw=0.8)
        ax.set(xlim=(0, places[-1]), ylim=(0, 1.03))
        drawing.whole_ticks(ax.xaxis, 4)
        drawing.plain_axes(ax, 7)
    drawing.as_percentages(figure.axes[0].yaxis)
    drawing.label_axes(figure, f"{counted}, {_ORDER}", f"{weights} weight of {whole}")
    drawing.legend_beside(figure, dict(reversed(handles.items())))
    return figure


def _lines(blocks):
    """Blocks with their statistics, and the colours and dashes of their lines."""
    return zip(blocks.items(), drawing.line_colors(blocks), cycle(drawing.DASHES))
