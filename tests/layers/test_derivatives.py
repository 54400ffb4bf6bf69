"""Layers with experts have derivatives of second order, and in forward mode.

Those without capacity have them on some backends, and refuse them on the others.
"""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, routers
from tests.skips import only_on
from tests.support.close import assert_near
from tests.support.gradients import (
    changes_of_gradients,
    difference,
    gradients_of_each,
    slope,
    value_and_gradients,
)
from tests.support.layer_checks import normal, randomize
from tests.support.references import to_numpy

SHAPE = (3, 6, 8)
TOLERANCE = {"rtol": 2e-2, "atol": 5e-4}


def token_choice(capacity_factor):
    return routers.SoftmaxTokenChoiceRouter(
        4, 2, capacity_factor=capacity_factor, noise_std=0.0
    )


LAYERS = {
    "soft": lambda: layers.SoftMoE(4, 12),
    "token choice": lambda: layers.MoE(token_choice(1.5), 12),
    "sinkhorn ec": lambda: layers.MoE(routers.SinkhornExpertChoiceRouter(4), 12),
    "transport": lambda: layers.MoE(routers.SparseTransportExpertChoiceRouter(4), 12),
    "expert choice": lambda: layers.MoE(routers.SoftmaxExpertChoiceRouter(4), 12),
    "dense": lambda: layers.MLP(12),
}
DROPLESS = {"dropless": lambda: layers.MoE(token_choice(None), 12, group_images=2)}
# `torch.func.vmap` cannot count rows.
WITH_VMAP = DROPLESS if keras.backend.backend() == "jax" else {}


def problem(kind):
    """A loss of inputs and weights, those, and a direction for each."""
    keras.utils.set_random_seed(0)
    layer = (LAYERS | DROPLESS)[kind]()
    layer.build((None, *SHAPE[1:]))
    randomize(layer)
    variables = layer.trainable_variables
    target = normal(SHAPE, seed=2)

    def loss(x, *values):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            error = keras.ops.subtract(layer(x), target[: x.shape[0]])
        return keras.ops.mean(keras.ops.square(error))

    arrays = [normal(SHAPE), *(to_numpy(v) for v in variables)]
    directions = [normal(x.shape, seed=i) for i, x in enumerate(arrays)]
    return loss, arrays, [d / np.float32(np.sqrt(d.size)) for d in directions]


@pytest.mark.parametrize("kind", LAYERS)
def test_forward_mode_and_second_order(kind):
    loss, arrays, directions = problem(kind)
    _, gradients = value_and_gradients(loss, arrays)
    expected = sum(map(np.vdot, gradients, directions))
    np.testing.assert_allclose(slope(loss, arrays, directions), expected, rtol=1e-4)

    expected = difference(
        lambda arrays: value_and_gradients(loss, arrays)[1], arrays, directions
    )
    assert max(np.abs(x).max() for x in expected) > 0.01
    for found in changes_of_gradients(loss, arrays, directions):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, **TOLERANCE)


@pytest.mark.parametrize("kind", DROPLESS)
@only_on("jax", "torch", because="own loop")
def test_without_capacity(kind):
    loss, arrays, directions = problem(kind)
    if keras.backend.backend() == "jax":
        forward = pytest.raises(TypeError, match="forward-mode.*custom_vjp")
        second = pytest.raises(NotImplementedError, match="no second derivative on JAX")
    else:
        forward = second = pytest.raises(NotImplementedError, match="forward AD")
    with forward:
        slope(loss, arrays, directions)
    with second:
        changes_of_gradients(loss, arrays, directions)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", LAYERS | WITH_VMAP)
@only_on("jax", "torch", because="own loop")
def test_gradients_of_each_image(kind):
    loss, (x, *weights), _ = problem(kind)
    found = gradients_of_each(lambda x, *weights: loss(x[None], *weights), x, weights)
    for number in range(len(x)):
        _, expected = value_and_gradients(loss, [x[number : number + 1], *weights])
        for one, other in zip(found, expected[1:], strict=True):
            assert_near(one[number], other, rtol=1e-3, atol=1e-5)
