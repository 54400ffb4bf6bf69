"""Pictures of how alike the slots of a Soft MoE are."""

import numpy as np

from keras_softmoe.evaluation.slots import SlotCorrelation
from keras_softmoe.visualization.drawing import (
    block_panels,
    block_title,
    chosen_blocks,
    import_matplotlib,
)

# Up to this many experts have lines between them.
_MOST_LINES = 40
_MOST_TICKS = 8


def plot_slot_correlation(correlations, layers=None):
    """Show the inner products of the normalized slot parameters.

    One panel for each block: each slot against each, red where they point in the same
    direction, blue where in opposite ones. The slots of one expert follow each other:
    squares along the diagonal are experts whose slots are aligned. Titles give the
    means within experts and between them.

    Args:
        correlations: what `evaluation.slot_correlation` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`. All its panels share one scale, from -1 to 1.

    Raises:
        ValueError: if these are not correlations of these blocks.
        ImportError: if matplotlib is missing.

    Source: Soft MoE, appendix I (figures 28 to 30).

    Example:

    >>> correlation = ksm.evaluation.slot_correlation(classifier)
    >>> figure = ksm.visualization.plot_slot_correlation(correlation)
    """
    matplotlib = import_matplotlib()
    blocks = chosen_blocks(correlations, layers, SlotCorrelation)
    figure, axes = block_panels(matplotlib, blocks, 2.6, 2.4)
    for ax, (layer, block) in zip(axes, blocks.items(), strict=True):
        drawn = ax.imshow(
            block.cosine, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest"
        )
        ax.set_title(f"{block_title(layer)}\n{_means(block)}", fontsize=8)
        experts, slots = block.num_experts, block.slots_per_expert
        if 1 < slots and experts <= _MOST_LINES:
            edges = np.arange(1, experts) * slots - 0.5
            style = {"color": "black", "lw": 0.3, "alpha": 0.5}
            ends = (-0.5, experts * slots - 0.5)
            ax.hlines(edges, *ends, **style)
            ax.vlines(edges, *ends, **style)
        # In the middle of its slots.
        shown = np.arange(0, experts, -(-experts // _MOST_TICKS))
        places = shown * slots + (slots - 1) / 2
        ax.set_xticks(places, shown, fontsize=7)
        ax.set_yticks(places, shown, fontsize=7)
    figure.supxlabel("expert (one row and column for each of its slots)", fontsize=9)
    figure.supylabel("expert", fontsize=9)
    bar = figure.colorbar(drawn, ax=axes, aspect=30, pad=0.02)
    bar.set_label("cosine of slot parameters", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def _means(block):
    parts = []
    if block.slots_per_expert > 1:
        parts.append(f"within experts {_rounded(block.within)}")
    if block.num_experts > 1:
        parts.append(f"between {_rounded(block.between)}")
    return ", ".join(parts)


def _rounded(cosine):
    # Without the sign of a zero.
    return f"{round(cosine, 2) + 0.0:.2f}"
