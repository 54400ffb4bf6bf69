"""What the figures share: colours, pictures, panels."""

import numpy as np

from keras_softmoe.evaluation.load import ExpertLoad
from keras_softmoe.evaluation.modalities import ModalityStatistics
from keras_softmoe.evaluation.slots import SlotCorrelation
from keras_softmoe.evaluation.soft_statistics import SoftStatistics
from keras_softmoe.evaluation.statistics import RoutingStatistics

DROPPED = "#d9d9d9"
# Okabe and Ito's colours, told apart by colour-blind people too. The yellow is left
# out: it does not show on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MODALITY_COLORS = {"text": PALETTE[0], "image": PALETTE[1]}
MARKERS = "osD^vP*X"
# Where lines lie upon each other, those below show through the gaps of those above.
DASHES = ("-", (0, (5, 2)), (0, (4, 1.5, 1, 1.5)), (0, (1, 1)))

# What makes them.
_FUNCTIONS = {
    RoutingStatistics: "routing_statistics",
    ExpertLoad: "expert_load",
    ModalityStatistics: "modality_statistics",
    SlotCorrelation: "slot_correlation",
    SoftStatistics: "soft_statistics",
}

# Side of a picture in inches.
_SIDE = 1.35
# In inches, so that titles and labels fit.
_LEAST_WIDTH = 3.6
_MOST_COLUMNS = 4


def import_matplotlib():
    """Matplotlib with the modules that the figures use.

    Raises:
        ImportError: if it is not installed; says how to install it.
    """
    try:
        import matplotlib.cm
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.lines
        import matplotlib.patches
        import matplotlib.ticker
    except ImportError as error:
        raise ImportError(
            "Figures are drawn with matplotlib, which is not installed. Install the "
            "extra `viz`: `pip install 'keras-softmoe[viz]'`."
        ) from error
    return matplotlib


def new_figure(matplotlib, width, height):
    """A figure of some size in inches. It opens no window."""
    return matplotlib.figure.Figure((width, height), dpi=150, layout="constrained")


def picture_figure(matplotlib, rows, columns, extra_width=0.0, extra_height=0.75):
    """A figure with room for square pictures."""
    width = max(columns * _SIDE + extra_width, _LEAST_WIDTH)
    height = rows * _SIDE + extra_height
    return new_figure(matplotlib, width, height)


def draw_picture(ax, image, brightness=1.0):
    """An image in `[-1, 1]`, in colour if it has three channels, else in grey."""
    pixels = np.clip((image + 1) / 2, 0, 1)
    if pixels.shape[-1] != 3:
        pixels = np.repeat(pixels.mean(axis=-1, keepdims=True), 3, axis=-1)
    draw_map(ax, image, pixels * brightness)


def draw_map(ax, image, values, **kwargs):
    """An array of any resolution, stretched over the image."""
    height, width, _ = image.shape
    # Constants first: inverted y axis, in pixels.
    ax.imshow(values, extent=(0, width, height, 0), interpolation="nearest", **kwargs)
    ax.set(xticks=[], yticks=[])


def line_colors(matplotlib, names):
    """One colour for each line: shades in order for numbers, distinct ones for names.

    Returns:
        list of colours that matplotlib takes.
    """
    ordered = len(names) > 2 and all(is_number(name) for name in names)
    if not ordered and len(names) <= len(PALETTE):
        return list(PALETTE[: len(names)])
    # The end of viridis is too light on white.
    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(names))))


def is_number(value):
    """Whether a value has a place on an axis of numbers."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def plain_axes(ax, size=8):
    """Small numbers, no box, a faint grid behind the data."""
    ax.tick_params(labelsize=size)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="0.9", lw=0.6)
    ax.set_axisbelow(True)


def as_percentages(matplotlib, axis):
    """Write the fractions along an axis as percentages."""
    # Not PercentFormatter, which writes 5.0% and 10.0%.
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(_percentage))


def chosen_blocks(statistics, layers, kind=RoutingStatistics):
    """The statistics of some blocks.

    Args:
        statistics: dict from blocks to their statistics.
        layers: sequence of blocks out of it, or `None` for all.
        kind: class of the statistics.

    Returns:
        dict from the blocks to their statistics.

    Raises:
        ValueError: if these are not statistics, or there are none of a block.
    """
    check_statistics(statistics, kind)
    layers = list(statistics if layers is None else layers)
    if not layers or any(layer not in statistics for layer in layers):
        raise ValueError(
            f"There are statistics of the blocks {list(statistics)}. `layers` names "
            f"some of them, or is `None` for all. Received: layers={layers}."
        )
    return {layer: statistics[layer] for layer in layers}


def block_panels(matplotlib, layers, width, height, **kwargs):
    """A figure with one panel for each MoE block.

    Args:
        matplotlib: the module.
        layers: sequence of blocks.
        width: float, of a panel in inches.
        height: float, of a panel in inches.
        **kwargs: `sharex` and `sharey`, as in `matplotlib.figure.Figure.subplots`.

    Returns:
        Figure, and a list of axes, titled with their blocks.
    """
    layers = list(layers)
    columns = min(len(layers), _MOST_COLUMNS)
    rows = -(-len(layers) // columns)
    width = max(columns * width, _LEAST_WIDTH)
    figure = new_figure(matplotlib, width, rows * height + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs).ravel()
    for ax in axes[len(layers) :]:
        ax.remove()
    axes = axes[: len(layers)]
    for index, (ax, layer) in enumerate(zip(axes, layers, strict=True)):
        ax.set_title(block_title(layer), fontsize=9)
        if kwargs.get("sharex"):
            # The lowest panel of each column has the numbers, not only the last row's.
            ax.tick_params(labelbottom=index + columns >= len(layers))
    return figure, list(axes)


def block_title(layer):
    """What a block is called: by its number, or by the name of its layer."""
    return layer if isinstance(layer, str) else f"block {layer}"


def check_statistics(statistics, kind=RoutingStatistics):
    """Raise unless this is a dict from blocks to statistics of some kind."""
    blocks = statistics.values() if isinstance(statistics, dict) else ()
    if not blocks or not all(isinstance(b, kind) for b in blocks):
        types = sorted({type(block).__name__ for block in blocks})
        raise ValueError(
            f"`statistics` must be the dict from blocks to `{kind.__name__}` that "
            f"`evaluation.{_FUNCTIONS[kind]}` returns, not empty. Received: "
            f"statistics of type {type(statistics).__name__}, of {types}."
        )


def draw_level(ax, level, label, color="0.35", spread=0.0):
    """A dashed horizontal line through the panel, with a band; returns the line."""
    if spread:
        ax.axhspan(level - spread, level + spread, color=color, alpha=0.15, lw=0)
    return ax.axhline(level, color=color, ls="--", lw=1.0, label=label, zorder=1)


def legend_beside(figure, handles):
    """A legend to the right of all panels, from a dict of labels to what they name."""
    figure.legend(
        handles.values(), handles.keys(), loc="outside right center", fontsize=8
    )


def spread_of(values):
    """Standard deviation over seeds (of the population they are drawn from)."""
    values = np.atleast_1d(values)
    return float(np.std(values, ddof=1)) if values.size > 1 else 0.0


def _percentage(value, _):
    return f"{100 * value:.4g}%"
