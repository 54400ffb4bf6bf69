"""Pictures of how much the experts of any model have to do."""

import numpy as np

from keras_softmoe.evaluation.load import ExpertLoad
from keras_softmoe.visualization.drawing import (
    PALETTE,
    block_panels,
    block_title,
    chosen_blocks,
    import_matplotlib,
    plain_axes,
)


def plot_expert_load(loads, layers=None):
    """Show how much each expert has to do, and how many tokens none of them takes.

    One panel for each MoE block, one bar for each expert: the tokens that it takes (of
    a router that mixes tokens: the sum of its combine weights), over an even share,
    which is the dashed line.

    Args:
        loads: what `evaluation.expert_load` returns.
        layers: sequence of blocks to show. All of them if `None`.

    Returns:
        `matplotlib.figure.Figure`. All its panels share their vertical axis.

    Raises:
        ValueError: if these are not loads of these blocks.
        ImportError: if matplotlib is missing.

    Source: V-MoE, section 5; Soft MoE, appendices B and H.

    Example:

    >>> figure = ksm.visualization.plot_expert_load(
    ...     ksm.evaluation.expert_load(model, images)
    ... )
    """
    matplotlib = import_matplotlib()
    blocks = chosen_blocks(loads, layers, ExpertLoad)
    figure, axes = block_panels(matplotlib, blocks, 2.3, 2.0, sharey=True)
    for ax, (layer, block) in zip(axes, blocks.items(), strict=True):
        # Of experts that take nothing at all, zeros.
        relative = block.load / max(block.load.mean(), np.finfo("float32").tiny)
        ax.bar(np.arange(len(relative)), relative, width=0.85, color=PALETTE[0])
        ax.axhline(1.0, color="black", ls="--", lw=1.0)
        title = f"{block_title(layer)}\ndropped {100 * block.dropped:.3g}% of tokens"
        ax.set_title(title, fontsize=8)
        ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))
        plain_axes(ax, 7)
    axes[0].yaxis.set_major_formatter(
        matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:.3g}×")
    )
    figure.supxlabel("expert", fontsize=9)
    figure.supylabel("load, in even shares", fontsize=9)
    return figure
