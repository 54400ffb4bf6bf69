"""Sweeps over router settings, and routers that choose at random."""

import itertools
import types

import numpy as np
import pytest

from keras_softmoe import evaluation, routers
from keras_softmoe.evaluation import sweeps
from keras_softmoe.evaluation.sweeps import SweepRow
from tests.models import tiny

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
    )
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
        np.testing.assert_allclose(row.accuracies, expected)
        cost = evaluation.cost(model)
        assert row.gflop_per_image == cost.gflop_per_image
        assert row.seconds_per_image is row.relative_time is None
    assert rows[0].gflop_per_image > rows[1].gflop_per_image


@tiny.QUANTIZING
def test_operations_of_a_quantized_model():
    model = tiny.classifier(**MOE)
    expected = evaluation.cost(model, num_selected_experts=1).gflop_per_image
    model.quantize("int8")
    (row,) = evaluation.routing_sweep(model, TEST, num_selected_experts=[1], verbose=0)
    assert row.gflop_per_image == pytest.approx(expected, rel=1e-12)


def test_times_are_taken_in_turns(monkeypatch):
    """With a clock that only `predict` moves."""
    model = tiny.classifier(**MOE)
    took = {"changed": [2.0, 30.0, 3.0], "unchanged": [1.0, 10.0, 2.0]}
    now, calls = 0.0, []
    predict = type(model).predict

    def slow(self, images, **kwargs):
        nonlocal now
        name = "changed" if self is model else "unchanged"
        calls.append((name, self.routers[0].capacity_factor))
        # One order for the accuracies, one run to warm up.
        run = sum(call[0] == name for call in calls) - (2 if self is model else 1)
        now += took[name][run - 1] if run > 0 else 100.0
        return predict(self, images, **kwargs)

    monkeypatch.setattr(type(model), "predict", slow)
    clock = types.SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(sweeps, "time", clock)
    (row,) = evaluation.routing_sweep(
        model, TEST, capacity_factor=[0.5], time_repeats=3, verbose=0
    )
    assert row.seconds_per_image == 3.0 / len(TEST[0])
    # The median of 2, 3 and 1.5
    assert row.relative_time == 2.0
    assert {name: factor for name, factor in calls} == {
        "changed": 0.5,
        "unchanged": 1.05,
    }
    names = [name for name, _ in calls[1:]]
    assert names == 2 * ["changed", "unchanged", "unchanged", "changed"]


@pytest.mark.parametrize("seed", range(4))
def test_pareto_front(seed):
    rng = np.random.default_rng(seed)
    # So few values that some are equal.
    costs, accuracies = rng.integers(1, 5, (2, 12)) / 4
    rows = [
        SweepRow({"i": i}, np.array([a, a]), gflop_per_image=c)
        for i, (c, a) in enumerate(zip(costs, accuracies, strict=True))
    ]
    beaten = set()
    for i, j in itertools.permutations(range(12), 2):
        better = costs[j] <= costs[i] and accuracies[j] >= accuracies[i]
        if better and (costs[i], accuracies[i]) != (costs[j], accuracies[j]):
            beaten.add(i)
    front = evaluation.pareto_front(rows)
    assert {row.settings["i"] for row in front} == set(range(12)) - beaten
    assert np.all(np.diff([row.gflop_per_image for row in front]) >= 0)
    assert np.all(np.diff([row.accuracies.mean() for row in front]) >= 0)


@pytest.mark.parametrize(
    "rows, cost, message",
    [
        ([], "gflop_per_image", "Received: 0 rows"),
        ([SweepRow({}, np.ones(1), 1.0)], "gflop", "'relative_time'.*cost='gflop'"),
        ([SweepRow({}, np.ones(1), 1.0)], "relative_time", "time_repeats=5"),
    ],
)
def test_rows_without_a_front(rows, cost, message):
    with pytest.raises(ValueError, match=message):
        evaluation.pareto_front(rows, cost)


@pytest.mark.parametrize("control", ["noise", "permuted"])
def test_random_routers(monkeypatch, control):
    model = tiny.classifier(**MOE)
    before = model.backbone.get_config()
    seen = []
    predict = type(model).predict

    def watched(self, *args, **kwargs):
        seen.append([r.random_logits for r in self.routers.values()])
        return predict(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "predict", watched)
    ablation = evaluation.random_routers(
        model, TEST, seeds=2, verbose=0, control=control
    )
    assert ablation.control == control
    assert model.backbone.get_config() == before
    # As learned; the first, the second; up to the first, up to the second. Two seeds.
    runs = [[0, 0], [1, 0], [0, 1], [1, 0], [1, 1]]
    drawn = {0: False, 1: True if control == "noise" else "permuted"}
    assert seen == [[drawn[x] for x in run] for run in runs for _ in range(2)]
    assert list(ablation.single) == list(ablation.cumulative) == [0, 1]
    assert ablation.learned.shape == ablation.cumulative[1].shape == (2,)
    expected = accuracy(model, np.random.default_rng(0).permutation(7))
    np.testing.assert_allclose(ablation.learned[0], expected)


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
        (lambda m: evaluation.random_routers(m, ([], [])), "0 images"),
        (lambda m: evaluation.random_routers(m, TEST, control="x"), "control='x'"),
        (
            lambda m: evaluation.routing_sweep(
                m, TEST, priority=["max"], time_repeats=-1
            ),
            "time_repeats=-1",
        ),
    ],
)
def test_bad_arguments_are_named(call, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        call(tiny.classifier(**MOE))


def test_soft_routers_have_nothing_to_randomize():
    with pytest.raises(ValueError, match="random_logits"):
        evaluation.random_routers(tiny.classifier(), TEST, verbose=0)
