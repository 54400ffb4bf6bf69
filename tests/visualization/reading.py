"""What a figure shows, read back from it."""

import io

import numpy as np


def png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=40)
    return buffer.getvalue()


def lines(ax):
    """Dict from the label to points `(n, 2)` and error bars `(n, 2)` (low, high)."""
    found = {}
    for bars in ax.containers:
        data, _, spreads = bars.lines
        spread = None
        if spreads:
            spread = np.array(spreads[0].get_segments())[:, :, 1]
        found[bars.get_label()] = (data.get_xydata(), spread)
    return found


def tick_names(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def legend_names(legend):
    return [text.get_text() for text in legend.get_texts()]
