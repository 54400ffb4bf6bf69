"""Figures of `SoftStatistics`: weights of tokens, experts and slots."""

from itertools import cycle

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.checks import check_choice

# For "dispatch" and "combine": colours of the bands, the parts of an average, its name.
_KINDS = {
    "dispatch": ("Blues", "tokens", "a slot"),
    "combine": ("Oranges", "slots", "a token"),
}
# Parts of the distribution that bands hold.
BANDS = (0.6, 0.8, 0.9, 0.95, 0.99)
_ORDER = "from the one with the largest weight on"
_LEAST_COLOR, _MOST_COLOR = drawing.PALETTE[1], drawing.PALETTE[0]
# Contributions with a larger ratio have a logarithmic axis.
_WIDE_RANGE = 20
# Tokens this rare are at the end of the scale.
_RAREST = 1e-4
# Up to this many experts have lines between their slots.
_MOST_LINES = 40
_MOST_EXPERT_TICKS = 8


def token_weights(blocks):
    """Draw the share of tokens whose dispatch weights sum up to each value."""
    figure = drawing.new_figure(5.6, 3.2)
    ax = figure.subplots()
    ends = []
    for block, color, dashes in _lines(blocks):
        counts = block.token_weight_counts
        above = np.cumsum(counts[::-1])[::-1] / counts.sum()
        # Without the first edge: zero is not on a logarithmic axis.
        points = block.token_weight_edges[1:-1], above[1:]
        name = drawing.block_title(block.block)
        ax.plot(*points, lw=1.4, color=color, ls=dashes, label=name)
        ends += [points[0][points[1] > 1 - _RAREST].max(initial=points[0][0])]
        ends += [points[0][points[1] < _RAREST].min(initial=points[0][-1])]
    for mean in sorted({block.mean_token_weight for block in blocks}):
        line = ax.axvline(mean, color="0.3", ls=":", lw=1.1, zorder=1)
        # At least from half of it to twice.
        ends += [mean / 2, mean * 2]
    ax.set_xscale("log", base=2)
    ax.set_xlim(min(ends), max(ends))
    drawing.format_ticks(ax.xaxis, lambda value: f"{value:.3g}")
    ax.set_ylim(0, 1.03)
    drawing.as_percentages(ax.yaxis)
    drawing.plain_axes(ax)
    total = "total dispatch weight of a token, over all slots"
    drawing.label_axes(ax, total, "tokens with at least this weight")
    drawing.legend_beside(figure, {**drawing.labelled(ax), "mean": line})
    return figure


def contributions(blocks):
    """Draw mean combine weights of experts, as multiples of the smallest one."""
    figure = drawing.new_figure(5.6, 3.2)
    ax = figure.subplots()
    most = 1.0
    for block, color, dashes in _lines(blocks):
        ordered = np.sort(block.expert_contribution)
        # The least expert with any weight.
        relative = ordered / ordered[ordered > 0].min()
        name = f"{drawing.block_title(block.block)}: {relative[-1]:.3g}×"
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
    relative = "mean combine weight,\nrelative to the least"
    drawing.label_axes(ax, "experts, from the least important on", relative)
    drawing.legend_beside(figure, drawing.labelled(ax))
    return figure


def tokens_per_slot(blocks, share=0.9):
    """Draw the cumulative dispatch weight of each slot.

    The slots that need the fewest and the most tokens for `share` are in colour.
    """
    figure, panels = drawing.block_panels(blocks, 2.4, 2.2, sharey=True)
    for ax, block in panels:
        curves = block.slot_curves.reshape(-1, block.slot_curves.shape[-1])
        tokens = np.arange(curves.shape[1] + 1)
        points = np.pad(curves, ((0, 0), (1, 0)))
        faint = min(1.0, max(0.06, 6 / len(curves)))
        ax.plot(tokens, points.T, color="0.35", lw=0.6, alpha=faint)
        # Ties go to the slot with more weight in its largest tokens.
        needed = block.tokens_needed(share).ravel()
        order = np.lexsort((-curves.mean(axis=1), needed))
        for slot, color in ((order[0], _LEAST_COLOR), (order[-1], _MOST_COLOR)):
            expert, place = divmod(slot, block.slot_curves.shape[1])
            name = f"expert {expert}, slot {place}: {needed[slot]}"
            ax.plot(tokens, points[slot], color=color, lw=1.4, label=name)
        ax.plot([0, tokens[-1]], [0, 1], color="black", ls="--", lw=0.8)
        # Curves lie above the diagonal.
        style = {"fontsize": 6.5, "title_fontsize": 6.5, "loc": "lower right"}
        ax.legend(title=f"tokens for {100 * share:g}%", **style)
        ax.set(xlim=(0, tokens[-1]), ylim=(0, 1.03))
        drawing.whole_ticks(ax.xaxis, 6)
        drawing.plain_axes(ax, 7)
    drawing.as_percentages(figure.axes[0].yaxis)
    drawing.label_axes(figure, f"tokens, {_ORDER}", "share of the slot's weight")
    return figure


def concentration(blocks, weights="dispatch", levels=BANDS):
    """Draw the cumulative weight of averages, and the spread over all averages.

    `weights` is `"dispatch"` (slots as averages of tokens) or `"combine"` (outputs of
    tokens as averages of slots), `levels` the parts of the distribution.
    """
    check_choice("weights", weights, tuple(_KINDS))
    colormap, counted, whole = _KINDS[weights]
    levels = sorted(levels)
    # From dark to light
    colors = drawing.shades(len(levels), colormap, 0.65, 0.15)
    figure, panels = drawing.block_panels(blocks, 2.2, 2.0, sharey=True)
    handles = {}
    for ax, block in panels:
        found = getattr(block, weights)
        places = np.arange(len(found.mean) + 1)
        # The widest first, below the others.
        bands = list(zip(found.bands(levels), levels, colors, strict=True))
        for (low, high), level, color in reversed(bands):
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


def slot_correlation(blocks):
    """Draw the cosines between the parameters of the slots."""
    figure, panels = drawing.block_panels(blocks, 2.6, 2.4)
    for ax, block in panels:
        style = {"cmap": "RdBu_r", "interpolation": "nearest"}
        drawn = ax.imshow(block.slot_cosines, vmin=-1, vmax=1, **style)
        experts, slots = block.slot_contribution.shape
        means = {}
        if slots > 1:
            means["within experts"] = block.cosine_within_experts
        if experts > 1:
            means["between"] = block.cosine_between_experts
        # Without the sign of a zero.
        means = [f"{name} {round(x, 2) + 0.0:.2f}" for name, x in means.items()]
        ax.set_title(f"{ax.get_title()}\n{', '.join(means)}", fontsize=8)
        if 1 < slots and experts <= _MOST_LINES:
            edges = np.arange(1, experts) * slots - 0.5
            style = {"color": "black", "lw": 0.3, "alpha": 0.5}
            ends = (-0.5, experts * slots - 0.5)
            ax.hlines(edges, *ends, **style)
            ax.vlines(edges, *ends, **style)
        # In the middle of its slots.
        shown = np.arange(0, experts, -(-experts // _MOST_EXPERT_TICKS))
        places = shown * slots + (slots - 1) / 2
        ax.set_xticks(places, shown, fontsize=7)
        ax.set_yticks(places, shown, fontsize=7)
    both = "expert (one row and column for each of its slots)"
    drawing.label_axes(figure, both, "expert")
    drawing.draw_scale(figure, drawn, list(figure.axes), "cosine of slot parameters")
    return figure


def _lines(blocks):
    """Pair blocks with the colours and dashes of their lines."""
    colors = drawing.line_colors([block.block for block in blocks])
    return zip(blocks, colors, cycle(drawing.DASHES))
