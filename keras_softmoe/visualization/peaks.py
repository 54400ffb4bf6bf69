"""Pictures of routing weights that come near to one-hot vectors."""

import numpy as np

from keras_softmoe.evaluation.peaks import PeakSweep
from keras_softmoe.visualization.drawing import (
    MARKERS,
    PALETTE,
    as_percentages,
    import_matplotlib,
    legend_beside,
    new_figure,
    plain_axes,
    spread_of,
)

_NAMES = {True: "normalized", False: "not normalized"}
_COLORS = {True: PALETTE[0], False: PALETTE[1]}
# Numbers that are so many times as large as the smallest stand on a logarithmic axis.
_WIDE_RANGE = 5


def plot_peaks(sweep, x="width of the model", score="score"):
    """Show the largest dispatch and combine weights, with and without normalization.

    Beside each other: the mean over slots of the largest dispatch weight, the mean over
    tokens of the largest combine weight, and the scores, if there are any. Thick lines
    are means over the blocks and seeds, with error bars of one standard deviation over
    seeds; thin lines are single blocks. At 100% the softmax has collapsed to a one-hot
    vector.

    Args:
        sweep: `evaluation.PeakSweep`.
        x: str, what the numbers along the axis are.
        score: str, what the scores are.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if it is not a `PeakSweep`.
        ImportError: if matplotlib is missing.

    Source: Soft MoE, appendix E (figures 13 and 14).

    Example:

    >>> sweep = ksm.evaluation.peak_sweep(trained, (64, 256, 1024), images)
    >>> figure = ksm.visualization.plot_peaks(sweep)
    """
    matplotlib = import_matplotlib()
    if not isinstance(sweep, PeakSweep):
        raise ValueError(
            "`sweep` must be the `PeakSweep` that `evaluation.peak_sweep` returns. "
            f"Received: sweep of type {type(sweep).__name__}."
        )
    panels = {
        "largest dispatch weight\nof a slot": sweep.dispatch,
        "largest combine weight\nof a token": sweep.combine,
    }
    figure = new_figure(matplotlib, 7.4 + 2.3 * (sweep.scores is not None), 2.9)
    axes = figure.subplots(1, len(panels) + (sweep.scores is not None))
    for ax, (title, peaks) in zip(axes, panels.items(), strict=False):
        handles = _draw_lines(ax, sweep, peaks)
        ax.set_title(title, fontsize=9)
        ax.set_ylim(0, 1.03 * max(peaks.max(), 0.1))
        as_percentages(matplotlib, ax.yaxis)
    if sweep.scores is not None:
        _draw_lines(axes[-1], sweep, sweep.scores[..., None])
        axes[-1].set_title(score, fontsize=9)
    for ax in axes:
        _number_axis(ax, sweep.values)
        plain_axes(ax, 7.5)
    figure.supxlabel(x, fontsize=9)
    legend_beside(figure, handles)
    return figure


def _draw_lines(ax, sweep, found):
    """Draw `(M, V, R, L)` numbers; returns handles for the legend."""
    handles = {}
    order = np.argsort(sweep.values)
    places = sweep.values[order]
    for index, (mode, numbers) in enumerate(zip(sweep.normalize, found, strict=True)):
        # (V, R, L)
        numbers, color = numbers[order], _COLORS[bool(mode)]
        if numbers.shape[-1] > 1:
            by_block = numbers.mean(axis=1)
            ax.plot(places, by_block, color=color, lw=0.7, alpha=0.4)
        by_seed = numbers.mean(axis=2)
        spreads = [spread_of(values) for values in by_seed]
        handles[_NAMES[bool(mode)]] = ax.errorbar(
            places,
            by_seed.mean(axis=1),
            spreads if any(spreads) else None,
            color=color,
            marker=MARKERS[index],
            ms=4.5,
            lw=1.6,
            capsize=3,
        )
    return handles


def _number_axis(ax, values):
    values = np.sort(values)
    if values[0] > 0 and values[-1] > _WIDE_RANGE * values[0]:
        ax.set_xscale("log")
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
