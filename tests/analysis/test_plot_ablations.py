"""Figures of models without their routers or experts show what was measured."""

import numpy as np
import pytest

from keras_softmoe.analysis import plot_pruning, plot_random_routers
from keras_softmoe.evaluation._random_routers import RouterAblation
from keras_softmoe.evaluation.pruning import PruningCurve
from tests.analysis.reading import legend_names, lines, png, tick_names

# === Random routers ===


def test_random_routers_beside_the_learned():
    ablation = RouterAblation(
        learned=np.array([0.8, 0.9]),
        single={1: np.array([0.7, 0.7]), 3: np.array([0.5, 0.6])},
        cumulative={1: np.array([0.7, 0.7]), 3: np.array([0.1, 0.2])},
    )
    figure = plot_random_routers(ablation)
    for ax, accuracies in zip(
        figure.axes, (ablation.single, ablation.cumulative), strict=True
    ):
        points, spread = lines(ax)["random"]
        means = np.array([values.mean() for values in accuracies.values()])
        np.testing.assert_allclose(points, np.c_[[0, 1], means])
        reach = [[0, 0], np.sqrt([0.005, 0.005])]
        np.testing.assert_allclose(np.abs(spread - means[:, None]), reach, atol=1e-12)
        assert tick_names(ax.xaxis) == ["1", "3"]
        (level,) = [line for line in ax.lines if line.get_linestyle() == "--"]
        np.testing.assert_allclose(level.get_ydata(), 0.85)
        (band,) = ax.patches
        np.testing.assert_allclose(band.get_height(), 2 * np.sqrt(0.005))
    assert "single" not in figure.axes[1].get_title()
    assert legend_names(figure.axes[1].get_legend()) == ["all learned", "random"]
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "single, cumulative", [({}, {}), ({1: np.zeros(1)}, {2: np.zeros(1)})]
)
def test_ablations_that_do_not_make_a_figure(single, cumulative):
    received = f"blocks {list(single)}, cumulative of the blocks {list(cumulative)}"
    with pytest.raises(ValueError, match=received.replace("[", r"\[")):
        plot_random_routers(RouterAblation(np.zeros(1), single, cumulative))


def test_two_controls_side_by_side():
    ablations = [
        RouterAblation(np.ones(2), {1: np.zeros(2)}, {1: np.full(2, level)}, control)
        for control, level in (("noise", 0.25), ("permuted", 0.5))
    ]
    figure = plot_random_routers(*ablations)
    _, ax = figure.axes
    shown = lines(ax)
    assert list(shown) == ["random", "permuted"]
    for (points, _), (place, level) in zip(
        shown.values(), ((-0.05, 0.25), (0.05, 0.5)), strict=True
    ):
        np.testing.assert_allclose(points, [[place, level]])
    assert legend_names(ax.get_legend()) == ["all learned", "random", "permuted"]
    other = RouterAblation(np.ones(1), {2: np.zeros(1)}, {2: np.zeros(1)})
    for wrong in ((), (ablations[0], other)):
        with pytest.raises(ValueError, match=f"Received: {len(wrong)} ablations"):
            plot_random_routers(*wrong)


# === Pruning ===


def curve(shift=0.0):
    values = shift + np.array([[0.1, 0.3], [0.4, 0.4], [0.6, 0.8]])
    return PruningCurve(
        np.array([1, 2, 6]),
        {"router_pred": values, "router_drop": values - 0.1},
        shift + np.array([0.7, 0.8]),
    )


def test_pruning():
    figure = plot_pruning({"text": curve(), "image": curve(0.1)}, "accuracy")
    for ax, (name, shift) in zip(
        figure.axes, (("text", 0.0), ("image", 0.1)), strict=True
    ):
        assert ax.get_title() == name
        shown = lines(ax)
        assert list(shown) == ["router_pred", "router_drop"]
        for (points, spread), lost in zip(shown.values(), (0.0, 0.1), strict=True):
            means = shift - lost + np.array([0.2, 0.4, 0.7])
            np.testing.assert_allclose(points, np.c_[[1, 2, 6], means])
            deviation = np.sqrt([0.02, 0.0, 0.02])
            # All are accuracies.
            expected = np.clip(np.c_[means - deviation, means + deviation], 0, 1)
            np.testing.assert_allclose(spread, expected, atol=1e-12)
        left, right = ax.get_xlim()
        assert left > right
        assert tick_names(ax.xaxis) == ["1", "2", "6"]
        (level,) = [line for line in ax.lines if line.get_linestyle() == "--"]
        np.testing.assert_allclose(level.get_ydata(), shift + 0.75)
    assert figure.axes[0].get_ylabel() == "accuracy"
    names = legend_names(figure.axes[-1].get_legend())
    assert names == ["not pruned", "router_pred", "router_drop"]
    assert png(figure).startswith(b"\x89PNG")


def test_bars_of_other_metrics_are_whole():
    (ax,) = plot_pruning(curve(1.0), "bits").axes
    for points, spread in lines(ax).values():
        np.testing.assert_allclose(spread.mean(axis=1), points[:, 1])


def test_pruning_one_modality():
    (ax,) = plot_pruning(curve()).axes
    assert ax.get_title() == "" and len(lines(ax)) == 2
    for wrong in ({}, None, {"text": [1, 2]}):
        with pytest.raises(ValueError, match="pruning_curve.*Received: curves of type"):
            plot_pruning(wrong)
