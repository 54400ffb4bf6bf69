"""Heat maps: experts by class, experts by position, slots by slots."""

import math
from collections.abc import Sequence

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis import _pictures as pictures
from keras_softmoe.analysis._class_names import drawable_names
from keras_softmoe.analysis._slots import SlotCorrelation
from keras_softmoe.analysis._statistics import RoutingStatistics
from keras_softmoe.types import Figure

# Up to this many names are written along the side of a panel; of more, some.
_MOST_NAMES = 20
# Up to this many experts have lines between their slots.
_MOST_LINES = 40
_MOST_EXPERT_TICKS = 8


def plot_experts_by_class(
    statistics: dict,
    class_names: Sequence | None = None,
    layers: Sequence | None = None,
    sort: bool = True,
) -> Figure:
    """Show how much each expert works on the images of each class.

    One panel for each MoE block: experts from left to right, classes from top to
    bottom, and the mean weight of the expert's output over all tokens of the images of
    the class. Each panel has its own scale, from zero on, with a white line at the mean
    of all, which each would have if all were alike. Classes without images are left
    out.

    Args:
        statistics: what `analysis.routing_statistics` returns when it is given
            labels.
        class_names: optional sequence of str, names of the classes. A class whose
            name the fonts of matplotlib's settings cannot draw has its number; if
            `None`, all have.
        layers: sequence of blocks to show. All of them if `None`.
        sort: bool, whether to order each panel by itself, so that structure shows: each
            class goes with the expert that exceeds its own mean over the classes most
            there; experts come in falling order of their largest excess, and below each
            other the classes of the first expert, of the second, and so on. Where
            experts specialize, bright stairs lead down; where they do not, columns are
            even (faint stairs can be seen in noise, too). `False`: all panels in the
            order of the numbers.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not statistics by class of these blocks, or names are
            missing.

    Source: V-MoE, section 5 and appendix E.2 (figures 7 and 29).

    Examples:
        >>> statistics = ksm.analysis.routing_statistics(sparse, images, labels)
        >>> figure = ksm.analysis.plot_experts_by_class(statistics)
    """
    figure, panels = drawing.block_panels(
        statistics, layers, RoutingStatistics, 3.1, 3.1
    )
    figure.axes[0].set_ylabel("class", fontsize=8)
    for ax, block in panels:
        if block.weight_by_class is None:
            raise ValueError(
                "These statistics do not tell classes apart. Give `labels` to "
                "`analysis.routing_statistics`. Received: weight_by_class=None."
            )
        # (classes, E)
        weights = block.weight_by_class
        names = drawable_names(class_names, len(weights))
        classes = np.flatnonzero(~np.isnan(weights).any(axis=1))
        experts = np.arange(weights.shape[1])
        if sort:
            classes, experts = _stairs(weights, classes)
        drawn = ax.imshow(
            weights[np.ix_(classes, experts)],
            aspect="auto",
            interpolation="nearest",
            vmin=0.0,
            vmax=pictures.end_of_scale(weights[classes], 0.995),
        )
        _write_names(ax.xaxis, experts, rotation=90 if len(experts) > 12 else 0)
        _write_names(ax.yaxis, [names[index] for index in classes])
        ax.set_xlabel("expert", fontsize=8)
        _draw_scale(figure, drawn, ax)
    _write_title(figure, "class")
    return figure


def plot_experts_by_position(
    statistics: dict,
    layers: Sequence | None = None,
    patch_grid: Sequence[int] | None = None,
    sort: bool = True,
) -> Figure:
    """Show where in the images each expert works, on average over many.

    One panel for each MoE block, with a little map of the image for each expert: the
    mean weight of its output at each patch. Each panel has its own scale, from zero on,
    with a white line at the mean of all, which each would have if all were alike. The
    class token, if there is one, is left out.

    Args:
        statistics: what `analysis.routing_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.
        patch_grid: `(rows, columns)` of the patches, the backbone's `patch_grid`.
            Square if `None`.
        sort: bool, whether to put the experts first, row by row, whose weight varies
            most (largest standard deviation) over the image: those that choose patches
            by their position. `False`: in the order of their numbers.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not statistics of these blocks, or the patches do not
            form such a grid.

    Source: V-MoE, appendix E.2 (figure 30).

    Examples:
        >>> statistics = ksm.analysis.routing_statistics(sparse, images)
        >>> figure = ksm.analysis.plot_experts_by_position(statistics)
    """
    blocks = drawing.chosen_blocks(statistics, layers, RoutingStatistics)
    # (E, rows, columns) each
    maps = [_position_maps(b.weight_by_position, patch_grid) for b in blocks.values()]
    experts = [_by_variation(m) if sort else np.arange(len(m)) for m in maps]
    # (mosaic, corners) each
    drawn = [_mosaic(m[order]) for m, order in zip(maps, experts, strict=True)]
    height, width = drawn[0][0].shape
    figure, panels = drawing.block_panels(
        blocks, None, RoutingStatistics, 3.1, 0.35 + 2.6 * height / width
    )
    for (ax, _), values, order, (mosaic, corners) in zip(
        panels, maps, experts, drawn, strict=True
    ):
        top = pictures.end_of_scale(values, 0.98)
        image = ax.imshow(mosaic, interpolation="nearest", vmin=0.0, vmax=top)
        for expert, (row, column) in zip(order, corners, strict=True):
            # The edge of a patch is half a patch before its centre.
            ax.text(column - 0.5, row - 0.6, expert, fontsize=6, ha="left", va="bottom")
        ax.set_axis_off()
        _draw_scale(figure, image, ax)
    _write_title(figure, "position")
    return figure


def plot_slot_correlation(correlations: dict, layers: Sequence | None = None) -> Figure:
    """Show the inner products of the normalized slot parameters.

    One panel for each block: each slot against each, red where they point in the same
    direction, blue where in opposite ones. The slots of one expert follow each other:
    squares along the diagonal are experts whose slots are aligned. Titles give the
    means within experts and between them.

    Args:
        correlations: what `analysis.slot_correlation` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`. All its panels share one scale, from -1 to 1.

    Raises:
        ValueError: if these are not correlations of these blocks.

    Source: Soft MoE, appendix I (figures 28 to 30).

    Examples:
        >>> correlation = ksm.analysis.slot_correlation(soft)
        >>> figure = ksm.analysis.plot_slot_correlation(correlation)
    """
    figure, panels = drawing.block_panels(
        correlations, layers, SlotCorrelation, 2.6, 2.4
    )
    for ax, block in panels:
        drawn = ax.imshow(
            block.cosine, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest"
        )
        ax.set_title(f"{ax.get_title()}\n{_mean_cosines(block)}", fontsize=8)
        experts, slots = block.num_experts, block.slots_per_expert
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
    drawing.label_axes(
        figure, "expert (one row and column for each of its slots)", "expert"
    )
    pictures.draw_scale(figure, drawn, list(figure.axes), "cosine of slot parameters")
    return figure


# === Data ===


def _stairs(weights, classes):
    """Classes and experts of `weights` `(classes, E)` in an order that shows blocks."""
    excess = weights[classes] - weights[classes].mean(axis=0)
    experts = np.argsort(-excess.max(axis=0), kind="stable")
    excess = excess[:, experts]
    # By expert, then by falling excess.
    order = np.lexsort((-excess.max(axis=1), excess.argmax(axis=1)))
    return classes[order], experts


def _position_maps(weights, patch_grid):
    """`(T, E)` to `(E, rows, columns)`, without class token and registers."""
    num_tokens = len(weights)
    grid = (math.isqrt(num_tokens),) * 2 if patch_grid is None else patch_grid
    num_patches = grid[0] * grid[1]
    # Only who gives the grid can have more than a class token beside the patches.
    in_front = num_tokens - num_patches
    if in_front < 0 or (in_front > 1 and patch_grid is None):
        raise ValueError(
            f"The {num_tokens} tokens are not the patches of such a grid, with or "
            "without a class token. Give the backbone's `patch_grid`. "
            f"Received: patch_grid={patch_grid}."
        )
    return weights[in_front:].T.reshape(-1, *grid)


def _by_variation(maps):
    """Experts by falling standard deviation of their maps `(E, rows, columns)`."""
    return np.argsort(-maps.std(axis=(1, 2)), kind="stable")


def _mosaic(maps):
    """Maps `(E, rows, columns)` in one array, NaN between them, and their corners."""
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


# === Drawing ===


def _write_names(axis, names, rotation=0):
    """As many names along an axis as fit."""
    drawing.name_ticks(axis, range(len(names)), names, _MOST_NAMES)
    axis.set_tick_params(labelsize=6, rotation=rotation, length=2)


def _write_title(figure, what):
    title = f"Mean weight of each expert by {what}"
    figure.suptitle(
        f"{title}\nwhite line on the scale: the weight if all were alike", fontsize=9
    )


def _draw_scale(figure, drawn, ax):
    values = drawn.get_array()
    extend = "max" if values.max() > drawn.norm.vmax else "neither"
    bar = pictures.draw_scale(figure, drawn, ax, extend=extend, size=6)
    # Where experts and rows are all alike.
    bar.ax.axhline(values.mean(), color="white", lw=1.5)


def _mean_cosines(block):
    parts = []
    if block.slots_per_expert > 1:
        parts.append(f"within experts {_rounded(block.within)}")
    if block.num_experts > 1:
        parts.append(f"between {_rounded(block.between)}")
    return ", ".join(parts)


def _rounded(cosine):
    # Without the sign of a zero.
    return f"{round(cosine, 2) + 0.0:.2f}"
