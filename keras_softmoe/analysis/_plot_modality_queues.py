"""Figures of the paths of tokens: queues for the experts, from expert to expert."""

from collections.abc import Sequence

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis._by_modality import ModalityStatistics
from keras_softmoe.types import Figure

# So many experts have room side by side.
_MOST_EXPERTS = 8
# A capacity that is so many times the longest queue would leave no room for it.
_FARTHEST = 2.0
# Width in points of a line for all tokens of a modality, unless the widest line would
# then be wider than the second number.
_FULL_WIDTH = 22.0
_WIDEST = 8.0
_ALPHA = 0.6
# Radius of an expert, in units of the distance of two experts.
_RADIUS = 0.3


def plot_priorities(
    statistics: dict, layers: Sequence | None = None, experts: Sequence | None = None
) -> Figure:
    """Show in which order the tokens of images and text queue for each expert.

    One row for each MoE block, one panel for each expert: along the axis the places in
    its queue in one group of pairs, first the tokens of the highest priority, upwards
    how often there is a token of text or of an image at that place, over all groups.
    Tokens beyond the dashed line, the capacity, are dropped.

    If text came first in every queue, the two colours would not mix: all of the text
    would stand to the left.

    Args:
        statistics: what `analysis.modality_statistics` returns.
        layers: sequence of blocks to show. All of them if `None`.
        experts: sequence of experts to show. If `None` all, up to eight: those that
            most text tokens choose (patches, if there is no text).

    Returns:
        `matplotlib.figure.Figure`. The panels of a row share their axes.

    Raises:
        ValueError: if these are not statistics of these blocks, or an expert does not
            exist.

    Source: LIMoE, appendix F.5 (figures 32 to 37).

    Examples:
        >>> statistics = ksm.analysis.modality_statistics(limoe, scenes, captions)
        >>> figure = ksm.analysis.plot_priorities(statistics)
    """
    blocks = drawing.chosen_blocks(statistics, layers, ModalityStatistics)
    experts = _shown_experts(blocks, experts)
    figure = drawing.new_figure(2.2 + 1.35 * len(experts), 0.6 + 1.25 * len(blocks))
    axes = figure.subplots(
        len(blocks), len(experts), squeeze=False, sharex="row", sharey=True
    )
    handles = {}
    for row, (layer, block) in zip(axes, blocks.items(), strict=True):
        longest = max(_queue_length(queue) for queue in block.queue.values())
        longest *= block.queue_step
        for ax, expert in zip(row, experts, strict=True):
            if expert >= len(block.padding):
                ax.set_axis_off()
                continue
            handles |= _draw_queue(ax, block, expert)
            if block.capacity <= _FARTHEST * longest:
                line = ax.axvline(block.capacity, color="black", ls="--", lw=1)
                handles["capacity"] = line
            drawing.plain_axes(ax, 7)
            drawing.whole_ticks(ax.xaxis, 3)
        if block.capacity <= _FARTHEST * longest:
            longest = max(longest, block.capacity)
        row[0].set(xlim=(0, 1.05 * longest), ylim=(0, 1.03))
        drawing.label_axes(row[0], y=drawing.block_title(layer))
    for ax, expert in zip(axes[0], experts, strict=True):
        ax.set_title(f"expert {expert}", fontsize=9)
    drawing.as_percentages(axes[0, 0].yaxis)
    drawing.label_axes(
        figure, "place in the queue", "groups with a token at this place"
    )
    drawing.legend_beside(figure, handles)
    return figure


def plot_trajectories(statistics: dict, least: float = 0.02) -> Figure:
    """Show the paths of tokens of images and text through the experts.

    One column for each MoE block, with its experts from top to bottom. A line from one
    expert to another of the next block is as wide as the share of the tokens of its
    modality that go there, by their first choices. So lines of text and of images can
    be compared, though there are fewer tokens of text. An expert that no line leads to
    is grey.

    Args:
        statistics: what `analysis.modality_statistics` returns, of two blocks or
            more.
        least: float, the share of the tokens of a modality from which on a path is
            shown.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not statistics of two blocks or more, that follow each
            other.

    Source: LIMoE, appendix F.4 (figures 30 and 31).

    Examples:
        >>> statistics = ksm.analysis.modality_statistics(limoe, scenes, captions)
        >>> figure = ksm.analysis.plot_trajectories(statistics)
    """
    matplotlib = drawing.import_matplotlib()
    blocks = drawing.chosen_blocks(statistics, None, ModalityStatistics)
    _check_steps(blocks)
    sizes = [len(block.padding) for block in blocks.values()]
    size = 2.4 + 1.5 * (len(blocks) - 1), 0.6 + 0.42 * max(sizes)
    figure = drawing.new_figure(*size)
    ax = figure.subplots()
    # Image first: there are more of its lines, and text would vanish below them.
    drawn = drawing.modalities_of(blocks)[::-1]
    # (E, E) for each step and modality
    shares = {
        (column, name): block.transitions[name] / block.num_tokens[name]
        for column, block in enumerate(list(blocks.values())[:-1])
        for name in drawn
    }
    most = max(share.max() for share in shares.values())
    full_width = min(_FULL_WIDTH, _WIDEST / most)
    reached = set()
    for (column, name), share in shares.items():
        shift = {"text": -0.1, "image": 0.1}[name] * (len(drawn) - 1)
        for here, there in np.argwhere(share >= least):
            _draw_path(
                ax,
                (column, here + shift),
                (column + 1, there + shift),
                color=drawing.MODALITY_COLORS[name],
                lw=full_width * share[here, there],
            )
            reached |= {(column, int(here)), (column + 1, int(there))}
    for column, size in enumerate(sizes):
        for expert in range(size):
            _draw_expert(ax, column, expert, (column, expert) in reached)
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
    ax.set_xticks(range(len(blocks)), [drawing.block_title(layer) for layer in blocks])
    ax.tick_params(labelsize=9, length=0, top=False, labeltop=True, labelbottom=False)
    ax.set(xlim=(-0.35, len(blocks) - 0.65), ylim=(max(sizes) - 0.4, -0.6), yticks=[])
    ax.spines[:].set_visible(False)
    return figure


# === Queues ===


def _shown_experts(blocks, experts):
    count = max(len(block.padding) for block in blocks.values())
    if experts is not None or count <= _MOST_EXPERTS:
        return drawing.chosen_experts(experts, count)
    name = drawing.modalities_of(blocks)[0]
    chosen = np.zeros(count)
    for block in blocks.values():
        chosen[: len(block.padding)] += block.routed[name] / block.num_tokens[name]
    return sorted(np.argsort(-chosen, kind="stable")[:_MOST_EXPERTS].tolist())


def _queue_length(counts):
    """Bins `(E, bins)` up to the last that is taken."""
    taken = np.flatnonzero(counts.any(axis=0))
    return taken[-1] + 1 if len(taken) else 1


def _draw_queue(ax, block, expert):
    """Draw the queue for an expert; returns handles for the legend."""
    handles, below = {}, 0.0
    for name, color in drawing.MODALITY_COLORS.items():
        if name not in block.queue:
            continue
        counts = block.queue[name][expert]
        share = counts / (block.num_groups * block.queue_step)
        edges = np.arange(len(counts) + 1) * block.queue_step
        handles[name] = ax.stairs(
            below + share, edges, baseline=below, fill=True, color=color, lw=0
        )
        below = below + share
    return handles


# === Paths ===


def _check_steps(blocks):
    *others, _ = blocks.values()
    if not others or any(block.transitions is None for block in others):
        raise ValueError(
            "Trajectories lead from one MoE block to the next: pass the statistics of "
            "two blocks or more, as they come from `analysis.modality_statistics`. "
            f"Received: statistics of the blocks {list(blocks)}."
        )


def _draw_path(ax, start, end, **style):
    matplotlib = drawing.import_matplotlib()
    (left, top), (right, bottom) = start, end
    middle = (left + right) / 2
    # A curve of Bézier with two points between its ends.
    path = matplotlib.path.Path(
        [start, (middle, top), (middle, bottom), end], [1, 4, 4, 4]
    )
    style = {"fill": False, "alpha": _ALPHA, "capstyle": "butt", **style}
    ax.add_patch(matplotlib.patches.PathPatch(path, **style))


def _draw_expert(ax, column, expert, is_reached):
    ax.text(
        *(column, expert, str(expert)),
        ha="center",
        va="center_baseline",
        fontsize=8,
        color="black" if is_reached else "0.7",
        bbox={
            "boxstyle": f"circle,pad={_RADIUS}",
            "facecolor": "white",
            "edgecolor": "0.2" if is_reached else "0.8",
            "lw": 0.8,
        },
    )
