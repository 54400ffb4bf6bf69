"""Matplotlib, and the panels, colours, axes, images that all figures share."""

from itertools import cycle

import numpy as np

from keras_softmoe.checks import is_number

DROPPED = "#d9d9d9"
# Okabe and Ito's colours for colour-blind people, without yellow, invisible on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MODALITY_COLORS = {"text": PALETTE[0], "image": PALETTE[1]}
MARKERS = "osD^vP*X"
# Of overlapping lines, the lower ones show through the gaps of the upper ones.
DASHES = ("-", (0, (5, 2)), (0, (4, 1.5, 1, 1.5)), (0, (1, 1)))
# Names of the values of `priority`.
PRIORITY_NAMES = {"max": "max (batch prioritized)", "position": "position (vanilla)"}
# The most names along an axis.
MOST_TICKS = 12

# In inches, so that titles and labels fit.
LEAST_WIDTH = 3.6
_SIDE_OF_IMAGE = 1.35


# === Figures and panels ===


def import_matplotlib():
    """Return matplotlib with the modules that the figures use."""
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
            "Figures need matplotlib, the extra `viz`: "
            "`pip install 'keras-softmoe[viz]'`."
        ) from error
    return matplotlib


def new_figure(width, height):
    """Make a figure of some size in inches. It opens no window."""
    matplotlib = import_matplotlib()
    return matplotlib.figure.Figure((width, height), dpi=150, layout="constrained")


def panel_grid(count, width, height, most_columns=4, **kwargs):
    """Make a figure of panels of a size in inches; return it and their axes."""
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


def block_title(layer):
    """Name a block by its number, or by the name of its layer."""
    return layer if isinstance(layer, str) else f"block {layer}"


# === Colours ===


def line_colors(names):
    """Return a colour for each line: shades for numbers, distinct ones for names."""
    names = list(names)
    ordered = len(names) > 2 and all(is_number(name) for name in names)
    if not ordered and len(names) <= len(PALETTE):
        return list(PALETTE[: len(names)])
    return shades(len(names))


def line_styles(names, colors=None):
    """Return colour and marker for each line, as keyword arguments of matplotlib."""
    colors = line_colors(names) if colors is None else colors
    return [
        {"color": color, "marker": marker, "ms": 4.5, "lw": 1.4}
        for color, marker in zip(colors, cycle(MARKERS))
    ]


# Blue for text, orange for images.
MODALITY_STYLES = dict(zip(MODALITY_COLORS, line_styles(MODALITY_COLORS), strict=True))


def shades(count, colormap="viridis", first=0.0, last=0.85):
    """Return colours of a map in order. Viridis ends too light for white paper."""
    colormap = import_matplotlib().colormaps[colormap]
    return list(colormap(np.linspace(first, last, count)))


# === Axes and lines ===


def plain_axes(ax, size=8):
    """Draw small numbers, no box, and a faint grid behind the data."""
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
    """Write names at their places along an axis, every second or third if too many."""
    shown = slice(None, None, -(-len(names) // most))
    axis.set_ticks(list(places)[shown], list(names)[shown])


def draw_means(ax, places, means, spreads, limits=(-np.inf, np.inf), **style):
    """Draw a line of means with error bars, clipped to a range of possible values."""
    means, spreads = np.asarray(means), np.asarray(spreads)
    # (2, N), both ends
    ends = np.clip([means - spreads, means + spreads], *limits)
    reach = np.abs(ends - means) if spreads.any() else None
    style = {"lw": 1.4, "capsize": 3, **style}
    return ax.errorbar(places, means, reach, **style)


def draw_seeds(ax, places, values, limits=(-np.inf, np.inf), **style):
    """Draw a line of the means over `(seeds,)` values, as `draw_means`."""
    means = [np.mean(of_seeds) for of_seeds in values]
    spreads = [spread_of(of_seeds) for of_seeds in values]
    return draw_means(ax, places, means, spreads, limits, **style)


def spread_of(values):
    """Return the standard deviation over seeds (of their population)."""
    values = np.atleast_1d(values)
    return float(np.std(values, ddof=1)) if values.size > 1 else 0.0


def legend_beside(figure, handles):
    """Draw a legend to the right of all panels, from a dict of labels to artists."""
    place = "outside right center"
    figure.legend(handles.values(), handles.keys(), loc=place, fontsize=8)


def labelled(ax):
    """Return the labels in a panel and their artists, for `legend_beside`."""
    handles, labels = ax.get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


# === Blocks ===


def block_panels(blocks, width, height, **kwargs):
    """Make a figure with a panel for each block; return it and pairs of both."""
    figure, axes = panel_grid(len(blocks), width, height, **kwargs)
    for ax, block in zip(axes, blocks, strict=True):
        ax.set_title(block_title(block.block), fontsize=9)
    return figure, list(zip(axes, blocks, strict=True))


def chosen_experts(experts, count):
    """Return the chosen experts as a list, all if `None`; raise if one is unknown."""
    experts = list(range(count) if experts is None else experts)
    if not experts or any(expert not in range(count) for expert in experts):
        raise ValueError(
            f"`experts` must be from 0 to {count - 1}, or `None`. Received: {experts=}."
        )
    return experts


def drawable_names(class_names, num_classes):
    """Return a name for each class, or its number where the fonts lack a letter."""
    if class_names is None:
        return range(num_classes)
    if len(class_names) < num_classes:
        raise ValueError(
            f"`class_names` must have a name for each of the {num_classes} classes. "
            f"Received: {len(class_names)} names."
        )
    manager = import_matplotlib().font_manager
    families = manager.FontProperties().get_family()
    properties = [manager.FontProperties(family=[family]) for family in families]
    fonts = map(manager.get_font, map(manager.findfont, properties))
    # Code points that the fonts can draw.
    characters = {code for font in fonts for code in font.get_charmap()}
    return [
        name if characters.issuperset(map(ord, name)) else index
        for index, name in enumerate(map(str, class_names))
    ]


# === Images ===


def image_figure(rows, columns, extra_width=0.0, extra_height=0.75):
    """Make a figure with room for square images."""
    width = max(columns * _SIDE_OF_IMAGE + extra_width, LEAST_WIDTH)
    return new_figure(width, rows * _SIDE_OF_IMAGE + extra_height)


def image_rows(images, names, **extra):
    """Make a figure of rows: an image, then axes `(images, names)` below names."""
    figure = image_figure(len(images), 1 + len(names), **extra)
    axes = figure.subplots(len(images), 1 + len(names), squeeze=False)
    for ax, name in zip(axes[0], ["image", *names], strict=True):
        ax.set_title(name, fontsize=9)
    for ax, image in zip(axes[:, 0], images, strict=True):
        draw_image(ax, image)
    return figure, axes[:, 1:]


def draw_image(ax, image, brightness=1.0):
    """Draw an image in `[-1, 1]`, in colour if it has three channels, else in grey."""
    pixels = np.clip((image + 1) / 2, 0, 1)
    if pixels.shape[-1] != 3:
        pixels = np.repeat(pixels.mean(axis=-1, keepdims=True), 3, axis=-1)
    draw_map(ax, image, pixels * brightness)


def draw_map(ax, image, values, **kwargs):
    """Draw an array of any resolution, stretched over the image."""
    height, width, _ = image.shape
    # Constants first: inverted y axis, in pixels.
    ax.imshow(values, extent=(0, width, height, 0), interpolation="nearest", **kwargs)
    ax.set(xticks=[], yticks=[])


def covered(places, color):
    """Return a map that covers places, `(rows, columns)` bool, and its colours."""
    colors = import_matplotlib().colors.ListedColormap([color])
    return np.ma.masked_where(~places, places), colors


def hatch_patches(ax, image, is_dropped):
    """Cover dropped patches, `(rows, columns)` bool, of an image with hatched grey."""
    values, grey = covered(is_dropped, DROPPED)
    # Under the hatching, or the image would shine through between its patches.
    draw_map(ax, image, values, cmap=grey)
    (height, width, _), (rows, columns) = image.shape, is_dropped.shape
    ax.pcolor(
        np.linspace(0, width, columns + 1),
        np.linspace(0, height, rows + 1),
        values,
        cmap=grey,
        edgecolor="grey",
        hatch="////",
        linewidth=0,
    )


def end_of_scale(values, quantile, least=0.0):
    """Return the end of a colour scale on which a few large values hide no others."""
    positive = values[values > 0]
    return max(np.quantile(positive, quantile), least) if positive.size else least or 1


def draw_scale(figure, drawn, axes, label="", extend="neither", size=7, aspect=30):
    """Draw the scale of a map beside some axes, with arrows where it is cut off."""
    bar = figure.colorbar(drawn, ax=axes, extend=extend, aspect=aspect, pad=0.02)
    bar.ax.tick_params(labelsize=size)
    bar.set_label(label, fontsize=size + 1)
    return bar
