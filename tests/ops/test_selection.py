"""Padding reaches no result and no gradient; noise is that of Keras.

Tests `ops/selection.py` and `ops/numbers.py`.
"""

import keras
import numpy as np
import pytest

from keras_softmoe import ops
from keras_softmoe.ops.numbers import normal_like
from tests.skips import only_on
from tests.support import twins
from tests.support.close import assert_near
from tests.support.gradients import value_and_gradients
from tests.support.references import assert_all_equal, to_numpy

SHAPE = (2, 6, 4)
VALID = np.array([[True, False, True, True, False, True], [False] * 2 + [True] * 4])
# The same tokens for each group, as a modality's are given.
SAME = np.array([[True, False, True, True, False, True]])
PADDING = {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf}

# Name -> function of scores and mask whose results say nothing of padding.
DIFFERENTIABLE = {
    "importance_loss": ops.importance_loss,
    "gshard_loss": ops.gshard_loss,
    "z_loss": ops.z_loss,
    "load_loss": lambda x, valid: ops.load_loss(x, 0.5 * x, 2, 0.5, valid),
    "local_entropy_loss": ops.local_entropy_loss,
    "target_entropy_loss": lambda x, valid: ops.target_entropy_loss(x, 2, valid),
    "merged_entropy_loss": lambda x, valid: ops.merged_entropy_loss(x, 2, valid),
    "global_entropy_loss": lambda x, valid: ops.global_entropy_loss(x, 1.3, valid),
    "mutual_information_loss": lambda x, valid: ops.mutual_information_loss(
        [x, x[:, :3]], [valid, valid[:, :3]]
    ),
    "sinkhorn_plan": lambda x, valid: ops.sinkhorn_plan(x, 6, valid),
}


def probabilities():
    scores = np.random.default_rng(0).normal(size=SHAPE)
    return twins.softmax(scores).astype("float32")


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_values_and_gradients(name, padding):
    weights = np.linspace(1.0, 2.0, SHAPE[-1], dtype="float32")

    def fn(x):
        # Not a plain sum, which of a plan is a constant.
        found = DIFFERENTIABLE[name](x, keras.ops.convert_to_tensor(VALID))
        found = keras.ops.square(found)
        return keras.ops.sum(
            keras.ops.multiply(found, weights) if len(found.shape) > 1 else found
        )

    x = probabilities()
    expected, (of_zeros,) = value_and_gradients(
        fn, [np.where(VALID[..., None], x, 0.0)], compiled=False
    )
    x[~VALID] = PADDING[padding]
    value, (gradient,) = value_and_gradients(fn, [x], compiled=False)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_near(gradient, of_zeros, atol=1e-6)
    assert of_zeros[VALID].any()
    assert not gradient[~VALID].any()


@pytest.mark.parametrize("name", ["local_entropy_loss", "gshard_loss"])
def test_one_mask_for_all_groups(name):
    x = probabilities()
    expected = to_numpy(DIFFERENTIABLE[name](x[:, SAME[0]], None))
    x[:, ~SAME[0]] = np.nan
    np.testing.assert_allclose(
        to_numpy(DIFFERENTIABLE[name](x, keras.ops.convert_to_tensor(SAME))),
        expected,
        rtol=1e-5,
    )


NUMBERS = np.random.default_rng(1).normal(size=SHAPE[:2]).astype("float32")
ASSIGNMENTS = {
    **{
        priority: lambda x, valid, priority=priority: ops.token_choice(
            x, 2, 2, priority, valid, keep_fraction=0.8, seed=1
        )
        for priority in ("position", "max", "sum", "pair", "random")
    },
    "numbers": lambda x, valid: ops.token_choice(
        x, 2, 2, np.where(valid, NUMBERS, x[..., 0]), valid
    ),
    "expert_choice": lambda x, valid: ops.expert_choice(x, 3, valid),
    "sparse_transport_plan": lambda x, valid: (
        ops.sparse_transport_plan(x, 2, 5, valid=valid),
    ),
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_assignments(name, padding):
    x = probabilities()
    zeros = np.where(VALID[..., None], x, np.float32(0))
    x[~VALID] = PADDING[padding]
    expected = ASSIGNMENTS[name](zeros, VALID)
    assert_all_equal(ASSIGNMENTS[name](x, VALID), expected)


@pytest.mark.parametrize("priority", ["max", "pair"])
def test_order_of_many_tokens(priority):
    """TensorFlow sorts no numbers rightly among which there is a NaN."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 300, 4)).astype("float32")
    valid = rng.random((1, 300)) < 0.7
    zeros = np.where(valid[..., None], x, np.float32(0))
    expected = twins.token_choice(zeros, 1, 30, priority, valid)
    x[~valid] = np.nan
    assert_all_equal(ops.token_choice(x, 1, 30, priority, valid), expected)


def expected(shape, calls):
    seed = keras.random.SeedGenerator(3)
    return [to_numpy(keras.random.normal(shape, seed=seed)) for _ in range(calls)]


def test_the_numbers_of_keras():
    x, seed = keras.ops.zeros((2, 3)), keras.random.SeedGenerator(3)
    for values in expected((2, 3), 2):
        np.testing.assert_array_equal(to_numpy(normal_like(x, seed)), values)


@only_on("torch", because="own loop")
def test_one_graph():
    import torch

    torch._dynamo.reset()
    x, seed = keras.ops.zeros((2, 3)), keras.random.SeedGenerator(3)
    state = seed.state.value

    @torch.compile(fullgraph=True, backend="aot_eager")
    def draw(x):
        return normal_like(x, seed)

    for values in expected((2, 3), 3):
        np.testing.assert_array_equal(to_numpy(draw(x)), values)
    assert int(state[1]) == 3
