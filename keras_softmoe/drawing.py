"""What the figures share: matplotlib, panels, colours, axes and checks."""

import re
from itertools import cycle

import numpy as np

DROPPED = "#d9d9d9"
# Okabe and Ito's colours, told apart by colour-blind people too. The yellow is left
# out: it does not show on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MODALITY_COLORS = {"text": PALETTE[0], "image": PALETTE[1]}
MARKERS = "osD^vP*X"
# Where lines lie upon each other, those below show through the gaps of those above.
DASHES = ("-", (0, (5, 2)), (0, (4, 1.5, 1, 1.5)), (0, (1, 1)))
# Of the values of `priority`.
PRIORITY_NAMES = {"max": "max (batch prioritized)", "position": "position (vanilla)"}
# More names than these do not fit along an axis.
MOST_TICKS = 12

# In inches, so that titles and labels fit.
LEAST_WIDTH = 3.6


# === Figures and panels ===


def import_matplotlib():
    """Matplotlib with the modules that the figures use.

    Raises:
        ImportError: if it is not installed; says how to install it.
    """
    try:
        import matplotlib.cm
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.font_manager
        import matplotlib.lines
        import matplotlib.patches
        import matplotlib.path
        import matplotlib.ticker
    except ImportError as error:
        raise ImportError(
            "Figures are drawn with matplotlib, which is not installed. Install the "
            "extra `viz`: `pip install 'keras-softmoe[viz]'`."
        ) from error
    return matplotlib


def new_figure(width, height):
    """A figure of some size in inches. It opens no window."""
    matplotlib = import_matplotlib()
    return matplotlib.figure.Figure((width, height), dpi=150, layout="constrained")


def panel_grid(count, width, height, most_columns=4, **kwargs):
    """A figure with so many panels in rows, and the list of their axes.

    Width and height are those of a panel, in inches. Panels may share their axes, by
    `sharex` and `sharey` as in `matplotlib.figure.Figure.subplots`.
    """
    columns = min(count, most_columns)
    rows = -(-count // columns)
    figure = new_figure(max(columns * width, LEAST_WIDTH), rows * height + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs).ravel()
    for ax in axes[count:]:
        ax.remove()
    if kwargs.get("sharex"):
        # The lowest panel of each column has the numbers, not only the last row's.
        for index, ax in enumerate(axes[:count]):
            ax.tick_params(labelbottom=index + columns >= count)
    return figure, list(axes[:count])


def block_panels(statistics, layers, kind, width, height, **kwargs):
    """A figure with one panel for each of some MoE blocks.

    The first arguments are those of `chosen_blocks`, the others those of `panel_grid`.
    Returns the figure and a list of pairs: axes with the block as their title, and the
    statistics of the block.
    """
    blocks = chosen_blocks(statistics, layers, kind)
    figure, axes = panel_grid(len(blocks), width, height, **kwargs)
    for ax, layer in zip(axes, blocks, strict=True):
        ax.set_title(block_title(layer), fontsize=9)
    return figure, list(zip(axes, blocks.values(), strict=True))


def block_title(layer):
    """What a block is called: by its number, or by the name of its layer."""
    return layer if isinstance(layer, str) else f"block {layer}"


# === Colours ===


def is_number(value):
    """Whether a value has a place on an axis of numbers."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def line_colors(names):
    """A colour for each line: shades in order for numbers, distinct ones for names."""
    names = list(names)
    ordered = len(names) > 2 and all(is_number(name) for name in names)
    if not ordered and len(names) <= len(PALETTE):
        return list(PALETTE[: len(names)])
    return shades(len(names))


def line_styles(names, colors=None):
    """Colour and marker for each line, as keyword arguments of matplotlib."""
    colors = line_colors(names) if colors is None else colors
    return [
        {"color": color, "marker": marker, "ms": 4.5, "lw": 1.4}
        for color, marker in zip(colors, cycle(MARKERS))
    ]


# Blue for text, orange for images.
MODALITY_STYLES = dict(zip(MODALITY_COLORS, line_styles(MODALITY_COLORS), strict=True))


def shades(count, colormap="viridis", first=0.0, last=0.85):
    """Colours of a map in order. The end of viridis is too light on white."""
    colormap = import_matplotlib().colormaps[colormap]
    return list(colormap(np.linspace(first, last, count)))


# === Axes and lines ===


def plain_axes(ax, size=8):
    """Small numbers, no box, a faint grid behind the data."""
    ax.tick_params(labelsize=size)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="0.9", lw=0.6)
    ax.set_axisbelow(True)


def label_axes(target, x=None, y=None):
    """Name the axes of a panel, or those that the panels of a figure share."""
    is_panel = hasattr(target, "set_xlabel")
    if x is not None:
        (target.set_xlabel if is_panel else target.supxlabel)(x, fontsize=9)
    if y is not None:
        (target.set_ylabel if is_panel else target.supylabel)(y, fontsize=9)


def format_ticks(axis, text):
    """Write the numbers along an axis with a callable from a number to str."""
    ticker = import_matplotlib().ticker
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))


def as_percentages(axis):
    """Write the fractions along an axis as percentages."""
    # Not PercentFormatter, which writes 5.0% and 10.0%.
    format_ticks(axis, lambda value: f"{100 * value:.4g}%")


def whole_ticks(axis, most=10):
    """Number an axis with integers only, about `most` of them at most."""
    ticker = import_matplotlib().ticker
    axis.set_major_locator(ticker.MaxNLocator(most, integer=True))


def name_ticks(axis, places, names, most=MOST_TICKS):
    """Write names at their places along an axis, or as many of them as fit."""
    shown = slice(None, None, -(-len(names) // most))
    axis.set_ticks(list(places)[shown], list(names)[shown])


def draw_means(ax, places, means, spreads, limits=(-np.inf, np.inf), **style):
    """Draw a line of means with error bars that end where no value can lie.

    Args:
        ax: Axes.
        places: sequence of N numbers along the axis.
        means: sequence of N floats.
        spreads: sequence of N floats, how far the bars reach up and down. There are no
            bars if all are zero.
        limits: pair of floats, the least and the largest possible value.
        **style: as in `matplotlib.axes.Axes.errorbar`.

    Returns:
        What was drawn, for a legend.
    """
    means, spreads = np.asarray(means), np.asarray(spreads)
    # (2, N), both ends
    ends = np.clip([means - spreads, means + spreads], *limits)
    reach = np.abs(ends - means) if spreads.any() else None
    style = {"lw": 1.4, "capsize": 3, **style}
    return ax.errorbar(places, means, reach, **style)


def draw_seeds(ax, places, values, limits=(-np.inf, np.inf), **style):
    """As `draw_means`, of the values `(seeds,)` at each place and their deviation."""
    means = [np.mean(of_seeds) for of_seeds in values]
    spreads = [spread_of(of_seeds) for of_seeds in values]
    return draw_means(ax, places, means, spreads, limits, **style)


def spread_of(values):
    """Standard deviation over seeds (of the population they are drawn from)."""
    values = np.atleast_1d(values)
    return float(np.std(values, ddof=1)) if values.size > 1 else 0.0


def legend_beside(figure, handles):
    """A legend to the right of all panels, from a dict of labels to what they name."""
    figure.legend(
        handles.values(), handles.keys(), loc="outside right center", fontsize=8
    )


def labelled(ax):
    """Dict from the labels in a panel to what they name, for `legend_beside`."""
    handles, labels = ax.get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


# === Checks ===


def modalities_of(blocks):
    """The modalities in statistics of blocks, text first."""
    block = next(iter(blocks.values()))
    return [name for name in MODALITY_COLORS if name in block.num_tokens]


def chosen_blocks(statistics, layers, kind):
    """The statistics of some blocks, for a figure.

    Args:
        statistics: dict from blocks to their statistics.
        layers: sequence of blocks out of it, or `None` for all.
        kind: class of the statistics.

    Returns:
        dict from the blocks to their statistics.

    Raises:
        ValueError: if these are not statistics, or there are none of a block.
        ImportError: if matplotlib is missing.
    """
    import_matplotlib()
    check_statistics(statistics, kind)
    layers = list(statistics if layers is None else layers)
    if not layers or any(layer not in statistics for layer in layers):
        raise ValueError(
            f"There are statistics of the blocks {list(statistics)}. `layers` names "
            f"some of them, or is `None` for all. Received: layers={layers}."
        )
    return {layer: statistics[layer] for layer in layers}


def chosen_experts(experts, count):
    """Some of the experts from 0 on, all if `None`, as a list.

    Raises:
        ValueError: if there are none, or one does not exist.
    """
    experts = list(range(count) if experts is None else experts)
    if not experts or any(expert not in range(count) for expert in experts):
        raise ValueError(
            f"`experts` names some of the experts from 0 to {count - 1}, or is `None`. "
            f"Received: experts={experts}."
        )
    return experts


def check_statistics(statistics, kind):
    """Raise unless this is a dict from blocks to statistics of some kind."""
    blocks = statistics.values() if isinstance(statistics, dict) else ()
    if not blocks or not all(isinstance(b, kind) for b in blocks):
        types = sorted({type(block).__name__ for block in blocks})
        raise ValueError(
            f"`statistics` must be the dict from blocks to `{kind.__name__}` that "
            f"`{_maker(kind)}` returns, not empty. Received: "
            f"statistics of type {type(statistics).__name__}, of {types}."
        )


def check_kind(name, value, kind):
    """Raise unless an argument is a result of some kind."""
    if not isinstance(value, kind):
        raise ValueError(
            f"`{name}` must be the `{kind.__name__}` that `{_maker(kind)}` returns. "
            f"Received: {name} of type {type(value).__name__}."
        )


def _maker(kind):
    """The function that makes it: `RoutingStatistics` -> `routing_statistics`."""
    name = re.sub("(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
    return f"analysis.{name}"
