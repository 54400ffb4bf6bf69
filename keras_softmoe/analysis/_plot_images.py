"""Figures of one block's routing, drawn over the images."""

from collections.abc import Callable

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe import drawing
from keras_softmoe.analysis import _pictures as pictures
from keras_softmoe.analysis._maps import main_experts, routing_maps
from keras_softmoe.types import Figure

# Brightness of the pictures that lie under a map.
_DIMMED = 0.6
# Colours of less and of more than an even share.
_LESS_AND_MORE = (drawing.PALETTE[0], "#FFB000")
# What nothing counts as on a scale of ratios.
_LEAST_SHARE = 1e-9
# Up to this many patches in a row, the number of its expert is written on a patch.
_MOST_NUMBERS = 16


def plot_slots(
    model: keras.Model,
    images: ArrayLike,
    layer: int | None = None,
    slots: int = 6,
    preprocessor: Callable | None = None,
) -> Figure:
    """Show what some slots of a block look at and what they ignore, image by image.

    One row for each image: the picture, then one map for each slot. Orange patches get
    more than an even share of the slot's dispatch weight, blue ones less; a patch with
    an even share is left as it is. The scale is one of ratios and reaches four even
    shares at least, so that a slot that takes in the mean of all patches looks flat.
    Under a sparse router a slot holds one patch at most.

    Args:
        model: `ViTMoEBackbone`, or a task that has one.
        images: `(B, height, width, channels)` array, a few images.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        slots: int, how many slots to show: those that differ most in what they take,
            of different experts as far as there are enough. Or a sequence of
            `(expert, slot)` pairs.
        preprocessor: as in `analysis.routing_maps`.

    Returns:
        `matplotlib.figure.Figure`. All its maps share one scale.

    Raises:
        ValueError: as `analysis.routing_maps`, or if a slot does not exist.

    Source: Soft MoE, figure 25 ("Visual inspection").

    Examples:
        >>> figure = ksm.analysis.plot_slots(soft, images[:2])
        >>> figure.savefig("slots.png")
    """
    matplotlib = drawing.import_matplotlib()
    maps = routing_maps(model, images, layer, preprocessor)
    chosen = _chosen_slots(maps.dispatch, slots)
    # (slots, B, rows, columns), 1 if a slot took all tokens alike
    shares = np.stack([maps.dispatch[..., e, c] for e, c in chosen])
    shares *= maps.group_tokens
    top = pictures.end_of_scale(shares, 0.995, least=4.0)
    scale = matplotlib.colors.LogNorm(1 / top, top)
    colors = matplotlib.colors.ListedColormap(_see_through())
    names = [f"expert {expert}, slot {slot}" for expert, slot in chosen]
    figure, axes = pictures.image_rows(maps.images, names, extra_width=0.9)
    for image, row, by_slot in zip(
        maps.images, axes, shares.swapaxes(0, 1), strict=True
    ):
        for ax, share in zip(row, by_slot, strict=True):
            pictures.draw_picture(ax, image, _DIMMED)
            share = np.maximum(share, _LEAST_SHARE)
            pictures.draw_map(ax, image, share, cmap=colors, norm=scale)
    bar = pictures.draw_scale(
        figure,
        matplotlib.cm.ScalarMappable(scale, colors),
        figure.axes,
        f"dispatch weight, in even shares (1/{maps.group_tokens})",
        extend="both",
        size=8,
        aspect=12 * len(axes),
    )
    bar.ax.set_facecolor(str(_DIMMED / 2))
    bar.ax.axhline(1, color="white", lw=1.2)
    doublings = int(np.log2(top))
    ticks = 2.0 ** np.arange(-doublings, doublings + 1)
    names = ["1 (even)" if tick == 1 else f"{tick:.2g}" for tick in ticks]
    bar.set_ticks(ticks, labels=names, minor=False)
    bar.minorticks_off()
    figure.suptitle(f"What slots take in, block {maps.layer}", fontsize=11)
    return figure


def plot_experts(
    model: keras.Model,
    images: ArrayLike,
    layer: int | None = None,
    preprocessor: Callable | None = None,
) -> Figure:
    """Show which expert each patch of some images listens to most.

    Above, the pictures; below, each patch in the colour of its main expert (see
    `analysis.main_experts`), hatched grey if no expert takes it (dropped). The colour
    is full where the weight of that expert is two even shares (`2 / E`) or more, and
    fades out towards one: a patch that listens to all experts alike is white. Beside
    them, the number of patches of each main expert, in full colour those of full
    colour, and as a dashed line an even share of the patches.

    Args:
        model: `ViTMoEBackbone`, or a task that has one.
        images: `(B, height, width, channels)` array, a few images.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        preprocessor: as in `analysis.routing_maps`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: as `analysis.routing_maps`.

    Source: V-MoE, section 5 and appendix D (dropped patches).

    Examples:
        >>> figure = ksm.analysis.plot_experts(sparse, images[:2])
        >>> figure.savefig("experts.png")
    """
    drawing.import_matplotlib()
    maps = routing_maps(model, images, layer, preprocessor)
    # (B, rows, columns)
    experts = main_experts(maps)
    num_experts = maps.combine.shape[-2]
    # 0 at an even share, 1 from two of them on
    weights = maps.combine.sum(axis=-1).max(axis=-1)
    clearness = np.clip(weights * num_experts - 1, 0, 1) * (experts >= 0)
    colors = _expert_colors(num_experts)
    columns = len(experts)
    figure = pictures.picture_figure(2, columns, extra_width=3.0)
    grid = figure.add_gridspec(2, columns + 1, width_ratios=[1] * columns + [1.9])
    for column, image in enumerate(maps.images):
        pictures.draw_picture(figure.add_subplot(grid[0, column]), image)
        ax = figure.add_subplot(grid[1, column])
        _draw_experts(ax, image, experts[column], clearness[column], colors)
    # Dropped patches first: of all, and of those of full colour.
    counts, clear = (
        np.bincount(experts[shown] + 1, minlength=num_experts + 1)
        for shown in (experts >= -1, clearness >= 1)
    )
    _draw_counts(figure.add_subplot(grid[:, -1]), counts, clear[1:], colors)
    title = f"Main expert of each patch, block {maps.layer}"
    scale = f"white: an even share of the weight (1/{num_experts}), "
    scale += "full colour: twice that or more"
    figure.suptitle(f"{title}\n{scale}", fontsize=9)
    return figure


# === Choice of slots ===


def _chosen_slots(dispatch, slots):
    """List of `(expert, slot)`, checked."""
    num_experts, slots_per_expert = dispatch.shape[-2:]
    if isinstance(slots, int):
        chosen = _most_different_slots(dispatch, slots)
    else:
        chosen = [(expert, slot) for expert, slot in slots]
    inside = all(
        e in range(num_experts) and c in range(slots_per_expert) for e, c in chosen
    )
    if not chosen or not inside:
        raise ValueError(
            "`slots` must be a positive number of slots, or pairs (expert, slot) out "
            f"of {num_experts} experts with {slots_per_expert} slots each. "
            f"Received: slots={slots}."
        )
    return chosen


def _most_different_slots(dispatch, count):
    """From the most selective slot on, always add the one least like those chosen."""
    num_experts, slots_per_expert = dispatch.shape[-2:]
    num_slots = num_experts * slots_per_expert
    # (E * C, B * rows * columns)
    taken = dispatch.reshape(-1, num_slots).T
    length = np.linalg.norm(taken, axis=1)
    direction = taken / np.maximum(length, 1e-12)[:, None]
    # Largest cosine with a chosen slot; before there is one, the longest goes first.
    likeness = -length
    # Slots of experts that are not shown yet go first, empty ones last.
    handicap = np.where(length > 0, 0.0, 1e6)
    chosen = []
    while len(chosen) < min(count, num_slots):
        slot = int((likeness + handicap).argmin())
        cosine = direction @ direction[slot]
        likeness = np.maximum(likeness, cosine) if chosen else cosine
        expert = slot // slots_per_expert
        handicap[expert * slots_per_expert : (expert + 1) * slots_per_expert] += 2.0
        handicap[slot] = np.inf
        chosen.append(slot)
    return [divmod(slot, slots_per_expert) for slot in sorted(chosen)]


# === Drawing ===


def _draw_experts(ax, image, experts, clearness, colors):
    shown = np.concatenate([colors[experts], clearness[..., None]], axis=-1)
    pictures.draw_map(ax, image, shown)
    pictures.hatch_patches(ax, image, experts < 0)
    rows, columns = experts.shape
    height, width = image.shape[0] / rows, image.shape[1] / columns
    for (row, column), expert in np.ndenumerate(experts):
        if expert >= 0 and max(rows, columns) <= _MOST_NUMBERS:
            ax.text(
                (column + 0.5) * width,
                (row + 0.5) * height,
                str(expert),
                ha="center",
                va="center_baseline",
                fontsize=48 / max(rows, columns, 6),
                alpha=clearness[row, column],
            )


def _draw_counts(ax, counts, clear, colors):
    """Horizontal bars: dropped patches (the first count), then each expert's."""
    dropped, counts = counts[0], counts[1:]
    experts = np.arange(len(counts))
    ax.barh(experts, counts, color="white", ec="black", lw=0.4)
    ax.barh(experts, clear, color=colors, ec="black", lw=0.4)
    ax.axvline(counts.mean(), color="black", ls="--", lw=1)
    above = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "bottom"}
    ax.text(counts.mean(), 1.0, "even", fontsize=7, **above)
    places = names = experts[:: -(-len(experts) // 20)].tolist()
    if dropped:
        bottom = len(counts) + 0.5
        ax.barh(bottom, dropped, color=drawing.DROPPED, hatch="////", ec="grey", lw=0.4)
        places, names = [*places, bottom], [*names, "dropped"]
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.tick_params(labelsize=8)
    drawing.label_axes(ax, "patches", "expert")
    ax.spines[["top", "right"]].set_visible(False)


def _see_through():
    """From blue to orange; in the middle only the picture is seen."""
    less, more = drawing.import_matplotlib().colors.to_rgba_array(_LESS_AND_MORE)
    strength = np.linspace(-1, 1, 511)
    colors = np.where(strength[:, None] < 0, less, more)
    colors[:, 3] = 0.9 * np.abs(strength)
    return colors


def _expert_colors(num_experts):
    """`(E, 3)`: soft, distinct colours for up to 18 experts, a rainbow for more."""
    if num_experts <= 18:
        # Without the two greys, the colour of dropped patches.
        colors = np.delete(drawing.shades(20, "tab20", 0, 1), (14, 15), axis=0)[
            :num_experts
        ]
    else:
        colors = np.array(drawing.shades(num_experts, "turbo", 0, 1))
    # Lighter, so that black numbers can be read on them.
    return 0.7 * colors[:, :3] + 0.3
