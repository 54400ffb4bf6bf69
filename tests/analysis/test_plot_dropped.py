"""The figure of dropped tokens shows the numbers that it is given."""

import numpy as np
import pytest

from keras_softmoe.analysis import plot_dropped_tokens
from tests.analysis.reading import legend_names, png, tick_names
from tests.analysis.routing_blocks import statistics


def test_dropped_tokens():
    given = {count: statistics(num_experts=count) for count in (16, 4)}
    figure = plot_dropped_tokens(given)
    (ax,) = figure.axes
    for line, layer in zip(ax.lines, (1, 3), strict=True):
        expected = [[count, given[count][layer].dropped] for count in (4, 16)]
        np.testing.assert_allclose(line.get_xydata(), expected)
    assert tick_names(ax.xaxis) == ["4", "16"]
    (legend,) = figure.legends
    assert legend_names(legend) == ["block 1", "block 3"]
    assert png(figure).startswith(b"\x89PNG")


def test_dropped_tokens_side_by_side():
    largest = statistics((3,), num_experts=8)
    largest[3] = largest[3]._replace(dropped=1.0)
    given = {
        "tokens choose": {4: statistics(num_experts=4), 8: statistics(num_experts=8)},
        # One block fewer.
        "experts choose": {8: largest},
    }
    figure = plot_dropped_tokens(given)
    assert [ax.get_title() for ax in figure.axes] == list(given)
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] > 1.0
    assert [len(line.get_xdata()) for line in first.lines] == [2, 2]
    assert [len(line.get_xdata()) for line in second.lines] == [0, 1]
    # A block has the same colour everywhere.
    assert first.lines[1].get_color() == second.lines[1].get_color()
    assert legend_names(figure.legends[0]) == ["block 1", "block 3"]


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "Received: {}"),
        (None, "Received: None"),
        ({"tokens choose": {}}, "Received: {}"),
        ({8: {}}, "statistics of type dict"),
        (statistics(), "statistics of type RoutingStatistics"),
        ({8: statistics()}, "Received: 8 for a model with 3 experts in block 1"),
    ],
)
def test_dropped_tokens_of_other_things(given, message):
    with pytest.raises(ValueError, match=message):
        plot_dropped_tokens(given)
