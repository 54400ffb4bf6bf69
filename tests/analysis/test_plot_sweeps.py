"""Figures of a model under other settings show its accuracies and dropped patches."""

import numpy as np
import pytest

from keras_softmoe import analysis, routers
from keras_softmoe.analysis import (
    plot_discarded_patches,
    plot_pareto,
    plot_sweep,
)
from keras_softmoe.evaluation.sweeps import SweepRow
from tests.analysis.reading import legend_names, lines, png, tick_names
from tests.models import tiny

# === Discarded patches ===

# It would seat everything, were it not for `eval_capacity_factor`.
ROUTER = routers.SoftmaxTokenChoiceRouter(
    4, capacity_factor=4.0, eval_capacity_factor=1.0
)
CAPACITIES = (1.0, 0.25)


@pytest.fixture(scope="module")
def classifier():
    return tiny.classifier(moe_layers=(0, 1), router=ROUTER, group_images=2)


def discarded(classifier, images, priority):
    """`(capacities, images, rows, columns)` in block 1, setting by setting."""
    found = []
    for factor in CAPACITIES:
        settings = {"eval_capacity_factor": factor, "priority": priority}
        classifier.set_routing(**settings)
        maps = analysis.routing_maps(classifier, images, layer=1)
        found.append(maps.dispatch.sum((-2, -1)) == 0)
    classifier.set_routing(eval_capacity_factor=1.0, priority="position")
    return np.array(found)


@pytest.mark.parametrize("priority", [None, "max"])
def test_discarded_patches_are_covered(classifier, priority):
    images = tiny.pixels(2)
    expected = discarded(classifier, images, priority or "position")
    before = classifier.backbone.get_config()
    figure = plot_discarded_patches(
        classifier, images, CAPACITIES, layer=1, priority=priority
    )
    assert classifier.backbone.get_config() == before
    axes = np.reshape(figure.axes, (2, 3))
    assert [ax.get_title() for ax in axes[0]] == ["image", "C = 1", "C = 0.25"]
    assert 0 < expected[0].mean() < expected[1].mean()
    for row in range(2):
        (picture,) = axes[row, 0].get_images()
        np.testing.assert_allclose(picture.get_array(), images[row] / 255, atol=1e-6)
        assert not axes[row, 0].collections
        for ax, patches in zip(axes[row, 1:], expected[:, row], strict=True):
            (cover,) = ax.collections
            _, grey = ax.get_images()
            for layer in (cover, grey):
                shown = ~np.ma.getmaskarray(layer.get_array())
                np.testing.assert_array_equal(shown, patches)
            # The patches lie where they do in the picture, upside down for matplotlib.
            assert cover.get_coordinates()[0, 0].tolist() == [0, 0]
            assert cover.get_coordinates()[-1, -1].tolist() == [8, 8]
            assert ax.get_ylim() == (8, 0)
            assert ax.get_xlabel() == f"{patches.mean():.0%} discarded"
    title = figure.get_suptitle()
    assert "block 1" in title
    assert "vanilla" in title if priority is None else "batch prioritized" in title
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"capacity_factors": ()}, r"Received: capacity_factors=\(\)"),
        ({"capacity_factors": (0.5, -1.0)}, "eval_capacity_factor=-1.0"),
        ({"capacity_factors": (0.5,), "layer": 7}, "layer=7"),
        ({"priority": "vanilla"}, "priority='vanilla'"),
    ],
)
def test_settings_are_put_back_after_an_error(classifier, arguments, message):
    before = classifier.backbone.get_config()
    with pytest.raises(ValueError, match=message):
        plot_discarded_patches(classifier, tiny.pixels(2), **arguments)
    assert classifier.backbone.get_config() == before


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"router": tiny.SOFT}, "Received: block 1 with SoftRouter"),
        ({"router": routers.IdentityRouter(5)}, "block 1 with IdentityRouter"),
        (tiny.DENSE, "dense model"),
    ],
)
def test_routers_without_capacity_discard_nothing(overrides, message):
    with pytest.raises(ValueError, match=message):
        plot_discarded_patches(tiny.backbone(**overrides), tiny.images(2))


# === Sweeps ===


def make_rows(seeds=3, **grid):
    """Rows of a sweep over two settings, with accuracies that tell them apart."""
    (first, outer), (second, inner) = grid.items()
    return [
        SweepRow({first: a, second: b}, 0.1 * i + 0.01 * j + 0.001 * np.arange(seeds))
        for i, a in enumerate(outer)
        for j, b in enumerate(inner)
    ]


def test_accuracy_against_capacity():
    rows = make_rows(priority=("max", "position"), capacity_factor=(0.25, 1.0, 0.5))
    figure = plot_sweep(rows)
    (ax,) = figure.axes
    shown = lines(ax)
    assert list(shown) == ["max (batch prioritized)", "position (vanilla)"]
    for (points, spread), chunk in zip(
        shown.values(), (rows[:3], rows[3:]), strict=True
    ):
        chunk = sorted(chunk, key=lambda row: row.settings["capacity_factor"])
        means = [row.accuracies.mean() for row in chunk]
        np.testing.assert_allclose(points, np.c_[[0.25, 0.5, 1.0], means])
        # The standard deviation of three numbers 0.001 apart.
        expected = np.add.outer(means, [-0.001, 0.001])
        np.testing.assert_allclose(spread, expected)
    (legend,) = figure.legends
    assert legend_names(legend) == list(shown)
    assert legend.get_title().get_text() == "priority"
    # Falling from left to right, with the values that were tried.
    left, right = ax.get_xlim()
    assert left > right
    assert tick_names(ax.xaxis) == ["0.25", "0.5", "1"]
    assert ax.get_xlabel() == "capacity factor C"
    assert "3 seeds" in ax.get_ylabel()
    assert png(figure).startswith(b"\x89PNG")


def test_error_bars_end_at_100_percent():
    row = SweepRow({"a": 1}, np.array([0.8, 1.0, 1.0]))
    ax = plot_sweep([row], "a", by=None, baselines={"dense": [0.9, 1.0, 1.0]}).axes[0]
    ((_, spread),) = lines(ax).values()
    low = row.accuracies.mean() - row.accuracies.std(ddof=1)
    np.testing.assert_allclose(spread, [[low, 1.0]])
    (band,) = ax.patches
    np.testing.assert_allclose(band.get_y() + band.get_height(), 1.0)


def test_accuracy_against_the_number_of_experts():
    rows = make_rows(seeds=1, num_selected_experts=(1, 2, 5), capacity_factor=(1.05,))
    figure = plot_sweep(
        rows, "num_selected_experts", by=None, baselines={"K = 2 in training": 0.1}
    )
    (ax,) = figure.axes
    ((points, spread),) = lines(ax).values()
    np.testing.assert_allclose(points, [[1, 0.0], [2, 0.1], [5, 0.2]])
    # One seed has no spread.
    assert spread is None
    assert ax.get_ylabel() == "accuracy"
    left, right = ax.get_xlim()
    assert left < right
    assert ax.get_title() == "with capacity_factor = 1.05"
    assert legend_names(figure.legends[0]) == ["K = 2 in training"]
    (level,) = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert set(level.get_ydata()) == {0.1}


def test_settings_that_are_not_numbers():
    rows = make_rows(priority=("pair", "max"), eval_capacity_factor=(None, 0.5))
    ax = plot_sweep(rows, x="priority", by="eval_capacity_factor").axes[0]
    assert tick_names(ax.xaxis) == ["pair", "max\n(batch prioritized)"]
    shown = lines(ax)
    assert list(shown) == ["None", "0.5"]
    for j, (points, _) in enumerate(shown.values()):
        np.testing.assert_allclose(points[:, 0], [0, 1], atol=0.1)
        np.testing.assert_allclose(points[:, 1], [0.001 + 0.01 * j, 0.101 + 0.01 * j])
    assert all(bars.lines[0].get_linestyle() == "None" for bars in ax.containers)


def test_many_lines_of_numbers_have_shades_in_order():
    rows = make_rows(capacity_factor=(1.0, 0.5), num_selected_experts=range(1, 10))
    ax = plot_sweep(rows, by="num_selected_experts").axes[0]
    brightness = [np.sum(bars.lines[0].get_color()[:3]) for bars in ax.containers]
    assert len(brightness) == 9
    assert (np.diff(brightness) > 0).all()


@pytest.mark.parametrize(
    "rows, arguments, message",
    [
        ([], {}, "Received: 0 rows"),
        (make_rows(a=[1], b=[2]), {"x": "a", "by": "a"}, "x='a', by='a'"),
        (make_rows(a=[1], b=[2]), {"x": "c", "by": None}, "has: a, b. Received: x='c'"),
        (make_rows(a=[1], b=[2]), {"x": "a"}, "has: a, b.*by='priority'"),
        (make_rows(a=[1], b=[2, 3]), {"x": "a", "by": None}, r"'b': 2.*'b': 3"),
        (2 * make_rows(a=[1], b=[2]), {"x": "a", "by": "b"}, "two rows with"),
    ],
)
def test_rows_that_do_not_make_a_figure(rows, arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_sweep(rows, **arguments)


# === Pareto fronts ===


def costly_rows(**kwargs):
    """Two families; in each the second row of three is not on the front."""
    numbers = {
        "max": ((1.0, 0.5), (2.0, 0.4), (4.0, 0.7)),
        "position": ((1.5, 0.3), (1.5, 0.2), (3.0, 0.6)),
    }
    return [
        SweepRow(
            {"priority": name, "capacity_factor": 0.25 * (i + 1), "seeds": 3},
            accuracy + 0.01 * np.arange(-1, 2),
            gflop_per_image=cost,
            seconds_per_image=cost / 1000,
            relative_time=cost * kwargs.get("stretch", 1.0) ** i,
        )
        for name, points in numbers.items()
        for i, (cost, accuracy) in enumerate(points)
    ]


def test_a_front_for_each_family():
    figure = plot_pareto(costly_rows(), by="priority")
    (ax,) = figure.axes
    fronts = {b.get_label(): b for b in ax.containers if b.get_label() != "_"}
    assert list(fronts) == ["max (batch prioritized)", "position (vanilla)"]
    expected = ([[1.0, 0.5], [4.0, 0.7]], [[1.5, 0.3], [3.0, 0.6]])
    for bars, points in zip(fronts.values(), expected, strict=True):
        line = bars.lines[0]
        np.testing.assert_allclose(line.get_xydata(), points)
        assert line.get_drawstyle() == "steps-post"
        assert line.get_markerfacecolor() == line.get_color()
    beaten = [bars.lines[0] for bars in ax.containers if bars.get_label() == "_"]
    points = np.concatenate([line.get_xydata() for line in beaten])
    np.testing.assert_allclose(points, [[2.0, 0.4], [1.5, 0.2]])
    for line in beaten:
        assert line.get_linestyle() == "None"
        assert line.get_markerfacecolor() == "white"
    assert [text.get_text() for text in ax.texts] == ["1", "2", "3", "4"]
    # Named by what differs, and not by what tells the fronts apart.
    assert legend_names(figure.legends[0]) == [
        *("max (batch prioritized)", "1: C = 0.25", "2: C = 0.75"),
        *("position (vanilla)", "3: C = 0.25", "4: C = 0.75"),
    ]
    assert ax.get_xlabel() == "GFLOP per image" and ax.get_xscale() == "linear"
    assert "3 seeds" in ax.get_ylabel()
    assert png(figure).startswith(b"\x89PNG")


def test_one_front_of_all_rows():
    figure = plot_pareto(costly_rows(), "seconds_per_image")
    (ax,) = figure.axes
    (front,) = (bars for bars in ax.containers if bars.get_label() != "_")
    expected = [[0.001, 0.5], [0.003, 0.6], [0.004, 0.7]]
    np.testing.assert_allclose(front.lines[0].get_xydata(), expected)
    names = legend_names(figure.legends[0])
    assert names[0] == "Pareto front" and len(names) == 4
    assert names[1] == "1: priority = max (batch prioritized), C = 0.25"
    figure.draw_without_rendering()
    assert "ms" in ax.get_xlabel() and "1" in tick_names(ax.xaxis)


def test_equal_points_have_one_number():
    rows = [SweepRow({"a": a}, np.array([0.5]), gflop_per_image=1.0) for a in (1, 2)]
    figure = plot_pareto(rows)
    assert [text.get_text() for text in figure.axes[0].texts] == ["1"]
    assert legend_names(figure.legends[0])[1:] == ["1: a = 1 or a = 2"]


def test_costs_far_apart_are_drawn_as_ratios():
    ax = plot_pareto(costly_rows(stretch=3.0), "relative_time").axes[0]
    assert ax.get_xscale() == "log" and "unchanged" in ax.get_xlabel()


@pytest.mark.parametrize(
    "rows, arguments, message",
    [
        ([], {}, "Received: 0 rows"),
        (make_rows(a=[1], b=[2]), {}, "cost='gflop_per_image'"),
        (costly_rows(), {"by": "model"}, "capacity_factor.*Received: by='model'"),
    ],
)
def test_rows_without_a_front(rows, arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_pareto(rows, **arguments)
