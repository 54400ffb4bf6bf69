"""Figures of trained models from which something was taken."""

import numpy as np

from keras_softmoe.analysis import drawing
from keras_softmoe.evaluation.pruning import PruningCurve
from keras_softmoe.types import Figure

# Accuracies lie between them.
_LIMITS = (0.0, 1.0)
# What random routers do, see `evaluation.random_routers`.
_CONTROL_NAMES = {"noise": "random", "permuted": "permuted"}
_LEVEL_COLOR = drawing.PALETTE[1]
_COLORS = (drawing.PALETTE[0], *drawing.PALETTE[2:])


def plot_random_routers(*ablations: tuple) -> Figure:
    """Show the accuracy with routers that choose at random beside the learned one.

    On the left one router at a time is random, on the right those of a block and all
    MoE blocks before it. Points are means over the seeds, error bars and the band
    around the learned accuracy reach one standard deviation up and down, but not below
    0 or above 100%.

    Args:
        *ablations: what `evaluation.random_routers` returns for a model, one for each
            `control`: its logits as noise, or permuted, or both.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if there is no ablation, or not the same blocks in all of them, or
            no block.

    Source: V-MoE, appendix E.1 (figures 27 and 28).

    Examples:
        >>> ablations = [
        ...     ksm.evaluation.random_routers(
        ...         sparse, (images, labels), seeds=1, control=control
        ...     )
        ...     for control in ("noise", "permuted")
        ... ]
        >>> figure = ksm.analysis.plot_random_routers(*ablations)
    """
    drawing.import_matplotlib()
    blocks = {tuple(a) for x in ablations for a in (x.single, x.cumulative)}
    if len(blocks) != 1 or () in blocks:
        raise ValueError(
            "Ablations must have accuracies of the same blocks, and of at least one, "
            "with a single router and with several at random. Received: "
            f"{len(ablations)} ablations"
            + "".join(
                f", single of the blocks {list(ablation.single)}, "
                f"cumulative of the blocks {list(ablation.cumulative)}"
                for ablation in ablations
            )
            + "."
        )
    (blocks,) = blocks
    names = [str(layer) for layer in blocks]
    figure = drawing.new_figure(max(5.6, 3.2 + 0.32 * len(names)), 3.1)
    axes = figure.subplots(1, 2, sharey=True)
    panels = (
        ("One router at random", "block of the router", "single", "none"),
        ("All routers up to a block at random", "last block", "cumulative", "-"),
    )
    learned = ablations[0].learned
    for ax, (title, label, field, line) in zip(axes, panels, strict=True):
        draw_level(ax, learned, label="all learned", color=_LEVEL_COLOR)
        for index, ablation in enumerate(ablations):
            shift = 0.1 * (index - (len(ablations) - 1) / 2)
            drawing.draw_seeds(
                ax,
                [place + shift for place in range(len(names))],
                getattr(ablation, field).values(),
                _LIMITS,
                ls=line,
                label=_CONTROL_NAMES.get(ablation.control, ablation.control),
                color=_COLORS[index % len(_COLORS)],
                marker=drawing.MARKERS[index % len(drawing.MARKERS)],
            )
        ax.set_title(title, fontsize=9)
        drawing.label_axes(ax, label)
        drawing.name_ticks(ax.xaxis, range(len(names)), names)
        ax.margins(x=0.5 / max(len(names) - 1, 1))
        drawing.plain_axes(ax)
    drawing.as_percentages(axes[0].yaxis)
    spread = " (± standard deviation)" if np.size(learned) > 1 else ""
    drawing.label_axes(axes[0], y=f"accuracy{spread}")
    axes[1].legend(fontsize=8)
    return figure


def plot_pruning(curves: PruningCurve | dict, metric: str = "metric") -> Figure:
    """Show what is left of a metric if a LIMoE keeps only its most used experts.

    One line for each way to prune, falling from all experts on the left to few on the
    right; the dashed line is the model that was not pruned. Error bars reach one
    standard deviation up and down where there are several values of a point, but not
    below 0 or above 1 if all values lie between.

    Args:
        curves: what `evaluation.pruning_curve` returns, or a dict from names to several
            such curves, in panels of their own: `{"text": ..., "image": ...}`.
        metric: str, what was measured.

    Returns:
        `matplotlib.figure.Figure`. All its panels share one scale.

    Raises:
        ValueError: if these are no such curves.

    Source: LIMoE, appendix E.4 (figure 14: both ways; figure 15: text and images).

    Examples:
        >>> def spread(encoder):
        ...     return float(encoder.encode_text(captions).std())
        >>> statistics = ksm.analysis.modality_statistics(limoe, captions=captions)
        >>> usage = {block: s.routed["text"] for block, s in statistics.items()}
        >>> curve = ksm.evaluation.pruning_curve(
        ...     limoe, usage, spread, num_experts=(4, 8)
        ... )
        >>> figure = ksm.analysis.plot_pruning(curve, "spread of text embeddings")
    """
    drawing.import_matplotlib()
    named = curves if isinstance(curves, dict) else {None: curves}
    if not named or not all(isinstance(c, PruningCurve) for c in named.values()):
        kinds = sorted({type(curve).__name__ for curve in named.values()})
        raise ValueError(
            "`curves` must be the `PruningCurve` that `evaluation.pruning_curve` "
            "returns, or a dict of such curves, not empty. Received: curves of type "
            f"{type(curves).__name__}, of {kinds}."
        )
    figure, axes = drawing.panel_grid(len(named), 3.6, 2.8, sharey=True)
    for ax, (name, curve) in zip(axes, named.items(), strict=True):
        limits = limits_of([curve.whole, *curve.values.values()])
        draw_level(ax, curve.whole, limits, label="not pruned", color=_LEVEL_COLOR)
        styles = drawing.line_styles(curve.values, _COLORS)
        for (method, values), style in zip(curve.values.items(), styles, strict=False):
            drawing.draw_seeds(
                ax, curve.num_experts, values, limits, label=method, **style
            )
        ax.set_xscale("log", base=2)
        ax.invert_xaxis()
        drawing.name_ticks(ax.xaxis, curve.num_experts, curve.num_experts)
        ax.minorticks_off()
        drawing.plain_axes(ax)
        if name is not None:
            ax.set_title(name, fontsize=9)
    axes[-1].legend(fontsize=8)
    drawing.label_axes(figure, "experts kept in each block")
    drawing.label_axes(axes[0], y=metric)
    return figure


def limits_of(scores):
    """Where scores can lie: from 0 to 1 if all do, as accuracies, else anywhere."""
    scores = np.concatenate([np.ravel(values) for values in scores])
    inside = scores.min() >= 0 and scores.max() <= 1
    return (0, 1) if inside else (-np.inf, np.inf)


def draw_level(ax, values, limits=_LIMITS, **style):
    """A dashed horizontal line at the mean, in the band of the seeds; returns it.

    Args:
        ax: Axes.
        values: `(seeds,)` numbers.
        limits: pair of floats, the least and the largest possible value.
        **style: label and color.
    """
    mean, spread = np.mean(values), drawing.spread_of(values)
    if spread:
        ends = np.clip([mean - spread, mean + spread], *limits)
        ax.axhspan(*ends, color=style["color"], alpha=0.15, lw=0)
    return ax.axhline(mean, ls="--", lw=1.0, zorder=1, **style)
