"""Pictures of what the slots of a Soft MoE mix, from statistics of its weights."""

import numpy as np

from keras_softmoe.evaluation.concentration import BANDS
from keras_softmoe.evaluation.soft_statistics import TOKEN_WEIGHT_EDGES, SoftStatistics
from keras_softmoe.visualization.drawing import (
    DASHES,
    PALETTE,
    as_percentages,
    block_panels,
    block_title,
    chosen_blocks,
    import_matplotlib,
    legend_beside,
    line_colors,
    new_figure,
    plain_axes,
)

# For "dispatch" and "combine": colours of the bands, what is counted, of what.
_KINDS = {
    "dispatch": ("Blues", "tokens", "a slot"),
    "combine": ("Oranges", "slots", "a token"),
}
_LEAST_COLOR, _MOST_COLOR = PALETTE[1], PALETTE[0]
# Contributions that differ by more stand on a logarithmic axis.
_WIDE_RANGE = 20
# Tokens this rare are at the end of the scale.
_RAREST = 1e-4


def plot_token_weights(statistics, layers=None):
    """Show how much the tokens contribute to all slots together.

    One line for each block: the share of tokens whose dispatch weights, summed over all
    slots, reach the weight along the axis. The dotted line is the mean, where the line
    of a block would fall straight down if all tokens counted alike.

    Args:
        statistics: what `evaluation.soft_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not statistics of these blocks.
        ImportError: if matplotlib is missing.

    Source: Soft MoE, section 3.6 and appendix H (figure 24, left).

    Example:

    >>> statistics = ksm.evaluation.soft_statistics(classifier, images)
    >>> figure = ksm.visualization.plot_token_weights(statistics)
    """
    matplotlib = import_matplotlib()
    blocks = chosen_blocks(statistics, layers, SoftStatistics)
    figure = new_figure(matplotlib, 5.6, 3.2)
    ax = figure.subplots()
    ends = []
    for (layer, block), style in _lines(matplotlib, blocks):
        counts = block.token_weight_counts
        above = np.cumsum(counts[::-1])[::-1] / counts.sum()
        # Not the first edge, zero, which has no place on the axis.
        points = TOKEN_WEIGHT_EDGES[1:-1], above[1:]
        ax.plot(*points, lw=1.4, label=block_title(layer), **style)
        ends += [points[0][points[1] > 1 - _RAREST].max(initial=points[0][0])]
        ends += [points[0][points[1] < _RAREST].min(initial=points[0][-1])]
    for mean in sorted({block.mean_token_weight for block in blocks.values()}):
        line = ax.axvline(mean, color="0.3", ls=":", lw=1.1, zorder=1)
        # At least from half of it to twice.
        ends += [mean / 2, mean * 2]
    ax.set_xscale("log", base=2)
    ax.set_xlim(min(ends), max(ends))
    ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_number))
    ax.set_ylim(0, 1.03)
    as_percentages(matplotlib, ax.yaxis)
    plain_axes(ax)
    ax.set_xlabel("total dispatch weight of a token, over all slots", fontsize=9)
    ax.set_ylabel("tokens with at least this weight", fontsize=9)
    handles, names = ax.get_legend_handles_labels()
    legend_beside(figure, {**dict(zip(names, handles, strict=True)), "mean": line})
    return figure


def plot_expert_contributions(statistics, layers=None):
    """Show how much more some experts count for the output than others.

    One line for each block: its experts from the least to the most important, by their
    mean combine weight over all tokens, as a multiple of the least one's.

    Args:
        statistics: what `evaluation.soft_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not statistics of these blocks.
        ImportError: if matplotlib is missing.

    Source: Soft MoE, appendix H (figure 24, center): in its S/16 "some experts can
    impact output tokens between 3x and 14x more than others".

    Example:

    >>> statistics = ksm.evaluation.soft_statistics(classifier, images)
    >>> figure = ksm.visualization.plot_expert_contributions(statistics)
    """
    matplotlib = import_matplotlib()
    blocks = chosen_blocks(statistics, layers, SoftStatistics)
    figure = new_figure(matplotlib, 5.6, 3.2)
    ax = figure.subplots()
    most = 1.0
    for (layer, block), style in _lines(matplotlib, blocks):
        ordered = np.sort(block.expert_contribution)
        # Of those that count at all.
        relative = ordered / ordered[ordered > 0].min()
        name = f"{block_title(layer)}: {relative[-1]:.3g}×"
        ranks = np.arange(1, len(ordered) + 1)
        ax.plot(ranks, relative, lw=1.4, label=name, marker=".", ms=3.5, **style)
        most = max(most, relative[-1])
    if most > _WIDE_RANGE:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=1 - 0.04 * (most - 1))
    ax.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_times))
    ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    plain_axes(ax)
    ax.set_xlabel("experts, from the least important on", fontsize=9)
    ax.set_ylabel("mean combine weight,\nrelative to the least", fontsize=9)
    handles, names = ax.get_legend_handles_labels()
    legend_beside(figure, dict(zip(names, handles, strict=True)))
    return figure


def plot_tokens_per_slot(statistics, layers=None, share=0.9):
    """Show how many tokens each slot mixes.

    One panel for each block, one line for each slot: how much of its dispatch weight
    the tokens hold that count most, on average over images. In colour the slots that
    need the fewest and the most tokens for a share of their weight. The dashed line is
    a uniform average.

    Args:
        statistics: what `evaluation.soft_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.
        share: float over 0 and under 1, by which the coloured slots are chosen.

    Returns:
        `matplotlib.figure.Figure`. All its panels share one vertical axis.

    Raises:
        ValueError: if these are not statistics of these blocks, or it is no share.
        ImportError: if matplotlib is missing.

    Source: Soft MoE, appendix H (figure 24, right).

    Example:

    >>> statistics = ksm.evaluation.soft_statistics(classifier, images)
    >>> figure = ksm.visualization.plot_tokens_per_slot(statistics)
    """
    matplotlib = import_matplotlib()
    blocks = chosen_blocks(statistics, layers, SoftStatistics)
    figure, axes = block_panels(matplotlib, blocks, 2.4, 2.2, sharey=True)
    for ax, block in zip(axes, blocks.values(), strict=True):
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
        ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))
        plain_axes(ax, 7)
    as_percentages(matplotlib, axes[0].yaxis)
    figure.supxlabel("tokens, from the one with the largest weight on", fontsize=9)
    figure.supylabel("share of the slot's weight", fontsize=9)
    return figure


def plot_concentration(statistics, weights="dispatch", layers=None, levels=BANDS):
    """Show how many tokens make up a slot, or how many slots a token's output.

    One panel for each block: what the tokens with the largest dispatch weights hold of
    a slot's weight together, on average over all slots and images (the line), and
    between which values this lies for the central 60%, 80%, ... of them (the bands,
    from dark to light). Or, for `weights="combine"`, what the slots with the largest
    combine weights hold of a token's. The dashed line is a uniform average.

    Args:
        statistics: what `evaluation.soft_statistics` returns.
        weights: `"dispatch"` or `"combine"`.
        layers: sequence of blocks to show. All of them if `None`.
        levels: sequence of floats over 0 and at most 1, the parts of the distribution
            that the bands hold.

    Returns:
        `matplotlib.figure.Figure`. All its panels share one vertical axis.

    Raises:
        ValueError: if these are not statistics of these blocks, or an argument is not
            among the accepted values.
        ImportError: if matplotlib is missing.

    Source: Soft MoE, appendix H (figures 26 and 27).

    Example:

    >>> statistics = ksm.evaluation.soft_statistics(classifier, images)
    >>> figure = ksm.visualization.plot_concentration(statistics, "combine")
    """
    matplotlib = import_matplotlib()
    blocks = chosen_blocks(statistics, layers, SoftStatistics)
    if weights not in _KINDS:
        raise ValueError(
            f"Unknown `weights`. Accepted: {', '.join(map(repr, _KINDS))}. "
            f"Received: weights={weights!r}."
        )
    shades, counted, whole = _KINDS[weights]
    levels = sorted(levels)
    # From dark to light
    colors = matplotlib.colormaps[shades](np.linspace(0.65, 0.15, len(levels)))
    figure, axes = block_panels(matplotlib, blocks, 2.2, 2.0, sharey=True)
    handles = {}
    for ax, block in zip(axes, blocks.values(), strict=True):
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
        ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
        plain_axes(ax, 7)
    as_percentages(matplotlib, axes[0].yaxis)
    figure.supxlabel(f"{counted}, from the one with the largest weight on", fontsize=9)
    figure.supylabel(f"{weights} weight of {whole}", fontsize=9)
    legend_beside(figure, dict(reversed(handles.items())))
    return figure


def _lines(matplotlib, blocks):
    """Blocks with the style of their lines."""
    colors = line_colors(matplotlib, list(blocks))
    for index, (item, color) in enumerate(zip(blocks.items(), colors, strict=True)):
        yield item, {"color": color, "ls": DASHES[index % len(DASHES)]}


def _number(value, _):
    return f"{value:.3g}"


def _times(value, _):
    return f"{value:.4g}×"
