"""Sweeps over router settings, learned and random, their fronts and figures."""

import itertools

import numpy as np
import pytest

from keras_softmoe import evaluation, routers
from keras_softmoe.evaluation import Sweep
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.reading import legend_names, lines, png, tick_names

ROUTER = routers.SoftmaxTokenChoiceRouter(4, num_selected_experts=2, noise_std=0.0)
MOE = {"moe_layers": (0, 1), "router": ROUTER, "group_images": 2}
TEST = (tiny.pixels(7), tiny.labels(7))


def accuracy(model, order):
    images, labels = TEST
    predicted = tiny.predict(model, images[order], batch_size=4).argmax(-1)
    return np.mean(predicted == labels[order])


def test_a_sweep_is_the_models_own_accuracy():
    model = tiny.classifier(**MOE)
    before = model.backbone.get_config()
    grid = {"priority": ("max", "position"), "capacity_factor": (1.0, 0.25)}
    rows = evaluation.routing_sweep(
        model, TEST, seeds=2, batch_size=4, verbose=0, **grid
    ).rows
    assert model.backbone.get_config() == before
    assert [tuple(row.settings.values()) for row in rows] == [
        ("max", 1.0),
        ("max", 0.25),
        ("position", 1.0),
        ("position", 0.25),
    ]
    for row in (rows[1], rows[2]):
        model.set_routing(**row.settings)
        expected = [
            accuracy(model, np.random.default_rng(seed).permutation(7))
            for seed in range(2)
        ]
        np.testing.assert_allclose(row.scores["accuracy"], expected)
        assert row.gflop_per_image == evaluation.cost(model).gflop_per_image
    assert rows[0].gflop_per_image > rows[1].gflop_per_image


def test_operations_of_a_quantized_model():
    model = tiny.classifier(**MOE)
    expected = evaluation.cost(model, num_selected_experts=1).gflop_per_image
    model.quantize("int8")
    sweep = evaluation.routing_sweep(model, TEST, num_selected_experts=[1], verbose=0)
    (row,) = sweep.rows
    assert row.gflop_per_image == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_random_routers(monkeypatch, layers):
    model = tiny.classifier(**MOE)
    before = model.backbone.get_config()
    seen = []
    predict = type(model).predict

    def watched(self, *args, **kwargs):
        seen.append([r.random_logits for r in self.routers.values()])
        return predict(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "predict", watched)
    drawn = (False, True, "permuted")
    sweep = evaluation.routing_sweep(
        model, TEST, seeds=2, verbose=0, layers=layers, random_logits=drawn
    )
    assert model.backbone.get_config() == before
    # Each in two orders of the images.
    expected = [[x if block in layers else False for block in (0, 1)] for x in drawn]
    assert seen == [found for found in expected for _ in range(2)]
    assert [row.settings for row in sweep.rows] == [
        {"layers": tuple(layers), "random_logits": x} for x in drawn
    ]
    learned, *_ = sweep.scores()
    assert learned.shape == (2,)
    expected = accuracy(model, np.random.default_rng(0).permutation(7))
    np.testing.assert_allclose(learned[0], expected)


def test_predictions_without_a_capacity_get_the_swept_one():
    model = tiny.classifier(**MOE)
    figures = []
    for settings in ({}, {"eval_capacity_factor": "dropless"}):
        model.set_routing(**settings)
        sweep = evaluation.routing_sweep(
            model, TEST, capacity_factor=(0.25, 2.0), verbose=0
        )
        figures.append([sweep.scores(), [row.gflop_per_image for row in sweep.rows]])
    np.testing.assert_array_equal(*[f[0] for f in figures])
    assert figures[0][1] == figures[1][1]
    assert model.routers[1].eval_capacity_factor == "dropless"


def test_settings_are_put_back_after_an_error():
    model = tiny.classifier(**MOE)
    before = model.backbone.get_config()
    with pytest.raises(ValueError, match="Received: num_selected_experts=9"):
        evaluation.routing_sweep(model, TEST, num_selected_experts=(1, 9), verbose=0)
    assert model.backbone.get_config() == before


@pytest.mark.parametrize(
    "call, received",
    [
        (lambda m: evaluation.routing_sweep(m, TEST), "{}"),
        (lambda m: evaluation.routing_sweep(m, TEST, priority=()), "priority"),
        (
            lambda m: evaluation.routing_sweep(m, (TEST[0], [0]), priority=["max"]),
            "7 images, 1 labels",
        ),
        (lambda m: evaluation.routing_sweep(m, ([], []), priority=["max"]), "0 images"),
        (
            lambda m: [
                m.set_routing(eval_capacity_factor=2.0),
                evaluation.routing_sweep(m, TEST, capacity_factor=[1, 2]),
            ],
            "eval_capacity_factor=",
        ),
    ],
)
def test_bad_arguments_are_named(call, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        call(tiny.classifier(**MOE))


def test_soft_routers_have_nothing_to_randomize():
    with pytest.raises(ValueError, match="random_logits"):
        evaluation.routing_sweep(
            tiny.classifier(), TEST, random_logits=(True,), verbose=0
        )


# === Fronts, and the numbers that figures show ===


def make_rows(seeds=3, **grid):
    """A sweep over two settings, with accuracies that tell its rows apart."""
    (first, outer), (second, inner) = grid.items()
    return Sweep(
        [
            (
                {first: a, second: b},
                {"accuracy": 0.1 * i + 0.01 * j + 0.001 * np.arange(seeds)},
            )
            for i, a in enumerate(outer)
            for j, b in enumerate(inner)
        ]
    )


def test_sweeps_are_joined():
    one, other = make_rows(a=[1], b=[2]), make_rows(a=[1], b=[3])
    joined = sum([one, other], start=Sweep((), {"whole": [1.0]}))
    assert [row.settings["b"] for row in joined.rows] == [2, 3]
    assert joined.baselines == {"whole": [1.0]}
    (row,) = Sweep([({"a": 1}, {"accuracy": 0.5})]).rows
    assert row.scores["accuracy"].shape == (1,)


@pytest.mark.parametrize("seed", range(4))
def test_pareto(seed):
    rng = np.random.default_rng(seed)
    # So few values that some are equal.
    costs, accuracies = rng.integers(1, 5, (2, 12)) / 4
    sweep = Sweep(
        [
            ({"i": i}, {"accuracy": [a, a]}, c)
            for i, (c, a) in enumerate(zip(costs, accuracies, strict=True))
        ]
    )
    beaten = set()
    for i, j in itertools.permutations(range(12), 2):
        better = costs[j] <= costs[i] and accuracies[j] >= accuracies[i]
        if better and (costs[i], accuracies[i]) != (costs[j], accuracies[j]):
            beaten.add(i)
    front = sweep.pareto()
    assert {row.settings["i"] for row in front.rows} == set(range(12)) - beaten
    assert np.all(np.diff([row.gflop_per_image for row in front.rows]) >= 0)
    assert np.all(np.diff([values.mean() for values in front.scores()]) >= 0)


ONE = Sweep([({"a": 1}, {"accuracy": [1.0]}, 1.0)])


@pytest.mark.parametrize(
    "sweep, arguments, message",
    [
        (Sweep(()), {}, "Received: 0 rows"),
        (make_rows(a=[1], b=[2]), {}, "gflop_per_image=None"),
        (ONE, {"y": "loss"}, "have: accuracy. Received: 1 rows, y='loss'"),
    ],
)
def test_rows_without_a_front(sweep, arguments, message):
    with pytest.raises(ValueError, match=message):
        sweep.pareto(**arguments)


def test_accuracy_against_capacity():
    sweep = make_rows(priority=("max", "position"), capacity_factor=(0.25, 1.0, 0.5))
    figure = sweep.plot("capacity_factor", by="priority")
    (ax,) = figure.axes
    shown = lines(ax)
    assert list(shown) == ["max (batch prioritized)", "position (vanilla)"]
    for (points, spread), chunk in zip(
        shown.values(), (sweep.rows[:3], sweep.rows[3:]), strict=True
    ):
        chunk = sorted(chunk, key=lambda row: row.settings["capacity_factor"])
        means = [row.scores["accuracy"].mean() for row in chunk]
        np.testing.assert_allclose(points, np.c_[[0.25, 0.5, 1.0], means])
        # The standard deviation of three numbers 0.001 apart.
        expected = np.clip(np.add.outer(means, [-0.001, 0.001]), 0, 1)
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


def test_accuracy_against_the_number_of_experts():
    sweep = make_rows(seeds=1, num_selected_experts=(1, 2, 5), capacity_factor=(1.05,))
    figure = sweep.plot("num_selected_experts", baselines={"K = 2 in training": 0.1})
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
    """Beside each other, one shift for each value of the other setting."""
    sweep = make_rows(priority=("pair", "max"), eval_capacity_factor=(None, 0.5))
    ax = sweep.plot("priority", by="eval_capacity_factor").axes[0]
    assert tick_names(ax.xaxis) == ["pair", "max\n(batch prioritized)"]
    shown = lines(ax)
    assert list(shown) == ["None", "0.5"]
    for j, (points, _) in enumerate(shown.values()):
        assert_near(points[:, 0], [0, 1], atol=0.1)
        np.testing.assert_allclose(points[:, 1], [0.001 + 0.01 * j, 0.101 + 0.01 * j])
    assert all(bars.lines[0].get_linestyle() == "None" for bars in ax.containers)


def test_several_scores_and_a_target():
    """As the experts in use, and their entropy, against a threshold."""
    rows = [
        ({"S": s, "modality": m}, {"router": [s / 9], "after dispatch": [s / 6, s / 5]})
        for s in (2, 6, 20)
        for m in ("text", "image")
    ]
    figure = Sweep(rows).plot(
        "S", ("router", "after dispatch"), "modality", {"threshold": np.log}
    )
    labels = ["router", "after dispatch (± standard deviation of 2 seeds)"]
    assert [ax.get_ylabel() for ax in figure.axes] == labels
    for ax in figure.axes:
        assert list(lines(ax)) == ["text", "image"]
        # Ten times the smallest number.
        assert ax.get_xscale() == "log" and tick_names(ax.xaxis) == ["2", "6", "20"]
        *_, target = ax.lines
        assert target.get_linestyle() == "--"
        np.testing.assert_allclose(target.get_ydata(), np.log(target.get_xdata()))
    assert legend_names(figure.legends[0]) == ["text", "image", "threshold"]
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "sweep, arguments, message",
    [
        (Sweep(()), {"x": "a"}, "Received: 0 rows"),
        (make_rows(a=[1], b=[2]), {"x": "a", "by": "a"}, "x='a', by='a'"),
        (make_rows(a=[1], b=[2]), {"x": "c"}, "x='c'.*row with a, b"),
        (make_rows(a=[1], b=[2]), {"x": "a", "by": "c"}, "by=None.*by='c'.*with a, b"),
        (make_rows(a=[1], b=[2]), {"x": "a", "y": "loss"}, "y='loss'"),
        (make_rows(a=[1], b=[2, 3]), {"x": "a"}, r"'b': 2.*'b': 3"),
        (
            make_rows(a=[1], b=[2]) + make_rows(a=[1], b=[2]),
            {"x": "a", "by": "b"},
            "two rows with",
        ),
    ],
)
def test_rows_that_do_not_make_a_figure(sweep, arguments, message):
    with pytest.raises(ValueError, match=message):
        sweep.plot(**arguments)


def costly_rows(stretch=1.0):
    """Two families; in each the second row of three is not on the front."""
    numbers = {
        "max": ((1.0, 0.5), (2.0, 0.4), (4.0, 0.7)),
        "position": ((1.5, 0.3), (1.5, 0.2), (3.0, 0.6)),
    }
    return Sweep(
        [
            (
                {"priority": name, "capacity_factor": 0.25 * (i + 1)},
                {"accuracy": accuracy + 0.01 * np.arange(-1, 2)},
                cost * stretch**i,
            )
            for name, points in numbers.items()
            for i, (cost, accuracy) in enumerate(points)
        ]
    )


def test_a_front_for_each_family():
    figure = costly_rows().plot("gflop_per_image", by="priority")
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
    assert legend_names(figure.legends[0]) == list(fronts)
    assert ax.get_xlabel() == "GFLOP per image" and ax.get_xscale() == "linear"
    assert "3 seeds" in ax.get_ylabel()
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "sweep, by, message",
    [
        (make_rows(a=[1], b=[2]), None, "gflop_per_image=None"),
        (costly_rows(), "model", "Received: by='model'.*capacity_factor"),
    ],
)
def test_costs_and_families_that_are_missing(sweep, by, message):
    with pytest.raises(ValueError, match=message):
        sweep.plot("gflop_per_image", by=by)
