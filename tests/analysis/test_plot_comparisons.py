"""Figures against the threshold of the global entropy loss."""

import numpy as np
import pytest

from keras_softmoe.analysis import plot_experts_in_use, plot_routing_entropy
from tests.analysis.modality_blocks import make_block, statistics
from tests.analysis.reading import legend_names, png, tick_names

NAMES = ("text", "image")


def seeds(*numbers):
    return [{1: make_block(n), 3: make_block(n + 10, last=True)} for n in numbers]


def points_of(ax):
    """Means and spreads by modality: text is drawn first."""
    found = {}
    for name, bars in zip(NAMES, ax.containers, strict=True):
        data, _, spreads = bars.lines
        points = data.get_xydata()
        # Without bars, both ends lie on the point.
        ends = np.repeat(points[:, 1:], 2, axis=1)
        if spreads:
            ends = np.array(spreads[0].get_segments())[:, :, 1]
        found[name] = points, ends
    return found


def check_points(ax, given, measure):
    for name, (points, spreads) in points_of(ax).items():
        assert points[:, 0].tolist() == sorted(given)
        for (threshold, mean), spread in zip(points, spreads, strict=True):
            by_seed = [
                np.mean([measure(block)[name] for block in of_seed.values()])
                for of_seed in given[threshold]
            ]
            np.testing.assert_allclose(mean, np.mean(by_seed))
            std = np.std(by_seed, ddof=1) if len(by_seed) > 1 else 0
            np.testing.assert_allclose(spread, [mean - std, mean + std])


def test_experts_in_use_of_statistics():
    given = {4: seeds(0, 1, 2), 1.5: seeds(3)}
    figure = plot_experts_in_use({**given, 1.5: given[1.5][0]}, share=0.6)
    (ax,) = figure.axes
    check_points(ax, given, lambda block: block.experts_needed(0.6))
    assert "60%" in ax.get_ylabel()
    assert tick_names(ax.xaxis) == ["1.5", "4"]
    (target,) = [line for line in ax.lines if line.get_linestyle() == "--"]
    np.testing.assert_allclose(target.get_ydata(), target.get_xdata())
    np.testing.assert_allclose(target.get_xdata()[[0, -1]], [1.5, 4])
    assert legend_names(figure.legends[0]) == ["text", "image", "as many as\nasked for"]
    assert png(figure).startswith(b"\x89PNG")


def test_experts_in_use_of_numbers():
    figure = plot_experts_in_use({2: {"text": [2, 4]}, 3: {"text": 5}})
    (ax,) = figure.axes
    (bars,) = ax.containers
    np.testing.assert_allclose(bars.lines[0].get_xydata(), [[2, 3], [3, 5]])
    spread = np.array(bars.lines[2][0].get_segments())[:, :, 1]
    std = np.sqrt(2)
    np.testing.assert_allclose(spread, [[3 - std, 3 + std], [5, 5]])
    assert legend_names(figure.legends[0])[:-1] == ["text"]


def test_routing_entropy():
    given = {2: seeds(0, 1), 6: seeds(2, 3)}
    figure = plot_routing_entropy(given)
    measures = {
        "router": lambda block: block.entropy,
        "after dispatch": lambda block: block.dispatch_entropy,
    }
    for ax, (title, measure) in zip(figure.axes, measures.items(), strict=True):
        assert ax.get_title() == title
        check_points(ax, given, measure)
        (target,) = [line for line in ax.lines if line.get_linestyle() == "--"]
        np.testing.assert_allclose(target.get_ydata(), np.log(target.get_xdata()))
    assert legend_names(figure.legends[0]) == ["text", "image", "threshold"]
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("plot", [plot_experts_in_use, plot_routing_entropy])
@pytest.mark.parametrize(
    "given, received",
    [
        ({}, "by_threshold={}"),
        (None, "by_threshold=None"),
        ({0.5: statistics()}, "by_threshold={0.5"),
        ({"text": statistics()}, "by_threshold={'text'"),
        ({4: []}, "statistics of type NoneType"),
        ({4: {}}, "statistics of type dict"),
        ({4: statistics()[1]}, "statistics of type"),
    ],
)
def test_other_things_than_statistics(plot, given, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        plot(given)


def test_numbers_tell_no_entropy():
    with pytest.raises(ValueError, match="Received: statistics of type dict"):
        plot_routing_entropy({4: {"text": [3, 4], "image": [5, 6]}})
