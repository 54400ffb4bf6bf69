"""Figures of `BlockStatistics` and `SoftStatistics`: experts, and slots of a block."""

import math
from itertools import cycle

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.checks import check_choice

_CHOICES = ("largest", "2nd largest", "3rd largest")
# Up to this many names are written along the side of a panel; of more, some.
_MOST_NAMES = 20

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


def load(blocks):
    """Draw the load of each expert over an even share."""
    figure, panels = drawing.block_panels(blocks, 2.3, 2.0, sharey=True)
    for ax, block in panels:
        # Zeros if no expert takes any token.
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


def choice_weights(blocks):
    """Draw the distribution of the largest router weights of the tokens."""
    figure, panels = drawing.block_panels(blocks, 2.3, 2.0, sharex=True, sharey=True)
    for ax, block in panels:
        histogram = block.choice_histogram
        edges = np.linspace(0, 1, histogram.shape[1] + 1)
        names = [*_CHOICES, *(f"{k}th largest" for k in range(4, len(histogram) + 1))]
        names = names[: len(histogram)]
        colors = drawing.line_colors(names)
        for counts, name, color in zip(histogram, names, colors, strict=True):
            shares = counts / max(counts.sum(), 1)
            ax.stairs(shares, edges, fill=True, color=color, alpha=0.2)
            ax.stairs(shares, edges, color=color, lw=1.2, label=name)
        ax.axvline(1 / len(block.load), color="0.3", ls=":", lw=1, label="1/E")
        drawing.plain_axes(ax, 7)
    first = figure.axes[0]
    # After drawing, since setting limits turns automatic limits off.
    first.set(xlim=(0, 1), ylim=(0, None))
    drawing.as_percentages(first.yaxis)
    first.legend(fontsize=7, title="weight", title_fontsize=7)
    drawing.label_axes(figure, "router weight", "tokens")
    return figure


def experts_per_image(blocks):
    """Draw the share of images on which so many experts work."""
    figure, panels = drawing.block_panels(blocks, 2.3, 2.0, sharex=True, sharey=True)
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


def by_class(blocks, class_names=None, sort=True):
    """Draw the mean weight of each expert on the images of each class.

    `class_names` defaults to numbers. With `sort` each class goes with the expert that
    exceeds its own mean most, so that specialized experts form stairs downwards.
    """
    figure, panels = drawing.block_panels(blocks, 3.1, 3.1)
    figure.axes[0].set_ylabel("class", fontsize=8)
    for ax, block in panels:
        # (classes, E)
        weights = block.weight_by_class
        names = drawing.drawable_names(class_names, len(weights))
        classes = np.flatnonzero(~np.isnan(weights).any(axis=1))
        experts = np.arange(weights.shape[1])
        if sort:
            # By expert, then by falling excess, so that blocks show.
            excess = weights[classes] - weights[classes].mean(axis=0)
            experts = np.argsort(-excess.max(axis=0), kind="stable")
            excess = excess[:, experts]
            classes = classes[np.lexsort((-excess.max(axis=1), excess.argmax(axis=1)))]
        top = drawing.end_of_scale(weights[classes], 0.995)
        shown = weights[np.ix_(classes, experts)]
        style = {"aspect": "auto", "interpolation": "nearest"}
        drawn = ax.imshow(shown, vmin=0.0, vmax=top, **style)
        _write_names(ax.xaxis, experts, rotation=90 if len(experts) > 12 else 0)
        _write_names(ax.yaxis, [names[index] for index in classes])
        ax.set_xlabel("expert", fontsize=8)
        _draw_scale(figure, drawn, ax)
    _write_title(figure, "class")
    return figure


def by_position(blocks, sort=True):
    """Draw the mean weight of each expert at each patch.

    With `sort` the experts whose weight varies most over the image come first.
    """
    maps = []
    for block in blocks:
        rows, columns = block.patch_grid
        # (E, rows, columns), without class token and registers
        values = block.weight_by_position[-rows * columns :].T
        maps.append(values.reshape(-1, rows, columns))
    height, width = _mosaic(maps[0])[0].shape
    figure, panels = drawing.block_panels(blocks, 3.1, 0.35 + 2.6 * height / width)
    for (ax, _), values in zip(panels, maps, strict=True):
        experts = np.arange(len(values))
        if sort:
            experts = np.argsort(-values.std(axis=(1, 2)), kind="stable")
        mosaic, corners = _mosaic(values[experts])
        top = drawing.end_of_scale(values, 0.98)
        image = ax.imshow(mosaic, interpolation="nearest", vmin=0.0, vmax=top)
        for expert, (row, column) in zip(experts, corners, strict=True):
            # The edge of a patch is half a patch before its centre.
            ax.text(column - 0.5, row - 0.6, expert, fontsize=6, ha="left", va="bottom")
        ax.set_axis_off()
        _draw_scale(figure, image, ax)
    _write_title(figure, "position")
    return figure


def _mosaic(maps):
    """Put maps `(E, rows, columns)` in one array, NaN between; return corners too."""
    count, rows, columns = maps.shape
    # A gap between them, and above each a line for its name.
    head, gap = max(1.0, 0.32 * rows), max(1.0, 0.12 * columns)
    height, width = rows + round(head), columns + round(gap)
    # About as wide as high, and with few gaps at the end.
    square = math.ceil(math.sqrt(count * height / width))
    widths = range(max(square - 1, 1), square + 2)
    across = min(widths, key=lambda n: (-count % n, abs(n - square)))
    mosaic = np.full((-(-count // across) * height, across * width), np.nan)
    corners = []
    for index, values in enumerate(maps):
        row, column = divmod(index, across)
        row, column = row * height + round(head), column * width
        mosaic[row : row + rows, column : column + columns] = values
        corners.append((row, column))
    return mosaic, corners


def _write_names(axis, names, rotation=0):
    """Write names along an axis, or some of them if there are many."""
    drawing.name_ticks(axis, range(len(names)), names, _MOST_NAMES)
    axis.set_tick_params(labelsize=6, rotation=rotation, length=2)


def _write_title(figure, divided):
    title = f"Mean weight of each expert by {divided}"
    scale = "white line on the scale: the weight if all were alike"
    figure.suptitle(f"{title}\n{scale}", fontsize=9)


def _draw_scale(figure, drawn, ax):
    values = drawn.get_array()
    extend = "max" if values.max() > drawn.norm.vmax else "neither"
    bar = drawing.draw_scale(figure, drawn, ax, extend=extend, size=6)
    # The value if all experts and rows were equal.
    bar.ax.axhline(values.mean(), color="white", lw=1.5)


# === Soft routers ===


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
