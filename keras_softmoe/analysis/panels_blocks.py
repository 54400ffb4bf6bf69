"""Figures of `BlockStatistics`: load, choices, experts by class and by place."""

import math

import numpy as np

from keras_softmoe import drawing

_CHOICES = ("largest", "2nd largest", "3rd largest")
# Up to this many names are written along the side of a panel; of more, some.
_MOST_NAMES = 20


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
            order = np.lexsort((-excess.max(axis=1), excess.argmax(axis=1)))
            classes = classes[order]
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
