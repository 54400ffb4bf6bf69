"""Sweeps over router settings, and routers that choose at random."""

import numpy as np
import pytest

from keras_softmoe import evaluation, routers
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


def test_random_routers(monkeypatch):
    model = tiny.classifier(**MOE)
    before = model.backbone.get_config()
    seen = []
    predict = type(model).predict

    def watched(self, *args, **kwargs):
        seen.append([r.random_logits for r in self.routers.values()])
        return predict(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "predict", watched)
    ablation = evaluation.random_routers(model, TEST, seeds=2, verbose=0)
    assert model.backbone.get_config() == before
    # As learned; the first, the second; up to the first, up to the second. Two seeds.
    runs = [[0, 0], [1, 0], [0, 1], [1, 0], [1, 1]]
    assert seen == [list(map(bool, run)) for run in runs for _ in range(2)]
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
    ],
)
def test_bad_arguments_are_named(call, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        call(tiny.classifier(**MOE))


def test_soft_routers_have_nothing_to_randomize():
    with pytest.raises(ValueError, match="random_logits"):
        evaluation.random_routers(tiny.classifier(), TEST, verbose=0)
