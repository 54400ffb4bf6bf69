"""Contrastive losses: twins, gradients, errors."""

import keras
import numpy as np
import pytest

from keras_softmoe.ops import contrastive
from tests.support import limoe_router_twin
from tests.support.close import assert_near
from tests.support.gradients import value_and_gradients
from tests.support.references import Reference, to_numpy

LOSSES = ["softmax_contrastive_loss", "sigmoid_contrastive_loss"]


def logits(scale=1.0):
    return (scale * np.random.default_rng(0).normal(size=(5, 5))).astype("float32")


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_twins(name, scale):
    actual = to_numpy(getattr(contrastive, name)(logits(scale)))
    expected = getattr(limoe_router_twin, name)(logits(scale))
    assert actual.shape == (5,)
    assert_near(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name):
    ours, twin = getattr(contrastive, name), getattr(limoe_router_twin, name)
    _, (gradient,) = value_and_gradients(lambda x: keras.ops.sum(ours(x)), [logits()])
    for direction in np.random.default_rng(1).normal(size=(3, 5, 5)):
        step = 1e-6 * direction
        up, down = (twin(np.float64(logits()) + s).sum() for s in (step, -step))
        np.testing.assert_allclose(
            (gradient * direction).sum(), (up - down) / 2e-6, rtol=1e-4
        )


@pytest.mark.parametrize("name", LOSSES)
def test_large_logits_are_safe(name):
    value = to_numpy(getattr(contrastive, name)(1e4 * np.eye(3, dtype="float32") - 5e3))
    assert_near(value, 0.0, atol=1e-6)
    value = to_numpy(getattr(contrastive, name)(np.full((3, 3), -1e4, "float32")))
    assert np.all(np.isfinite(value))


def test_sigmoid_loss_of_the_released_code():
    # Two towers, with the saved logits.
    for case in ("dense", "moe", "pool_first", "pool_gap", "pool_gmp", "tiny_norm"):
        saved = Reference(f"f_two_tower_{case}")
        saved.check(
            "sigmoid_loss", contrastive.sigmoid_contrastive_loss(saved.given("logits"))
        )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(4, 3), (1, 1), (4,), (2, 3, 3)])
def test_bad_shapes_are_named(name, shape):
    with pytest.raises(ValueError, match="Received: logits of shape"):
        getattr(contrastive, name)(np.zeros(shape, "float32"))
