"""Figures of `ModalityStatistics`: queues for the experts, paths between them."""

import numpy as np

from keras_softmoe import drawing
from keras_softmoe.analysis._drawing import chosen_experts
from keras_softmoe.analysis._panels_modalities import modalities_of

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


def priorities(blocks, experts=None):
    """Draw the places of tokens in the queue for each expert.

    Args:
        blocks: list of `ModalityStatistics`.
        experts: sequence of experts to show. If `None` all, up to eight: those that
            most text tokens choose (patches, if there is no text).
    """
    experts = _shown_experts(blocks, experts)
    figure = drawing.new_figure(2.2 + 1.35 * len(experts), 0.6 + 1.25 * len(blocks))
    axes = figure.subplots(
        len(blocks), len(experts), squeeze=False, sharex="row", sharey=True
    )
    handles = {}
    for row, block in zip(axes, blocks, strict=True):
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
        drawing.label_axes(row[0], y=drawing.block_title(block.block))
    for ax, expert in zip(axes[0], experts, strict=True):
        ax.set_title(f"expert {expert}", fontsize=9)
    drawing.as_percentages(axes[0, 0].yaxis)
    drawing.label_axes(
        figure, "place in the queue", "groups with a token at this place"
    )
    drawing.legend_beside(figure, handles)
    return figure


def trajectories(blocks, least=0.02):
    """Draw the paths of tokens from the experts of one block to those of the next.

    Args:
        blocks: list of `ModalityStatistics`, of two blocks or more that follow each
            other.
        least: float, the share of the tokens of a modality from which on a path is
            shown.
    """
    matplotlib = drawing.import_matplotlib()
    _check_steps(blocks)
    sizes = [len(block.padding) for block in blocks]
    size = 2.4 + 1.5 * (len(blocks) - 1), 0.6 + 0.42 * max(sizes)
    figure = drawing.new_figure(*size)
    ax = figure.subplots()
    # Image first: there are more of its lines, and text would vanish below them.
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
    ax.set_xticks(
        range(len(blocks)), [drawing.block_title(block.block) for block in blocks]
    )
    ax.tick_params(labelsize=9, length=0, top=False, labeltop=True, labelbottom=False)
    ax.set(xlim=(-0.35, len(blocks) - 0.65), ylim=(max(sizes) - 0.4, -0.6), yticks=[])
    ax.spines[:].set_visible(False)
    return figure


# === Queues ===


def _shown_experts(blocks, experts):
    count = max(len(block.padding) for block in blocks)
    if experts is not None or count <= _MOST_EXPERTS:
        return chosen_experts(experts, count)
    name = modalities_of(blocks)[0]
    chosen = np.zeros(count)
    for block in blocks:
        chosen[: len(block.padding)] += block.routed[name] / block.num_tokens[name]
    return sorted(np.argsort(-chosen, kind="stable")[:_MOST_EXPERTS].tolist())


def _queue_length(counts):
    """Return the number of bins `(E, bins)` up to the last that is taken."""
    taken = np.flatnonzero(counts.any(axis=0))
    return taken[-1] + 1 if len(taken) else 1


def _draw_queue(ax, block, expert):
    """Draw the queue for an expert; return handles for the legend."""
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
    *others, _ = blocks
    if not others or any(block.transitions is None for block in others):
        raise ValueError(
            "Trajectories lead from one MoE block to the next: choose two blocks or "
            "more, in their order. "
            f"Received: statistics of the blocks {[b.block for b in blocks]}."
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
