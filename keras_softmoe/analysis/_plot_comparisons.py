"""Figures that compare trained models: by a threshold, a width or a learning rate."""

import numpy as np

from keras_softmoe.analysis import drawing
from keras_softmoe.analysis._by_modality import ModalityStatistics
from keras_softmoe.analysis._peaks import PeakSweep
from keras_softmoe.analysis._plot_ablations import limits_of
from keras_softmoe.types import Figure

_THRESHOLD = "experts asked for, S = exp(threshold for text)"
_MODES = {True: "normalized", False: "not normalized"}
_MODE_STYLES = dict(zip(_MODES, drawing.line_styles(_MODES.values()), strict=True))
# Numbers that are so many times as large as the smallest stand on a logarithmic axis.
_WIDE_RANGE = 5
_MOST_THRESHOLDS = 10


def plot_experts_in_use(by_threshold: dict, share: float = 0.9) -> Figure:
    """Show how many experts text and images use, against the threshold for text.

    Points are means over the MoE blocks and over seeds, error bars reach one standard
    deviation over seeds up and down. On the dashed line as many experts are in use as
    the threshold asks for.

    Args:
        by_threshold: dict from the threshold for text, as the soft minimum of experts
            `S = exp(threshold)`, to what `analysis.modality_statistics` returns for a
            model that was trained with it; or to a list of those, one for each seed; or
            to a dict from `"text"` and `"image"` to the experts in use, a number or
            one for each seed.
        share: float in `(0, 1]`. An expert is in use if it is among the fewest that
            serve this share of the tokens of a modality.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if these are not thresholds and statistics or numbers, or `share` is
            not a part of the tokens.

    Source: LIMoE, appendix B.2 (figure 10).

    Examples:
        >>> found = ksm.analysis.modality_statistics(limoe, scenes, captions)
        >>> statistics = {4: [found], 9: [found]}  # soft minimum of experts: its models
        >>> figure = ksm.analysis.plot_experts_in_use(statistics)
    """
    drawing.import_matplotlib()
    points = _points(by_threshold, lambda block: block.experts_needed(share), True)
    figure = drawing.new_figure(5.0, 3.2)
    ax = figure.subplots()
    handles = _draw_modalities(ax, points)
    handles["as many as\nasked for"] = _draw_target(ax, points, lambda s: s)
    ax.set_ylim(bottom=0)
    drawing.label_axes(ax, _THRESHOLD, f"experts that serve {100 * share:g}%")
    drawing.legend_beside(figure, handles)
    return figure


def plot_routing_entropy(by_threshold: dict) -> Figure:
    """Show how evenly text and images are routed, against the threshold for text.

    To the left the entropy of the mean routing probabilities, which is what the loss
    holds over the threshold; to the right that of the tokens that the experts process,
    after choices were made and tokens dropped. Points are means over the MoE blocks and
    over seeds, error bars reach one standard deviation over seeds up and down. The
    dashed line is the threshold.

    Args:
        by_threshold: as in `plot_experts_in_use`, with statistics.

    Returns:
        `matplotlib.figure.Figure`. Both panels share their axes.

    Raises:
        ValueError: if these are not thresholds and statistics.

    Source: LIMoE, appendix B.2 (figure 9).

    Examples:
        >>> found = ksm.analysis.modality_statistics(limoe, scenes, captions)
        >>> figure = ksm.analysis.plot_routing_entropy({4: [found], 9: [found]})
    """
    drawing.import_matplotlib()
    measures = {
        "router": lambda block: block.entropy,
        "after dispatch": lambda block: block.dispatch_entropy,
    }
    found = {
        title: _points(by_threshold, measure) for title, measure in measures.items()
    }
    figure = drawing.new_figure(7.4, 3.2)
    axes = figure.subplots(1, len(found), sharex=True, sharey=True)
    for ax, (title, points) in zip(axes, found.items(), strict=True):
        handles = _draw_modalities(ax, points)
        handles["threshold"] = _draw_target(ax, points, np.log)
        ax.set_title(title, fontsize=9)
    axes[0].set_ylim(bottom=0)
    drawing.label_axes(axes[0], y="entropy of routing, in nats")
    drawing.label_axes(figure, _THRESHOLD)
    drawing.legend_beside(figure, handles)
    return figure


def plot_peaks(
    sweep: PeakSweep, x: str = "width of the model", score: str = "score"
) -> Figure:
    """Show the largest dispatch and combine weights, with and without normalization.

    Beside each other: the mean over slots of the largest dispatch weight, the mean over
    tokens of the largest combine weight, and the scores, if there are any. Thick lines
    are means over the blocks and seeds, with error bars of one standard deviation over
    seeds (not below 0 or above 1 of weights, nor of scores that all lie between); thin
    lines are single blocks. At 100% the softmax has collapsed to a one-hot vector.

    Args:
        sweep: what `analysis.peak_sweep` returns.
        x: str, what the numbers along the axis are.
        score: str, what the scores are.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if it is not a `PeakSweep`.

    Source: Soft MoE, appendix E (figures 13 and 14).

    Examples:
        >>> def untrained(width, normalize, seed):
        ...     router = ksm.routers.SoftRouter(4, normalize=normalize)
        ...     return ksm.models.ViTMoEBackbone(
        ...         (32, 32, 3),
        ...         16,
        ...         num_layers=1,
        ...         num_heads=2,
        ...         hidden_dim=width,
        ...         mlp_dim=width,
        ...         moe_layers=(0,),
        ...         router=router,
        ...     )
        >>> sweep = ksm.analysis.peak_sweep(
        ...     untrained, (8, 16), images / 127.5 - 1, seeds=1
        ... )
        >>> figure = ksm.analysis.plot_peaks(sweep)
    """
    drawing.import_matplotlib()
    drawing.check_kind("sweep", sweep, PeakSweep)
    panels = {
        "largest dispatch weight\nof a slot": sweep.dispatch,
        "largest combine weight\nof a token": sweep.combine,
    }
    figure = drawing.new_figure(7.4 + 2.3 * (sweep.scores is not None), 2.9)
    axes = figure.subplots(1, len(panels) + (sweep.scores is not None))
    for ax, (title, peaks) in zip(axes, panels.items(), strict=False):
        handles = _draw_modes(ax, sweep, peaks, limits=(0, 1))
        ax.set_title(title, fontsize=9)
        ax.set_ylim(0, 1.03 * max(peaks.max(), 0.1))
        drawing.as_percentages(ax.yaxis)
    if sweep.scores is not None:
        limits = limits_of(sweep.scores)
        _draw_modes(axes[-1], sweep, sweep.scores[..., None], limits=limits)
        axes[-1].set_title(score, fontsize=9)
    for ax in axes:
        _number_axis(ax, sweep.values)
        drawing.plain_axes(ax, 7.5)
    drawing.label_axes(figure, x)
    drawing.legend_beside(figure, handles)
    return figure


# === Thresholds ===


def _points(by_threshold, measure, or_numbers=False):
    """Dict from threshold to a dict from modality to a number for each seed."""
    known = isinstance(by_threshold, dict) and by_threshold
    if not known or not all(drawing.is_number(s) and s >= 1 for s in by_threshold):
        raise ValueError(
            "`by_threshold` must be a dict from soft minima of experts, 1 or more, to "
            f"statistics, not empty. Received: by_threshold={by_threshold!r:.200}."
        )
    points = {}
    for threshold in sorted(by_threshold):
        value = by_threshold[threshold]
        is_dict = isinstance(value, dict) and value
        if or_numbers and is_dict and set(value) <= set(drawing.MODALITY_COLORS):
            points[threshold] = {n: np.atleast_1d(x) for n, x in value.items()}
        else:
            points[threshold] = _by_seed(value, measure)
    return points


def _by_seed(value, measure):
    seeds = value if isinstance(value, list | tuple) else [value]
    found = {}
    for statistics in seeds or [None]:
        drawing.check_statistics(statistics, ModalityStatistics)
        blocks = [measure(block) for block in statistics.values()]
        for name in blocks[0]:
            mean = np.mean([block[name] for block in blocks])
            found.setdefault(name, []).append(mean)
    return found


def _draw_modalities(ax, points):
    """Draw a line for each modality; returns handles for the legend."""
    handles = {}
    for name, style in drawing.MODALITY_STYLES.items():
        line = {s: found[name] for s, found in points.items() if name in found}
        if line:
            values = line.values()
            handles[name] = drawing.draw_seeds(
                ax, list(line), values, (0, np.inf), **style
            )
    drawing.plain_axes(ax)
    return handles


def _draw_target(ax, thresholds, target):
    """Number the thresholds and draw what they ask for; returns the line."""
    ordered = list(thresholds)
    drawing.name_ticks(ax.xaxis, ordered, [f"{s:g}" for s in ordered], _MOST_THRESHOLDS)
    along = np.linspace(ordered[0], ordered[-1])
    (line,) = ax.plot(along, target(along), color="0.35", ls="--", lw=1, zorder=1)
    return line


# === Peaks ===


def _draw_modes(ax, sweep, found, **kwargs):
    """Draw a line for each mode of `(M, V, R, L)` numbers; returns handles."""
    handles = {}
    order = np.argsort(sweep.values)
    places = sweep.values[order]
    for mode, numbers in zip(sweep.normalize.tolist(), found, strict=True):
        # (V, R, L)
        numbers, style = numbers[order], _MODE_STYLES[mode]
        if numbers.shape[-1] > 1:
            by_block = numbers.mean(axis=1)
            ax.plot(places, by_block, color=style["color"], lw=0.7, alpha=0.4)
        by_seed = numbers.mean(axis=2)
        line = drawing.draw_seeds(ax, places, by_seed, **style, **kwargs)
        handles[_MODES[mode]] = line
    return handles


def _number_axis(ax, values):
    values = np.sort(values)
    if values[0] > 0 and values[-1] > _WIDE_RANGE * values[0]:
        ax.set_xscale("log")
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
