"""Figures of `ModalityStatistics`: load, confidence, coverage, words and paths."""

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis.streaming import PADDING_TAG

_PADDING_COLOR = drawing.PALETTE[4]
_MOST_EXPERT_TICKS = 8
# A capacity that is so many times the highest bar, or the longest queue, is not drawn.
_FARTHEST = 2.0
# Half the distance of two blocks, nearly.
_HALF_WIDTH = 0.44
# So many experts have room side by side.
_MOST_EXPERTS = 8
# Width in points of a path for all tokens of a modality, and of the widest path.
_FULL_WIDTH = 22.0
_WIDEST = 8.0
_ALPHA = 0.6


def modality_load(blocks):
    """Draw the tokens of images and text that choose each expert."""
    matplotlib = drawing.import_matplotlib()
    figure, panels = drawing.block_panels(blocks, 2.7, 2.0, sharey=True)
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
            above = {"transform": ax.transAxes, "ha": "right", "va": "top"}
            ax.text(0.98, 0.97, f"capacity {block.slots:,} ↑", fontsize=7, **above)
        experts = range(len(block.padding))
        drawing.name_ticks(ax.xaxis, experts, experts, _MOST_EXPERT_TICKS)
        drawing.plain_axes(ax, 7)
    figure.axes[0].yaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
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
            style = {"fill": True, "alpha": 0.3, "lw": 0, "orientation": "horizontal"}
            style |= {"color": drawing.MODALITY_COLORS[name], "baseline": place}
            ax.stairs(place + side * histogram / histogram.max(), edges, **style)
    for name in modalities_of(blocks):
        shift = {"text": -0.04, "image": 0.04}[name]
        means = [block.confidence_mean[name] for block in blocks]
        spreads = [block.confidence_std[name] for block in blocks]
        style = {"label": name, **drawing.MODALITY_STYLES[name]}
        drawing.draw_means(ax, places + shift, means, spreads, (0, 1), **style)
    even = [1 / len(block.padding) for block in blocks]
    style = {"colors": "0.3", "ls": ":", "lw": 1, "label": "1/E"}
    ax.hlines(even, places - 0.5, places + 0.5, **style)
    ax.set(xlim=(-0.5, len(blocks) - 0.5), ylim=(0, 1.04))
    ax.set_xticks(places, [drawing.block_title(block.block) for block in blocks])
    drawing.plain_axes(ax)
    drawing.as_percentages(ax.yaxis)
    drawing.label_axes(ax, y="largest routing probability")
    drawing.legend_beside(figure, drawing.labelled(ax))
    return figure


def coverage(blocks, share=0.9):
    """Draw the share of tokens whose first choice is among the most used experts.

    The legend has the number of experts for `share`, a float in `(0, 1]`.
    """
    modalities = modalities_of(blocks)
    # Shades, since distinct colours denote modalities.
    styles = drawing.line_styles([], drawing.shades(len(blocks)))
    shared = {"sharex": True, "sharey": True}
    figure, axes = drawing.panel_grid(len(modalities), 3.6, 2.8, **shared)
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
        style = {"fontsize": 7, "title_fontsize": 7, "loc": "lower right"}
        ax.legend(title=f"experts for {100 * share:g}%", **style)
        drawing.plain_axes(ax)
    axes[0].set(xlim=(0, most + 0.3), ylim=(0, 1.03))
    drawing.as_percentages(axes[0].yaxis)
    drawing.label_axes(axes[0], y="tokens whose first choice is kept")
    drawing.label_axes(figure, "experts kept")
    return figure


def words(blocks):
    """Draw the kinds of words of which the text of each expert consists."""
    figure, panels = drawing.block_panels(blocks, 3.0, 2.2, sharey=True)
    tags = [tag for tag in blocks[0].words.tags if tag != PADDING_TAG]
    colors = dict(zip(tags, drawing.line_colors(tags), strict=True))
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


def priorities(blocks, experts=None):
    """Draw the places of tokens in the queue for each expert.

    `experts` defaults to the eight that most text tokens (or patches alone) choose.
    """
    count = max(len(block.padding) for block in blocks)
    if experts is None and count > _MOST_EXPERTS:
        name = modalities_of(blocks)[0]
        chosen = np.zeros(count)
        for block in blocks:
            chosen[: len(block.padding)] += block.routed[name] / block.num_tokens[name]
        experts = sorted(np.argsort(-chosen, kind="stable")[:_MOST_EXPERTS].tolist())
    experts = drawing.chosen_experts(experts, count)
    figure = drawing.new_figure(2.2 + 1.35 * len(experts), 0.6 + 1.25 * len(blocks))
    shape = len(blocks), len(experts)
    axes = figure.subplots(*shape, squeeze=False, sharex="row", sharey=True)
    handles = {}
    for row, block in zip(axes, blocks, strict=True):
        # Up to the last bin that is taken.
        taken = sum(counts.sum(axis=0) for counts in block.queue.values())
        longest = block.queue_step * (np.flatnonzero(taken).max(initial=0) + 1)
        with_capacity = block.capacity <= _FARTHEST * longest
        for ax, expert in zip(row, experts, strict=True):
            if expert >= len(block.padding):
                ax.set_axis_off()
                continue
            below = 0.0
            for name in modalities_of(blocks):
                counts = block.queue[name][expert]
                share = counts / (block.num_groups * block.queue_step)
                edges = np.arange(len(counts) + 1) * block.queue_step
                style = {"fill": True, "lw": 0, "baseline": below}
                style["color"] = drawing.MODALITY_COLORS[name]
                handles[name] = ax.stairs(below + share, edges, **style)
                below = below + share
            if with_capacity:
                line = ax.axvline(block.capacity, color="black", ls="--", lw=1)
                handles["capacity"] = line
            drawing.plain_axes(ax, 7)
            drawing.whole_ticks(ax.xaxis, 3)
        end = max(longest, block.capacity) if with_capacity else longest
        row[0].set(xlim=(0, 1.05 * end), ylim=(0, 1.03))
        drawing.label_axes(row[0], y=drawing.block_title(block.block))
    for ax, expert in zip(axes[0], experts, strict=True):
        ax.set_title(f"expert {expert}", fontsize=9)
    drawing.as_percentages(axes[0, 0].yaxis)
    with_token = "groups with a token at this place"
    drawing.label_axes(figure, "place in the queue", with_token)
    drawing.legend_beside(figure, handles)
    return figure


def trajectories(blocks, least=0.02):
    """Draw the paths of tokens from the experts of one block to those of the next.

    `least` is the smallest share of the tokens of a modality that is shown.
    """
    matplotlib = drawing.import_matplotlib()
    if len(blocks) < 2 or any(block.transitions is None for block in blocks[:-1]):
        raise ValueError(
            "Trajectories need two blocks or more, in their order. "
            f"Received: the blocks {[b.block for b in blocks]}."
        )
    sizes = [len(block.padding) for block in blocks]
    size = 2.4 + 1.5 * (len(blocks) - 1), 0.6 + 0.42 * max(sizes)
    figure = drawing.new_figure(*size)
    ax = figure.subplots()
    # Image first: its many lines would hide those of text.
    drawn = modalities_of(blocks)[::-1]
    # (E, E) for each step and modality
    shares = {
        (column, name): block.transitions[name] / block.num_tokens[name]
        for column, block in enumerate(blocks[:-1])
        for name in drawn
    }
    most = max(share.max() for share in shares.values())
    full_width = min(_FULL_WIDTH, _WIDEST / most)
    reached = set()
    for (column, name), share in shares.items():
        shift = {"text": -0.1, "image": 0.1}[name] * (len(drawn) - 1)
        for here, there in np.argwhere(share >= least):
            start, end = here + shift, there + shift
            # A Bézier curve with two points between its ends.
            middle = column + 0.5
            points = [
                (column, start),
                (middle, start),
                (middle, end),
                (column + 1, end),
            ]
            path = matplotlib.path.Path(points, [1, 4, 4, 4])
            style = {"fill": False, "alpha": _ALPHA, "capstyle": "butt"}
            style["color"] = drawing.MODALITY_COLORS[name]
            style["lw"] = full_width * share[here, there]
            ax.add_patch(matplotlib.patches.PathPatch(path, **style))
            reached |= {(column, int(here)), (column + 1, int(there))}
    for column, expert in ((c, e) for c, size in enumerate(sizes) for e in range(size)):
        is_reached = (column, expert) in reached
        box = {"boxstyle": "circle,pad=0.3", "facecolor": "white", "lw": 0.8}
        box["edgecolor"] = "0.2" if is_reached else "0.8"
        style = {"ha": "center", "va": "center_baseline", "fontsize": 8, "bbox": box}
        style["color"] = "black" if is_reached else "0.7"
        ax.text(column, expert, str(expert), **style)
    lines = {name: (drawing.MODALITY_COLORS[name], 3) for name in reversed(drawn)}
    lines |= {
        f"{100 * share:g}% of text\nor of patches": ("0.5", full_width * share)
        for share in (0.05, 0.2)
    }
    handles = {
        label: matplotlib.lines.Line2D([], [], color=color, lw=width, alpha=_ALPHA)
        for label, (color, width) in lines.items()
    }
    drawing.legend_beside(figure, handles)
    titles = [drawing.block_title(block.block) for block in blocks]
    ax.set_xticks(range(len(blocks)), titles)
    ax.tick_params(labelsize=9, length=0, top=False, labeltop=True, labelbottom=False)
    ax.set(xlim=(-0.35, len(blocks) - 0.65), ylim=(max(sizes) - 0.4, -0.6), yticks=[])
    ax.spines[:].set_visible(False)
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
    for name in modalities_of([block]):
        style = {"fc": "white", "ec": colors[name], "hatch": "/////", "lw": 0.4}
        yield f"{name}, dropped", block.chosen[name] - block.assigned[name], style
