"""Figures of how a LIMoE treats images and text, from statistics by modality."""

from collections.abc import Sequence

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis._by_modality import ModalityStatistics
from keras_softmoe.types import Figure

_PADDING_COLOR = drawing.PALETTE[4]
_MOST_EXPERT_TICKS = 8
# A capacity that is so many times the highest bar would leave no room for the bars.
_FARTHEST = 2.0
# Half the distance of two blocks, nearly.
_HALF_WIDTH = 0.44


def plot_modality_load(statistics: dict, layers: Sequence | None = None) -> Figure:
    """Show how many tokens of images and text choose each expert, and which it drops.

    One panel for each MoE block, one bar for each expert: from the bottom the tokens of
    text that it processes, their padding, and the patches; hatched above them the
    tokens of text and of images that chose it and were dropped. The dashed line is the
    capacity of an expert. It holds in each group of pairs, so an expert may drop tokens
    in one group and have free slots in another: bars below the line may have hatched
    parts.

    Args:
        statistics: what `analysis.modality_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`. All its panels share one scale.

    Raises:
        ValueError: if these are not statistics of these blocks.

    Source: LIMoE, appendices F.1 (figures 17 to 22) and G (figure 39).

    Examples:
        >>> statistics = ksm.analysis.modality_statistics(limoe, scenes, captions)
        >>> figure = ksm.analysis.plot_modality_load(statistics)
    """
    matplotlib = drawing.import_matplotlib()
    figure, panels = drawing.block_panels(
        statistics, layers, ModalityStatistics, 2.7, 2.0, sharey=True
    )
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


def plot_routing_confidence(statistics: dict, layers: Sequence | None = None) -> Figure:
    """Show how sure the router is of the tokens of images and of text, block by block.

    What is shown is the largest routing probability of each token: its mean by
    modality, with bars of one standard deviation up and down (not below 0 or above
    100%), and beside them its distribution over tokens, text to the left and images to
    the right, each as wide as its fullest bin. A dotted line marks `1/E`, the least it
    can be.

    Args:
        statistics: what `analysis.modality_statistics` returns.
        layers: sequence of blocks to show, from left to right. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not statistics of these blocks.

    Source: LIMoE, appendix G (figure 38).

    Examples:
        >>> statistics = ksm.analysis.modality_statistics(limoe, scenes, captions)
        >>> figure = ksm.analysis.plot_routing_confidence(statistics)
    """
    blocks = drawing.chosen_blocks(statistics, layers, ModalityStatistics)
    places = np.arange(len(blocks))
    figure = drawing.new_figure(max(4.2, 1.6 + 0.85 * len(blocks)), 3.4)
    ax = figure.subplots()
    for place, block in enumerate(blocks.values()):
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
    for name in drawing.modalities_of(blocks):
        drawing.draw_means(
            ax,
            places + {"text": -0.04, "image": 0.04}[name],
            [block.confidence_mean[name] for block in blocks.values()],
            [block.confidence_std[name] for block in blocks.values()],
            limits=(0, 1),
            label=name,
            **drawing.MODALITY_STYLES[name],
        )
    least = [1 / len(block.padding) for block in blocks.values()]
    style = {"colors": "0.3", "ls": ":", "lw": 1, "label": "1/E"}
    ax.hlines(least, places - 0.5, places + 0.5, **style)
    ax.set(xlim=(-0.5, len(blocks) - 0.5), ylim=(0, 1.04))
    ax.set_xticks(places, [drawing.block_title(layer) for layer in blocks])
    drawing.plain_axes(ax)
    drawing.as_percentages(ax.yaxis)
    drawing.label_axes(ax, y="largest routing probability")
    drawing.legend_beside(figure, drawing.labelled(ax))
    return figure


def plot_coverage(
    statistics: dict, layers: Sequence | None = None, share: float = 0.9
) -> Figure:
    """Show how many experts of each block a modality can do without.

    One panel for each modality, one line for each MoE block: the share of tokens whose
    first choice is among the experts that are kept, if those are kept that most tokens
    of the modality choose. The dotted line is what experts in equal use would give, the
    dashed one a share that is asked for; how many experts each block needs for it is in
    the legend.

    Args:
        statistics: what `analysis.modality_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.
        share: float in `(0, 1]`, the share of tokens that is asked for.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not statistics of these blocks, or `share` is not a
            part of the tokens.

    Source: LIMoE, appendices E.4 (figure 13) and B.2 (figure 10, the experts needed).

    Examples:
        >>> statistics = ksm.analysis.modality_statistics(limoe, scenes, captions)
        >>> figure = ksm.analysis.plot_coverage(statistics)
    """
    blocks = drawing.chosen_blocks(statistics, layers, ModalityStatistics)
    modalities = drawing.modalities_of(blocks)
    # Since distinct colours stand for modalities.
    styles = drawing.line_styles(blocks, drawing.shades(len(blocks)))
    figure, axes = drawing.panel_grid(
        len(modalities), 3.6, 2.8, sharex=True, sharey=True
    )
    for ax, name in zip(axes, modalities, strict=True):
        for (layer, block), style in zip(blocks.items(), styles, strict=True):
            coverage = block.coverage[name]
            label = f"{drawing.block_title(layer)}: {block.experts_needed(share)[name]}"
            ax.plot(np.arange(1, len(coverage) + 1), coverage, label=label, **style)
        most = max(len(block.padding) for block in blocks.values())
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


def _layers_of_bars(block):
    """From the bottom: label, `(E,)` counts and style."""
    text, image = (block.seated.get(n, block.padding * 0) for n in ("text", "image"))
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
            dropped = block.chosen[name] - block.seated[name]
            yield f"{name}, dropped", dropped, style
