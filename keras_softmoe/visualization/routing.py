"""Pictures of one block's routing, drawn over the images."""

import numpy as np

from keras_softmoe.evaluation.routing import main_experts, routing_maps
from keras_softmoe.visualization.drawing import (
    DROPPED,
    draw_map,
    draw_picture,
    import_matplotlib,
    picture_figure,
)

# Brightness of the pictures that lie under a map.
_DIMMED = 0.6
# Up to this many patches in a row, the number of its expert is written on a patch.
_MOST_NUMBERS = 16


def plot_slots(model, images, layer=None, slots=6, preprocessor=None):
    """Show which patches some slots of a block take, image by image.

    One row for each image: the picture, then one map for each slot, which colours the
    patches that the slot gives more than an even share of its dispatch weight. Under a
    soft router a slot mixes all patches; under a sparse one it holds one at most.

    Args:
        model: `ViTMoEBackbone`, or a task that has one.
        images: `(B, height, width, channels)` array, a few images.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        slots: int, how many slots to show: those that differ most in what they take,
            of different experts as far as there are enough. Or a sequence of
            `(expert, slot)` pairs.
        preprocessor: as in `evaluation.routing_maps`.

    Returns:
        `matplotlib.figure.Figure`. All its maps share one scale.

    Raises:
        ValueError: as `evaluation.routing_maps`, or if a slot does not exist.
        ImportError: if matplotlib is missing.

    Source: Soft MoE, figure 25 ("Visual inspection").

    Example:

    >>> figure = ksm.visualization.plot_slots(classifier, images[:4])
    >>> figure.savefig("slots.png")
    """
    matplotlib = import_matplotlib()
    maps = routing_maps(model, images, layer, preprocessor)
    chosen = _chosen_slots(maps.dispatch, slots)
    # (slots, B, rows, columns), 1 if a slot took all tokens alike
    shares = np.stack([maps.dispatch[..., e, c] for e, c in chosen])
    shares *= maps.group_tokens
    # A few extreme shares must not make the others invisible.
    top = max(np.quantile(shares[shares > 0], 0.995) if shares.any() else 0, 1.25)
    scale = matplotlib.colors.Normalize(1, top)
    colors = _see_through(matplotlib)

    rows, columns = len(maps.images), 1 + len(chosen)
    figure = picture_figure(matplotlib, rows, columns, extra_width=0.9)
    axes = figure.subplots(rows, columns, squeeze=False)
    axes[0, 0].set_title("image", fontsize=9)
    for ax, (expert, slot) in zip(axes[0, 1:], chosen, strict=True):
        ax.set_title(f"expert {expert}, slot {slot}", fontsize=9)
    for row, image in enumerate(maps.images):
        draw_picture(axes[row, 0], image)
        for ax, share in zip(axes[row, 1:], shares[:, row], strict=True):
            draw_picture(ax, image, _DIMMED)
            draw_map(ax, image, share, cmap=colors, norm=scale)
    bar = figure.colorbar(
        matplotlib.cm.ScalarMappable(scale, colors),
        ax=axes,
        extend="max" if shares.max() > top else "neither",
        aspect=12 * rows,
        pad=0.02,
    )
    bar.ax.set_facecolor(str(_DIMMED / 2))
    bar.ax.tick_params(labelsize=8)
    bar.set_label(
        f"dispatch weight, in even shares (1/{maps.group_tokens})", fontsize=9
    )
    figure.suptitle(f"What slots take in, block {maps.layer}", fontsize=11)
    return figure


def plot_experts(model, images, layer=None, preprocessor=None):
    """Show which expert each patch of some images listens to most.

    Above, the pictures; below, each patch in the colour of its main expert (see
    `evaluation.main_experts`), hatched grey if no expert takes it (dropped). Beside
    them, the number of patches in each colour.

    Args:
        model: `ViTMoEBackbone`, or a task that has one.
        images: `(B, height, width, channels)` array, a few images.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        preprocessor: as in `evaluation.routing_maps`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: as `evaluation.routing_maps`.
        ImportError: if matplotlib is missing.

    Source: V-MoE, section 5 and appendix D (dropped patches).

    Example:

    >>> figure = ksm.visualization.plot_experts(classifier, images[:6])
    >>> figure.savefig("experts.png")
    """
    matplotlib = import_matplotlib()
    maps = routing_maps(model, images, layer, preprocessor)
    # (B, rows, columns)
    experts = main_experts(maps)
    num_experts = maps.combine.shape[-2]
    colors = _expert_colors(matplotlib, num_experts)

    columns = len(experts)
    figure = picture_figure(matplotlib, 2, columns, extra_width=3.0)
    grid = figure.add_gridspec(2, columns + 1, width_ratios=[1] * columns + [1.9])
    for column, image in enumerate(maps.images):
        draw_picture(figure.add_subplot(grid[0, column]), image)
        ax = figure.add_subplot(grid[1, column])
        _draw_experts(matplotlib, ax, image, experts[column], colors)
    counts = np.bincount(experts.ravel() + 1, minlength=num_experts + 1)
    _draw_counts(figure.add_subplot(grid[:, -1]), counts, colors)
    figure.suptitle(f"Main expert of each patch, block {maps.layer}", fontsize=11)
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


def _draw_experts(matplotlib, ax, image, experts, colors):
    pixels = colors[experts]
    pixels[experts < 0] = matplotlib.colors.to_rgb(DROPPED)
    draw_map(ax, image, pixels)
    rows, columns = experts.shape
    height, width = image.shape[0] / rows, image.shape[1] / columns
    for (row, column), expert in np.ndenumerate(experts):
        if expert < 0:
            corner = (column * width, row * height)
            ax.add_patch(
                matplotlib.patches.Rectangle(
                    corner, width, height, fill=False, hatch="////", ec="grey", lw=0
                )
            )
        elif max(rows, columns) <= _MOST_NUMBERS:
            ax.text(
                (column + 0.5) * width,
                (row + 0.5) * height,
                str(expert),
                ha="center",
                va="center_baseline",
                fontsize=48 / max(rows, columns, 6),
            )


def _draw_counts(ax, counts, colors):
    """Horizontal bars: dropped patches (the first count), then each expert's."""
    dropped, counts = counts[0], counts[1:]
    names = np.arange(len(counts))
    ax.barh(names, counts, color=colors, ec="black", lw=0.4)
    labelled = names[:: -(-len(names) // 20)]
    if dropped:
        bottom = len(counts) + 0.5
        ax.barh(bottom, dropped, color=DROPPED, hatch="////", ec="grey", lw=0.4)
        ax.set_yticks([*labelled, bottom], [*labelled, "dropped"], fontsize=8)
    else:
        ax.set_yticks(labelled, labelled, fontsize=8)
    ax.invert_yaxis()
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("patches", fontsize=9)
    ax.set_ylabel("expert", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)


def _see_through(matplotlib):
    """Dark orange to light yellow, with the picture shining through small values."""
    colors = matplotlib.colormaps["inferno"](np.linspace(0.55, 1, 256))
    colors[:, 3] = np.linspace(0, 0.9, 256) ** 0.5
    return matplotlib.colors.ListedColormap(colors)


def _expert_colors(matplotlib, num_experts):
    """`(E, 3)`: soft, distinct colours for up to 18 experts, a rainbow for more."""
    if num_experts <= 18:
        # Without the two greys, the colour of dropped patches.
        steps = np.delete(np.arange(20), (14, 15))[:num_experts]
        colors = matplotlib.colormaps["tab20"](steps)[:, :3]
    else:
        colors = matplotlib.colormaps["turbo"](np.linspace(0, 1, num_experts))[:, :3]
    # Lighter, so that black numbers can be read on them.
    return 0.7 * colors + 0.3
