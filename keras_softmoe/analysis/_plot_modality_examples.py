"""Figures of the patches and words that go to the experts of a LIMoE."""

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe import drawing
from keras_softmoe.analysis import _pictures as pictures
from keras_softmoe.analysis._modality_examples import (
    ExpertExamples,
    pair_routing,
)
from keras_softmoe.types import Figure

# What SentencePiece writes where a word begins.
_BEGIN = "▁"
_WORDS_PER_LINE = 4
_MOST_COLUMNS = 5
# How much of a patch that is not the expert's is left in its picture.
_FADED = 0.12


def plot_expert_examples(
    examples: ExpertExamples, experts: Sequence | None = None
) -> Figure:
    """Show the patches and words that are each expert's with the highest probability.

    One row for each expert: which share of the patches and of the text tokens choose it
    first; the patches and the words of the highest routing probabilities, with these
    numbers and in falling order. A hyphen marks pieces that do not begin a word.

    Args:
        examples: what `analysis.expert_examples` returns.
        experts: sequence of experts to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are no examples, or an expert does not exist.

    Source: LIMoE, appendix F.2 (figures 23 to 25).

    Examples:
        >>> examples = ksm.analysis.expert_examples(limoe, scenes, captions, layer=3)
        >>> figure = ksm.analysis.plot_expert_examples(examples)
    """
    drawing.import_matplotlib()
    drawing.check_kind("examples", examples, ExpertExamples)
    count = len(next(iter(examples.share.values())))
    experts = drawing.chosen_experts(experts, count)
    # Width in inches of what there is.
    widths = {}
    if examples.patches is not None:
        most = max(len(patches) for patches in examples.patches)
        widths["patches"] = 0.48 * max(most, 3)
    if examples.words is not None:
        widths["words"] = 1.05 * _WORDS_PER_LINE
        words = _readable(examples.words)
    figure = drawing.new_figure(1.3 + sum(widths.values()), 0.5 + 0.72 * len(experts))
    axes = figure.subplots(
        *(len(experts), len(widths)),
        squeeze=False,
        width_ratios=list(widths.values()),
    )
    for row, expert in zip(axes, experts, strict=True):
        shares = (
            f"{_percent(share[expert])} of {'patches' if name == 'image' else 'text'}"
            for name, share in examples.share.items()
        )
        row[0].set_ylabel(
            "\n".join((f"expert {expert}", *shares)),
            fontsize=8,
            rotation=0,
            ha="right",
            va="center",
        )
        for ax, kind in zip(row, widths, strict=True):
            if kind == "patches":
                _draw_patches(
                    *(ax, examples.patches[expert]),
                    examples.patch_probabilities[expert],
                    most,
                )
            else:
                probabilities = examples.word_probabilities[expert]
                _write_words(ax, words[expert], probabilities)
    title = f"What experts are sent most surely, block {examples.layer}"
    figure.suptitle(title, fontsize=11)
    return figure


def plot_pair(
    model: keras.Model,
    image: ArrayLike,
    caption: str | ArrayLike,
    layer: int | None = None,
    preprocessor: Callable | None = None,
) -> Figure:
    """Show which expert of a block takes which patches and words of one pair.

    First the picture with its caption; then for each expert that takes something the
    patches that it takes, the others faded, and below them the pieces of text. What no
    expert takes comes last.

    Args:
        model: `LIMoEBackbone`, or a task that has one.
        image: `(height, width, channels)` array.
        caption: str, or `(sequence_length,)` ints.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        preprocessor: as in `analysis.pair_routing`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: as `analysis.pair_routing`.

    Source: LIMoE, appendix F.3 (figures 26 to 29).

    Examples:
        >>> figure = ksm.analysis.plot_pair(limoe, scenes[0], captions[0], layer=3)
        >>> figure.savefig("pair.png")
    """
    drawing.import_matplotlib()
    routing = pair_routing(model, image, caption, layer, preprocessor)
    (words,) = _readable([routing.words])
    # Dropped tokens last.
    experts = [*range(routing.num_experts), -1]
    shown = [
        expert
        for expert in experts
        if (routing.patch_experts == expert).any()
        or (routing.word_experts == expert).any()
    ]
    figure, axes = drawing.panel_grid(1 + len(shown), 1.7, 2.35, _MOST_COLUMNS)
    pictures.draw_picture(axes[0], routing.image)
    axes[0].set_title("image and caption", fontsize=9)
    text = caption if isinstance(caption, str) else _counted(words)
    _write_below(axes[0], text)
    for ax, expert in zip(axes[1:], shown, strict=True):
        pictures.draw_picture(ax, _faded(routing, routing.patch_experts == expert))
        ax.set_title("dropped" if expert < 0 else f"expert {expert}", fontsize=9)
        taken = routing.word_experts == expert
        _write_below(ax, _counted(np.extract(taken, words)))
    figure.suptitle(f"Experts of one pair, block {routing.layer}", fontsize=11)
    return figure


# === Data ===


def _readable(words_by_expert):
    """Pieces without the sign that begins a word, hyphens before the others."""
    all_words = {word for words in words_by_expert for word in words}
    if not any(word.startswith(_BEGIN) for word in all_words):
        # Ids, or the pieces of another vocabulary.
        return words_by_expert

    def readable(piece):
        if piece.startswith(_BEGIN):
            return piece.removeprefix(_BEGIN) or _BEGIN
        return f"-{piece}" if piece[0].isalnum() else piece

    return [[readable(word) for word in words] for words in words_by_expert]


def _counted(words):
    """Words in their order, equal ones counted: "red · <pad> ×9"."""
    # No break before the count.
    counts = {w: "" if n == 1 else f"\u00a0×{n}" for w, n in Counter(words).items()}
    return " · ".join(word + count for word, count in counts.items())


def _faded(routing, is_taken):
    """The image with only some patches, `(rows, columns)`, left as they are."""
    height, width, _ = routing.image.shape
    rows, columns = is_taken.shape
    block = np.ones((height // rows, width // columns, 1))
    strength = np.kron(np.where(is_taken, 1.0, _FADED)[..., None], block)
    # Towards white.
    return 1.0 - strength * (1.0 - routing.image)


# === Drawing ===


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
