"""Figures of `ModalityStatistics`: load, confidence, coverage and kinds of words."""

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis._drawing import block_panels
from keras_softmoe.analysis._pairs import PADDING_TAG

_PADDING_COLOR = drawing.PALETTE[4]
_MOST_EXPERT_TICKS = 8
# A capacity that is so many times the highest bar would leave no room for the bars.
_FARTHEST = 2.0
# Half the distance of two blocks, nearly.
_HALF_WIDTH = 0.44


def modality_load(blocks):
    """Draw the tokens of images and text that choose each expert."""
    matplotlib = drawing.import_matplotlib()
    figure, panels = block_panels(blocks, 2.7, 2.0, sharey=True)
    top = max(max(sum(block.chosen.values())) for _, block in panels)
    handles = {}
    for ax, block in panels:
        bottom = 0
        for label, counts, style in _layers_of_bars(block):
            if not counts.any():
                continue
            places = np.arange(len(counts))
            bars = ax.bar(places, counts, 0.85, bottom, label=label, **style)
            handles.setdefault(label, bars)
            bottom = bottom + counts
        if block.slots <= _FARTHEST * top:
            line = ax.axhline(block.slots, color="black", ls="--", lw=1.1)
            handles.setdefault("capacity", line)
        else:
            ax.margins(y=0.15)
            ax.text(
                *(0.98, 0.97, f"capacity {block.slots:,} ↑"),
                transform=ax.transAxes,
                fontsize=7,
                ha="right",
                va="top",
            )
        experts = range(len(block.padding))
        drawing.name_ticks(ax.xaxis, experts, experts, _MOST_EXPERT_TICKS)
        drawing.plain_axes(ax, 7)
    thousands = matplotlib.ticker.EngFormatter(sep="")
    figure.axes[0].yaxis.set_major_formatter(thousands)
    drawing.label_axes(figure, "expert", "tokens")
    drawing.legend_beside(figure, handles)
    return figure


def confidence(blocks):
    """Draw the distribution of the largest routing probability of each token."""
    places = np.arange(len(blocks))
    figure = drawing.new_figure(max(4.2, 1.6 + 0.85 * len(blocks)), 3.4)
    ax = figure.subplots()
    for place, block in enumerate(blocks):
        for name, histogram in block.confidence_histogram.items():
            side = -_HALF_WIDTH if name == "text" else _HALF_WIDTH
            edges = np.linspace(0, 1, len(histogram) + 1)
            ax.stairs(
                place + side * histogram / histogram.max(),
                edges,
                baseline=place,
                orientation="horizontal",
                fill=True,
                color=drawing.MODALITY_COLORS[name],
                alpha=0.3,
                lw=0,
            )
    for name in modalities_of(blocks):
        drawing.draw_means(
            ax,
            places + {"text": -0.04, "image": 0.04}[name],
            [block.confidence_mean[name] for block in blocks],
            [block.confidence_std[name] for block in blocks],
            limits=(0, 1),
            label=name,
            **drawing.MODALITY_STYLES[name],
        )
    least = [1 / len(block.padding) for block in blocks]
    style = {"colors": "0.3", "ls": ":", "lw": 1, "label": "1/E"}
    ax.hlines(least, places - 0.5, places + 0.5, **style)
    ax.set(xlim=(-0.5, len(blocks) - 0.5), ylim=(0, 1.04))
    ax.set_xticks(places, [drawing.block_title(block.block) for block in blocks])
    drawing.plain_axes(ax)
    drawing.as_percentages(ax.yaxis)
    drawing.label_axes(ax, y="largest routing probability")
    drawing.legend_beside(figure, drawing.labelled(ax))
    return figure


def coverage(blocks, share=0.9):
    """Draw the share of tokens whose first choice is among the most used experts.

    Args:
        blocks: list of `ModalityStatistics`.
        share: float in `(0, 1]`. The legend has the experts that each block needs for
            this share of the tokens.
    """
    modalities = modalities_of(blocks)
    # Since distinct colours stand for modalities.
    styles = drawing.line_styles([], drawing.shades(len(blocks)))
    figure, axes = drawing.panel_grid(
        len(modalities), 3.6, 2.8, sharex=True, sharey=True
    )
    for ax, name in zip(axes, modalities, strict=True):
        for block, style in zip(blocks, styles, strict=True):
            shares = block.coverage[name]
            needed = block.experts_needed(share)[name]
            label = f"{drawing.block_title(block.block)}: {needed}"
            ax.plot(np.arange(1, len(shares) + 1), shares, label=label, **style)
        most = max(len(block.padding) for block in blocks)
        ax.plot([0, most], [0, 1], color="0.5", ls=":", lw=1)
        ax.axhline(share, color="0.35", ls="--", lw=1)
        ax.set_title(name, fontsize=9)
        drawing.whole_ticks(ax.xaxis)
        ax.legend(
            fontsize=7,
            loc="lower right",
            title=f"experts for {100 * share:g}%",
            title_fontsize=7,
        )
        drawing.plain_axes(ax)
    axes[0].set(xlim=(0, most + 0.3), ylim=(0, 1.03))
    drawing.as_percentages(axes[0].yaxis)
    drawing.label_axes(axes[0], y="tokens whose first choice is kept")
    drawing.label_axes(figure, "experts kept")
    return figure


def words(blocks):
    """Draw the kinds of words of which the text of each expert consists."""
    figure, panels = block_panels(blocks, 3.0, 2.2, sharey=True)
    tags = [tag for tag in blocks[0].words.tags if tag != PADDING_TAG]
    colors = dict(zip(tags, _colors(len(tags)), strict=True))
    colors[PADDING_TAG] = drawing.DROPPED
    handles = {}
    for ax, block in panels:
        text = block.words
        (experts,) = np.nonzero(text.assigned.any(axis=0))
        # (T, bars)
        everything = text.num_tokens / text.num_tokens.sum()
        shares = np.c_[text.share[:, experts], everything]
        places = np.arange(shares.shape[1])
        bottom = np.zeros(len(places))
        for tag, heights in zip(text.tags, shares, strict=True):
            bars = ax.bar(places, heights, 0.8, bottom, color=colors[tag], label=tag)
            handles.setdefault(tag, bars)
            bottom = bottom + heights
        parts = text.assigned[:, experts].sum(axis=0) / text.num_tokens.sum()
        for place, part in enumerate(parts):
            ax.text(place, 1.01, f"{100 * part:.0f}%", ha="center", fontsize=6)
        drawing.plain_axes(ax, 7)
        ax.set_xticks(places, [*map(str, experts), "all"])
        ax.set_ylim(0, 1.1)
    drawing.as_percentages(figure.axes[0].yaxis)
    drawing.label_axes(figure, "expert", "share of its text")
    # As the bars: the first below.
    drawing.legend_beside(figure, dict(reversed(handles.items())))
    return figure


def modalities_of(blocks):
    """Return the modalities in statistics of blocks, text first."""
    return [name for name in drawing.MODALITY_COLORS if name in blocks[0].num_tokens]


def _layers_of_bars(block):
    """Yield label, `(E,)` counts and style of bars, from the bottom."""
    text, image = (block.assigned.get(n, block.padding * 0) for n in ("text", "image"))
    colors = drawing.MODALITY_COLORS
    yield "text: words", text - block.padding, {"color": colors["text"]}
    yield "text: padding", block.padding, {"color": _PADDING_COLOR}
    yield "image", image, {"color": colors["image"]}
    for name in ("text", "image"):
        if name in block.chosen:
            style = {
                "facecolor": "white",
                "edgecolor": colors[name],
                "hatch": "/////",
                "lw": 0.4,
            }
            dropped = block.chosen[name] - block.assigned[name]
            yield f"{name}, dropped", dropped, style


def _colors(count):
    if count <= len(drawing.PALETTE):
        return drawing.PALETTE[:count]
    return drawing.shades(count)
