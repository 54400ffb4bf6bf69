"""Panels of blocks, images, maps drawn over them, and the scales of maps."""

import numpy as np

from keras_softmoe import drawing

# Side of an image in inches.
_SIDE = 1.35


# === Blocks ===


def block_panels(blocks, width, height, **kwargs):
    """Make a figure with a panel for each block; return it and pairs of both."""
    figure, axes = drawing.panel_grid(len(blocks), width, height, **kwargs)
    for ax, block in zip(axes, blocks, strict=True):
        ax.set_title(drawing.block_title(block.block), fontsize=9)
    return figure, list(zip(axes, blocks, strict=True))


def chosen_experts(experts, count):
    """Return the chosen experts as a list, all if `None`; raise if one is unknown."""
    experts = list(range(count) if experts is None else experts)
    if not experts or any(expert not in range(count) for expert in experts):
        raise ValueError(
            f"`experts` must name experts from 0 to {count - 1}, or be `None`. "
            f"Received: experts={experts}."
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
    manager = drawing.import_matplotlib().font_manager
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
    width = max(columns * _SIDE + extra_width, drawing.LEAST_WIDTH)
    return drawing.new_figure(width, rows * _SIDE + extra_height)


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
    colors = drawing.import_matplotlib().colors.ListedColormap([color])
    return np.ma.masked_where(~places, places), colors


def hatch_patches(ax, image, is_dropped):
    """Cover dropped patches, `(rows, columns)` bool, of an image with hatched grey."""
    values, grey = covered(is_dropped, drawing.DROPPED)
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
