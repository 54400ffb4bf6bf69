"""Operators of mixtures on PyTorch: how many, and none that copies or waits.

On an accelerator each operator takes its time, a tensor of numbers of Python is a copy
to it, and a number that is read back is a wait. All are counted on any machine.
"""

import keras
import numpy as np
import pytest
import torch

from keras_softmoe import layers, routers
from keras_softmoe.layers.pooling import TEXT_POOLINGS, pool
from keras_softmoe.ops.numbers import Constant, normal_like, uniform
from tests.support import operators, tiny, tiny_limoe
from tests.support.processes import Program
from tests.support.references import assert_all_equal, to_numpy

# Router, training, most operators in a call of `MoE`
MOST = [
    ("token choice", False, 60),
    ("token choice", True, 90),
    ("priority max", False, 70),
    ("dropless", False, 60),
    ("dropless", True, 85),
    ("expert choice", False, 45),
    ("expert choice", True, 45),
    ("soft", False, 40),
    ("soft", True, 40),
    ("sinkhorn expert choice", False, 200),
    ("sparse transport", False, 400),
    ("sparse transport", True, 400),
    ("race", False, 50),
    ("race", True, 110),
]
# Arguments of a count, whether there is a mask, and images of a group
STEP = {"training": True, "gradient": True}
MODES = [({}, False, 1), ({}, True, 3), (STEP, False, 3), (STEP, True, 1)]
SCOPES = (False, True)


@pytest.mark.parametrize("name, training, most", MOST)
def test_number_of_operators(name, training, most):
    layer, known = operators.made(name)
    x, _ = operators.tokens()
    assert operators.count(layer, x, training=training, **known).total <= most


def check(found):
    assert found.copies == [] and found.waits == []
    assert found.total


@pytest.mark.parametrize("name", operators.MIXTURES)
def test_no_copies_and_no_waits(name):
    x, mask = operators.tokens()
    layer, known = operators.made(name)
    for settings, is_masked, group_images in MODES:
        layer.group_images = group_images
        of_mask = {"mask": mask} if is_masked else {}
        check(operators.count(layer, x, **settings, **of_mask, **known))


ROUTERS = {
    "soft": routers.SoftRouter(4),
    "token choice": routers.SoftmaxTokenChoiceRouter(4, 2, priority="max"),
    "dropless": routers.SoftmaxTokenChoiceRouter(4, capacity_factor=None),
    "expert choice": routers.SoftmaxExpertChoiceRouter(4),
    "race": routers.ExpertRaceRouter(4),
}


@pytest.mark.parametrize("training", SCOPES)
@pytest.mark.parametrize("name", ROUTERS)
def test_image_models(name, training):
    model = tiny.classifier(router=ROUTERS[name], group_images=2)
    images = np.float32(tiny.pixels(3)) / 255
    check(operators.count(model, images, training=training, gradient=training))


@pytest.mark.parametrize("pooling", ["token", "first", "gap", "map"])
def test_image_pooling(pooling):
    model = tiny.backbone(pooling=pooling)
    images = np.float32(tiny.pixels(3)) / 255
    check(operators.count(model, images, training=True, gradient=True))


@pytest.mark.parametrize("name", TEXT_POOLINGS)
def test_text_pooling(name):
    attention = layers.AttentionPooling(num_heads=2, mlp_dim=8)
    check(
        operators.count(
            lambda x, mask: pool(x, name, attention, mask), *operators.tokens()
        )
    )


@pytest.mark.parametrize("training", SCOPES)
def test_pair_models(training):
    model = tiny_limoe.backbone()
    pairs = {k: np.asarray(v) for k, v in tiny_limoe.pairs().items()}
    check(operators.count(model, pairs, training=training, gradient=training))


def test_draws_are_those_of_keras():
    x, seed = torch.zeros((2, 3)), keras.random.SeedGenerator(3)
    other = keras.random.SeedGenerator(3)
    for draw in range(4):
        if draw == 2:
            # Another program has changed the state.
            seed.state.assign([7, 1])
            other.state.assign([7, 1])
        found = normal_like(x, seed, 0.5), uniform((2, 3), x, seed)
        expected = (
            keras.random.normal((2, 3), stddev=0.5, seed=other),
            keras.random.uniform((2, 3), seed=other),
        )
        assert_all_equal((*found, seed.state), (*expected, other.state))


def test_draws_of_a_stateless_call():
    layer = layers.MoE(routers.SoftRouter(2, noise_std=1.0), mlp_dim=4)
    x = np.ones((1, 3, 4), "float32")
    layer(x, training=True)
    weights, others = layer.trainable_variables, layer.non_trainable_variables
    values = [[v.numpy() for v in part] for part in (weights, others)]
    first, state = layer.stateless_call(*values, x, training=True)
    again, _ = layer.stateless_call(*values, x, training=True)
    np.testing.assert_array_equal(to_numpy(first), to_numpy(again))
    # The state is returned, and that of the layer stays.
    assert int(to_numpy(state[-1])[1]) == int(values[1][-1][1]) + 1
    np.testing.assert_array_equal(to_numpy(others[-1]), values[1][-1])


def test_constants_are_copied_once():
    constant, x = Constant(np.arange(3)), torch.zeros(1)
    assert constant.on(x) is constant.on(x)
    np.testing.assert_array_equal(to_numpy(constant.on(x)), [0, 1, 2])


def test_one_device():
    """Everything is made on the device of the inputs, here one without memory."""
    code, output = Program("tests.support.one_device").wait()
    assert code == 0 and "all on one device" in output, output
