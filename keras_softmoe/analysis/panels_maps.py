"""Figures of `RoutingMaps` over the images: slots, experts, discarded patches."""

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis import panel_parts as pictures

# Brightness of the pictures that lie under a map.
_DIMMED = 0.6
# Colours of less and of more than an even share.
_LESS_AND_MORE = (drawing.PALETTE[0], "#FFB000")
# Zero on a scale of ratios.
_LEAST_SHARE = 1e-9
# Up to this many patches in a row, the number of its expert is written on a patch.
_MOST_NUMBERS = 16


def slots(maps, slots=6):
    """Draw the share of each patch in some slots, one row for each image.

    Args:
        maps: `RoutingMaps`.
        slots: int, how many slots to show: those that differ most in their patches, of
            different experts as far as there are enough. Or a sequence of
            `(expert, slot)` pairs.
    """
    matplotlib = drawing.import_matplotlib()
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
    figure.suptitle(f"Patches in slots, {drawing.block_title(maps.block)}", fontsize=11)
    return figure


def experts(maps):
    """Draw the expert of the largest weight for each patch."""
    # (B, rows, columns)
    experts = maps.main_experts
    num_experts = maps.num_experts
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
    title = f"Main expert of each patch, {drawing.block_title(maps.block)}"
    scale = f"white: an even share of the weight (1/{num_experts}), "
    scale += "full colour: twice that or more"
    figure.suptitle(f"{title}\n{scale}", fontsize=9)
    return figure


def discarded(maps):
    """Draw the patches that no expert takes at each capacity."""
    names = [f"C = {factor:g}" for factor in maps.discarded]
    extra_height = 0.12 * len(maps.images) + 0.7
    figure, axes = pictures.image_rows(maps.images, names, extra_height=extra_height)
    for column, taken_by_none in zip(axes.T, maps.discarded.values(), strict=True):
        for ax, image, patches in zip(column, maps.images, taken_by_none, strict=True):
            pictures.draw_picture(ax, image)
            pictures.hatch_patches(ax, image, patches)
            share = f"{patches.mean():.0%} discarded"
            ax.set_xlabel(share, fontsize=7, labelpad=2)
    title = f"Patches that no expert takes\n{drawing.block_title(maps.block)}"
    if maps.priority is not None:
        priority = drawing.PRIORITY_NAMES.get(maps.priority, maps.priority)
        title += f", priority {priority}"
    figure.suptitle(title, fontsize=10)
    return figure


# === Choice of slots ===


def _chosen_slots(dispatch, slots):
    """Return a list of `(expert, slot)`, checked."""
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
    """Return slots from the most selective one on, each least like those before."""
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
    """Draw bars: dropped patches (the first count), then each expert's."""
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
    """Return colours from blue to orange, transparent in the middle."""
    less, more = drawing.import_matplotlib().colors.to_rgba_array(_LESS_AND_MORE)
    strength = np.linspace(-1, 1, 511)
    colors = np.where(strength[:, None] < 0, less, more)
    colors[:, 3] = 0.9 * np.abs(strength)
    return colors


def _expert_colors(num_experts):
    """Return `(E, 3)` soft, distinct colours; more than 18 form a rainbow."""
    if num_experts <= 18:
        # Without the two greys, the colour of dropped patches.
        colors = np.delete(drawing.shades(20, "tab20", 0, 1), (14, 15), axis=0)[
            :num_experts
        ]
    else:
        colors = np.array(drawing.shades(num_experts, "turbo", 0, 1))
    # Lighter, so that black numbers can be read on them.
    return 0.7 * colors[:, :3] + 0.3
