"""A figure of which kinds of words each expert of a LIMoE takes."""

from collections.abc import Sequence

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis._tags import PADDING_TAG, TagStatistics
from keras_softmoe.types import Figure


def plot_tags(statistics: dict, layers: Sequence | None = None) -> Figure:
    """Show of what kinds of words the text consists that each expert processes.

    One panel for each MoE block, one bar for each expert that processes text, divided
    into the shares of the tags, the most frequent one of all text below and padding
    above. The last bar is all text. The number above a bar is how much of all text its
    expert processes.

    Args:
        statistics: what `analysis.tag_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`. All its panels share one scale.

    Raises:
        ValueError: if these are not statistics of these blocks.

    Source: LIMoE, appendix G.1 (figure 40).

    Examples:
        >>> def tagger(words):
        ...     return ["article" if word == "a" else "other" for word in words]
        >>> statistics = ksm.analysis.tag_statistics(limoe, captions, tagger)
        >>> figure = ksm.analysis.plot_tags(statistics)
    """
    figure, panels = drawing.block_panels(
        statistics, layers, TagStatistics, 3.0, 2.2, sharey=True
    )
    tags = [tag for tag in panels[0][1].tags if tag != PADDING_TAG]
    colors = dict(zip(tags, _colors(len(tags)), strict=True))
    colors[PADDING_TAG] = drawing.DROPPED
    handles = {}
    for ax, block in panels:
        (experts,) = np.nonzero(block.seated.any(axis=0))
        # (T, bars)
        everything = block.num_tokens / block.num_tokens.sum()
        shares = np.c_[block.share[:, experts], everything]
        places = np.arange(shares.shape[1])
        bottom = np.zeros(len(places))
        for tag, heights in zip(block.tags, shares, strict=True):
            bars = ax.bar(places, heights, 0.8, bottom, color=colors[tag], label=tag)
            handles.setdefault(tag, bars)
            bottom = bottom + heights
        parts = block.seated[:, experts].sum(axis=0) / block.num_tokens.sum()
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


def _colors(count):
    if count <= len(drawing.PALETTE):
        return drawing.PALETTE[:count]
    return drawing.shades(count)
