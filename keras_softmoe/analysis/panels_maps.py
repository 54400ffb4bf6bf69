"""Figures of `RoutingMaps`: images with a map over them, patches and words."""

import textwrap
from collections import Counter

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis.streaming import WORD_BEGINS

# Brightness of the images that lie under a map.
_DIMMED = 0.6
# Colours of less and of more than an even share.
_LESS_AND_MORE = (drawing.PALETTE[0], "#FFB000")
# Zero on a scale of ratios.
_LEAST_SHARE = 1e-9
# Up to this many patches in a row, the number of its expert is written on a patch.
_MOST_NUMBERS = 16
# Light blue, around the images.
_OUTSIDE = "#D6E9F5"
# So many experts are shown, and so many patches of each.
_MOST_EXPERTS = 8
_MOST_PATCHES = 10
_SIDE = 0.62
_WORDS_PER_LINE = 4
_LINES = 4
_MOST_COLUMNS = 5
# How much of a patch that is not the expert's is left in its image.
_FADED = 0.12


def slots(maps, slots=6):
    """Draw the share of each patch in some slots, one row for each image.

    `slots` are `(expert, slot)` pairs, or how many of those that differ most to show.
    """
    matplotlib = drawing.import_matplotlib()
    chosen = _chosen_slots(maps.dispatch, slots)
    # (slots, B, rows, columns), 1 if a slot took all tokens alike
    shares = np.stack([maps.dispatch[..., e, c] for e, c in chosen])
    shares *= maps.group_tokens
    top = drawing.end_of_scale(shares, 0.995, least=4.0)
    scale = matplotlib.colors.LogNorm(1 / top, top)
    # From blue to orange, transparent in the middle.
    less, more = matplotlib.colors.to_rgba_array(_LESS_AND_MORE)
    strength = np.linspace(-1, 1, 511)
    colors = np.where(strength[:, None] < 0, less, more)
    colors[:, 3] = 0.9 * np.abs(strength)
    colors = matplotlib.colors.ListedColormap(colors)
    names = [f"expert {expert}, slot {slot}" for expert, slot in chosen]
    figure, axes = drawing.image_rows(maps.images, names, extra_width=0.9)
    by_image = shares.swapaxes(0, 1)
    for image, row, by_slot in zip(maps.images, axes, by_image, strict=True):
        for ax, share in zip(row, by_slot, strict=True):
            drawing.draw_image(ax, image, _DIMMED)
            share = np.maximum(share, _LEAST_SHARE)
            drawing.draw_map(ax, image, share, cmap=colors, norm=scale)
    drawn = matplotlib.cm.ScalarMappable(scale, colors)
    label = f"dispatch weight, in even shares (1/{maps.group_tokens})"
    style = {"extend": "both", "size": 8, "aspect": 12 * len(axes)}
    bar = drawing.draw_scale(figure, drawn, figure.axes, label, **style)
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
    figure = drawing.image_figure(2, columns, extra_width=3.0)
    grid = figure.add_gridspec(2, columns + 1, width_ratios=[1] * columns + [1.9])
    for column, image in enumerate(maps.images):
        drawing.draw_image(figure.add_subplot(grid[0, column]), image)
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
    figure, axes = drawing.image_rows(maps.images, names, extra_height=extra_height)
    for column, taken_by_none in zip(axes.T, maps.discarded.values(), strict=True):
        for ax, image, patches in zip(column, maps.images, taken_by_none, strict=True):
            drawing.draw_image(ax, image)
            drawing.hatch_patches(ax, image, patches)
            ax.set_xlabel(f"{patches.mean():.0%} discarded", fontsize=7, labelpad=2)
    title = f"Patches that no expert takes\n{drawing.block_title(maps.block)}"
    if maps.priority is not None:
        priority = drawing.PRIORITY_NAMES.get(maps.priority, maps.priority)
        title += f", priority {priority}"
    figure.suptitle(title, fontsize=10)
    return figure


def patches(maps, experts=None):
    """Draw the patches of each expert with the largest weights, one row per expert.

    `experts` defaults to the 8 that take most.
    """
    found = maps.patches
    count = len(found.share)
    if experts is None:
        experts = np.argsort(-found.share, kind="stable")[:_MOST_EXPERTS].tolist()
    experts = drawing.chosen_experts(experts, count)
    size = 1.2 + _SIDE * _MOST_PATCHES, 0.6 + (_SIDE + 0.2) * len(experts)
    figure = drawing.new_figure(*size)
    axes = figure.subplots(len(experts), _MOST_PATCHES, squeeze=False)
    for row, expert in zip(axes, experts, strict=True):
        _write_beside(row[0], f"expert {expert}\n{100 * found.share[expert]:.1f}%")
        for ax in row:
            _no_frame(ax)
        for index, image in enumerate(found.images[expert]):
            _draw_with_surroundings(row[index], image)
            weight = found.weights[expert][index]
            row[index].set_xlabel(f"{weight:.2f}", fontsize=6, labelpad=1)
    title = "Patches that experts take with the largest weights, "
    title += drawing.block_title(maps.block)
    even = f"beside them, the expert's share of all patches (even: {100 / count:.3g}%)"
    figure.suptitle(f"{title}\n{even}", fontsize=9)
    return figure


def examples(maps, experts=None):
    """Draw the patches and words of each expert with the highest probabilities."""
    found = maps.examples
    count = len(next(iter(found.share.values())))
    experts = drawing.chosen_experts(experts, count)
    # Widths in inches
    widths = {}
    if found.patches is not None:
        most = max(map(len, found.patches))
        widths["patches"] = 0.48 * max(most, 3)
    if found.words is not None:
        widths["words"] = 1.05 * _WORDS_PER_LINE
        words = _readable(found.words)
    figure = drawing.new_figure(1.3 + sum(widths.values()), 0.5 + 0.72 * len(experts))
    shape, inches = (len(experts), len(widths)), list(widths.values())
    axes = figure.subplots(*shape, squeeze=False, width_ratios=inches)
    for row, expert in zip(axes, experts, strict=True):
        shares = (
            f"{_percent(share[expert])} of {'patches' if name == 'image' else 'text'}"
            for name, share in found.share.items()
        )
        _write_beside(row[0], "\n".join((f"expert {expert}", *shares)))
        for ax, kind in zip(row, widths, strict=True):
            _no_frame(ax)
            if kind == "patches":
                ax.set(xlim=(0, max(1.1 * most, 1.1)), ylim=(-0.3, 1.05))
                ax.set_aspect("equal")
                probabilities = found.patch_probabilities[expert]
                for index, patch in enumerate(found.patches[expert]):
                    corner = (index * 1.1, 0, 1, 1)
                    corner = ax.inset_axes(corner, transform=ax.transData)
                    drawing.draw_image(corner, patch)
                    corner.spines[:].set_visible(False)
                    percent = _percent(probabilities[index])
                    corner.set_xlabel(percent, fontsize=6, labelpad=1)
            else:
                _write_words(ax, words[expert], found.word_probabilities[expert])
    title = f"Most probable tokens of experts, {drawing.block_title(maps.block)}"
    figure.suptitle(title, fontsize=11)
    return figure


def pair(maps, index=0):
    """Draw the patches and words of one pair that each expert takes."""
    image, patch_experts = maps.images[index], maps.main_experts[index]
    word_experts = maps.word_experts[index]
    (words,) = _readable([maps.words[index]])
    # Dropped tokens last.
    taking = {*patch_experts.ravel(), *word_experts}
    shown = [e for e in [*range(maps.num_experts), -1] if e in taking]
    figure, axes = drawing.panel_grid(1 + len(shown), 1.7, 2.35, _MOST_COLUMNS)
    drawing.draw_image(axes[0], image)
    axes[0].set_title("image and caption", fontsize=9)
    _write_below(axes[0], _counted(words))
    for ax, expert in zip(axes[1:], shown, strict=True):
        drawing.draw_image(ax, _faded(image, patch_experts == expert))
        ax.set_title("dropped" if expert < 0 else f"expert {expert}", fontsize=9)
        _write_below(ax, _counted(np.extract(word_experts == expert, words)))
    title = f"Experts of one pair, {drawing.block_title(maps.block)}"
    figure.suptitle(title, fontsize=11)
    return figure


def _chosen_slots(dispatch, slots):
    """Return a list of `(expert, slot)`, checked."""
    num_experts, slots_per_expert = dispatch.shape[-2:]
    is_count = isinstance(slots, int)
    chosen = _most_different_slots(dispatch, slots) if is_count else list(slots)
    known = list(np.ndindex(num_experts, slots_per_expert))
    if not chosen or any(tuple(pair) not in known for pair in chosen):
        raise ValueError(
            "`slots` must be a positive number, or pairs (expert, slot) of "
            f"{num_experts} experts with {slots_per_expert} slots. Received: {slots=}."
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


def _draw_experts(ax, image, experts, clearness, colors):
    shown = np.concatenate([colors[experts], clearness[..., None]], axis=-1)
    drawing.draw_map(ax, image, shown)
    drawing.hatch_patches(ax, image, experts < 0)
    rows, columns = experts.shape
    height, width = image.shape[0] / rows, image.shape[1] / columns
    size = 48 / max(rows, columns, 6)
    style = {"ha": "center", "va": "center_baseline", "fontsize": size}
    for (row, column), expert in np.ndenumerate(experts):
        if expert >= 0 and max(rows, columns) <= _MOST_NUMBERS:
            place = (column + 0.5) * width, (row + 0.5) * height
            ax.text(*place, str(expert), alpha=clearness[row, column], **style)


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


def _expert_colors(num_experts):
    """Return `(E, 3)` soft, distinct colours; more than 18 form a rainbow."""
    colors = np.array(drawing.shades(num_experts, "turbo", 0, 1))
    if num_experts <= 18:
        # Without the two greys, the colour of dropped patches.
        colors = np.delete(drawing.shades(20, "tab20", 0, 1), (14, 15), axis=0)
        colors = colors[:num_experts]
    # Lighter, so that black numbers can be read on them.
    return 0.7 * colors[:, :3] + 0.3


def _readable(words_by_expert):
    """Return pieces without the sign that begins a word, others with a hyphen."""
    all_words = {word for words in words_by_expert for word in words}
    if not any(word.startswith(WORD_BEGINS) for word in all_words):
        # Ids, or the pieces of another vocabulary.
        return words_by_expert

    def readable(piece):
        if piece.startswith(WORD_BEGINS):
            return piece.removeprefix(WORD_BEGINS) or WORD_BEGINS
        return f"-{piece}" if piece[0].isalnum() else piece

    return [[readable(word) for word in words] for words in words_by_expert]


def _counted(words):
    """Join words in their order, with equal ones counted: "red · <pad> ×9"."""
    # No break before the count.
    counts = {w: "" if n == 1 else f"\u00a0×{n}" for w, n in Counter(words).items()}
    return " · ".join(word + count for word, count in counts.items())


def _faded(image, is_taken):
    """Fade all patches of an image but some, `(rows, columns)` bool."""
    height, width, _ = image.shape
    rows, columns = is_taken.shape
    block = np.ones((height // rows, width // columns, 1))
    strength = np.kron(np.where(is_taken, 1.0, _FADED)[..., None], block)
    # Towards white.
    return 1.0 - strength * (1.0 - image)


def _draw_with_surroundings(ax, image):
    height, width = image.shape[0] // 3, image.shape[1] // 3
    drawing.draw_image(ax, np.nan_to_num(image))
    values, blue = drawing.covered(np.isnan(image).any(axis=-1), _OUTSIDE)
    drawing.draw_map(ax, image, values, cmap=blue)
    style = {"fill": False, "ec": drawing.PALETTE[1], "lw": 1.0}
    frame = drawing.import_matplotlib().patches.Rectangle
    ax.add_patch(frame((width, height), width, height, **style))


def _write_words(ax, words, probabilities):
    for index, word in enumerate(words):
        line, column = divmod(index, _WORDS_PER_LINE)
        place = column / _WORDS_PER_LINE, 1 - (line + 0.5) / _LINES
        word = textwrap.shorten(word, 12, placeholder="…")
        text = f"{word} {_percent(probabilities[index])}"
        ax.text(*place, text, fontsize=7, va="center", parse_math=False)
    ax.set(xlim=(0, 1), ylim=(0, 1))


def _write_beside(ax, text):
    ax.set_ylabel(text, fontsize=8, rotation=0, ha="right", va="center")


def _write_below(ax, text):
    lines = textwrap.wrap(text, 22, break_long_words=True)
    ax.set_xlabel("\n".join(lines) or "no text", fontsize=7, parse_math=False)
    if not lines:
        ax.xaxis.label.set_color("0.6")


def _no_frame(ax):
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def _percent(share):
    return f"{100 * share:.0f}%"
