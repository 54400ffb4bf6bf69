"""Figures of `RoutingMaps` with patches and words of each expert."""

import textwrap
from collections import Counter

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis import panel_parts as pictures
from keras_softmoe.analysis.pairs import WORD_BEGINS

# Light blue, around the images.
_OUTSIDE = "#D6E9F5"
# So many experts are shown, and so many patches of each.
_MOST_EXPERTS = 8
_MOST_PATCHES = 10
_SIDE = 0.62
_WORDS_PER_LINE = 4
_MOST_COLUMNS = 5
# How much of a patch that is not the expert's is left in its picture.
_FADED = 0.12


def patches(maps, experts=None):
    """Draw the patches of each expert with the largest weights, one row per expert.

    Args:
        maps: `RoutingMaps`.
        experts: sequence of experts to show. The 8 that take most if `None`.
    """
    found = maps.patches
    count = len(found.share)
    if experts is None:
        experts = np.argsort(-found.share, kind="stable")[:_MOST_EXPERTS].tolist()
    experts = pictures.chosen_experts(experts, count)
    figure = drawing.new_figure(
        1.2 + _SIDE * _MOST_PATCHES, 0.6 + (_SIDE + 0.2) * len(experts)
    )
    axes = figure.subplots(len(experts), _MOST_PATCHES, squeeze=False)
    for row, expert in zip(axes, experts, strict=True):
        text = f"expert {expert}\n{100 * found.share[expert]:.1f}%"
        _write_beside(row[0], text)
        for index, ax in enumerate(row):
            _no_frame(ax)
            if index < len(found.weights[expert]):
                _draw_with_surroundings(ax, found.pictures[expert][index])
                weight = found.weights[expert][index]
                ax.set_xlabel(f"{weight:.2f}", fontsize=6, labelpad=1)
    title = "Patches that experts take with the largest weights, "
    title += drawing.block_title(maps.block)
    even = f"beside them, the expert's share of all patches (even: {100 / count:.3g}%)"
    figure.suptitle(f"{title}\n{even}", fontsize=9)
    return figure


def examples(maps, experts=None):
    """Draw the patches and words of each expert with the highest probabilities.

    Args:
        maps: `RoutingMaps`.
        experts: sequence of experts to show. All of them if `None`.
    """
    found = maps.examples
    count = len(next(iter(found.share.values())))
    experts = pictures.chosen_experts(experts, count)
    # Widths in inches
    widths = {}
    if found.patches is not None:
        most = max(map(len, found.patches))
        widths["patches"] = 0.48 * max(most, 3)
    if found.words is not None:
        widths["words"] = 1.05 * _WORDS_PER_LINE
        words = _readable(found.words)
    figure = drawing.new_figure(1.3 + sum(widths.values()), 0.5 + 0.72 * len(experts))
    axes = figure.subplots(
        *(len(experts), len(widths)),
        squeeze=False,
        width_ratios=list(widths.values()),
    )
    for row, expert in zip(axes, experts, strict=True):
        shares = (
            f"{_percent(share[expert])} of {'patches' if name == 'image' else 'text'}"
            for name, share in found.share.items()
        )
        _write_beside(row[0], "\n".join((f"expert {expert}", *shares)))
        for ax, kind in zip(row, widths, strict=True):
            if kind == "patches":
                _draw_patches(
                    *(ax, found.patches[expert]),
                    found.patch_probabilities[expert],
                    most,
                )
            else:
                probabilities = found.word_probabilities[expert]
                _write_words(ax, words[expert], probabilities)
    title = f"Most probable tokens of experts, {drawing.block_title(maps.block)}"
    figure.suptitle(title, fontsize=11)
    return figure


def pair(maps, index=0):
    """Draw the patches and words of one pair that each expert takes.

    Args:
        maps: `RoutingMaps` of pairs.
        index: int, the pair.
    """
    image, patch_experts = maps.images[index], maps.main_experts[index]
    word_experts = maps.word_experts[index]
    (words,) = _readable([maps.words[index]])
    # Dropped tokens last.
    experts = [*range(maps.num_experts), -1]
    shown = [
        expert
        for expert in experts
        if (patch_experts == expert).any() or (word_experts == expert).any()
    ]
    figure, axes = drawing.panel_grid(1 + len(shown), 1.7, 2.35, _MOST_COLUMNS)
    pictures.draw_picture(axes[0], image)
    axes[0].set_title("image and caption", fontsize=9)
    _write_below(axes[0], _counted(words))
    for ax, expert in zip(axes[1:], shown, strict=True):
        pictures.draw_picture(ax, _faded(image, patch_experts == expert))
        ax.set_title("dropped" if expert < 0 else f"expert {expert}", fontsize=9)
        taken = word_experts == expert
        _write_below(ax, _counted(np.extract(taken, words)))
    figure.suptitle(
        f"Experts of one pair, {drawing.block_title(maps.block)}", fontsize=11
    )
    return figure


# === Data ===


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


# === Drawing ===


def _draw_with_surroundings(ax, picture):
    height, width = picture.shape[0] // 3, picture.shape[1] // 3
    pictures.draw_picture(ax, np.nan_to_num(picture))
    outside = np.isnan(picture).any(axis=-1)
    values, blue = pictures.covered(outside, _OUTSIDE)
    pictures.draw_map(ax, picture, values, cmap=blue)
    frame = drawing.import_matplotlib().patches.Rectangle(
        (width, height), width, height, fill=False, ec=drawing.PALETTE[1], lw=1.0
    )
    ax.add_patch(frame)


def _draw_patches(ax, patches, probabilities, most):
    for index, (patch, probability) in enumerate(
        zip(patches, probabilities, strict=True)
    ):
        corner = ax.inset_axes((index * 1.1, 0, 1, 1), transform=ax.transData)
        pictures.draw_picture(corner, patch)
        corner.spines[:].set_visible(False)
        corner.set_xlabel(_percent(probability), fontsize=6, labelpad=1)
    ax.set(xlim=(0, max(1.1 * most, 1.1)), ylim=(-0.3, 1.05), aspect="equal")
    _no_frame(ax)


def _write_words(ax, words, probabilities):
    lines = 4
    for index, (word, probability) in enumerate(zip(words, probabilities, strict=True)):
        column, line = index % _WORDS_PER_LINE, index // _WORDS_PER_LINE
        ax.text(
            column / _WORDS_PER_LINE,
            1 - (line + 0.5) / lines,
            f"{textwrap.shorten(word, 12, placeholder='…')} {_percent(probability)}",
            fontsize=7,
            va="center",
            parse_math=False,
        )
    ax.set(xlim=(0, 1), ylim=(0, 1))
    _no_frame(ax)


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
