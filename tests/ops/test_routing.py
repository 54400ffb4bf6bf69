"""The two views of a routing: slot indices, and the dense weights they stand for."""

import keras
import numpy as np
import pytest

from keras_softmoe import ops
from tests.support import cases, twins
from tests.support.close import assert_near
from tests.support.gradients import value_and_gradients
from tests.support.references import to_numpy

# (G, S, E, C)
SHAPES = [(1, 1, 1, 1), (2, 6, 3, 2), (2, 3, 5, 4)]


def random_slots(shape, seed=0):
    """Token, filled, gate (G, E, C) with empty slots, and no slot twice the same."""
    num_groups, num_tokens, num_experts, capacity = shape
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(num_groups, num_tokens, num_experts))
    valid = cases.padding(scores.shape[:2], 1)
    token, filled = twins.expert_choice(scores, capacity, valid)
    gate = np.where(filled, rng.uniform(0.1, 1.0, size=filled.shape), 0.0)
    return token, filled, gate.astype("float32")


def slot_routing(slots):
    return ops.SlotRouting(*map(keras.ops.convert_to_tensor, slots))


@pytest.mark.parametrize("shape", SHAPES)
def test_to_dense_is_the_definition(shape):
    slots = random_slots(shape)
    dense = ops.to_dense(slot_routing(slots), shape[1])
    for actual, expected in zip(dense, twins.to_dense(*slots, shape[1]), strict=True):
        np.testing.assert_allclose(to_numpy(actual), expected, rtol=1e-6)


@pytest.mark.parametrize("view", ["slots", "dense"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dispatch_and_combine(shape, view):
    slots = random_slots(shape)
    rng = np.random.default_rng(1)
    tokens = rng.normal(size=(*shape[:2], 4)).astype("float32")
    outputs = rng.normal(size=(*slots[0].shape, 4)).astype("float32")
    dispatch, combine = twins.to_dense(*slots, shape[1])

    routing = slot_routing(slots)
    if view == "dense":
        routing = ops.DenseRouting(
            *(keras.ops.convert_to_tensor(w, "float32") for w in (dispatch, combine))
        )
    assert_near(
        to_numpy(ops.dispatch(tokens, routing)),
        twins.dispatch_tokens(tokens, dispatch),
        rtol=1e-5,
        atol=1e-6,
    )
    assert_near(
        to_numpy(ops.combine(keras.ops.convert_to_tensor(outputs), routing, shape[1])),
        twins.combine_outputs(outputs, combine),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_gather_and_dense_have_the_same_gradients(shape):
    token, filled, gate = random_slots(shape)
    rng = np.random.default_rng(1)
    tokens = rng.normal(size=(*shape[:2], 4)).astype("float32")
    cotangent = keras.ops.convert_to_tensor(rng.normal(size=tokens.shape), "float32")

    def loss(dense):
        def fn(tokens, gate):
            routing = slot_routing((token, filled, gate))
            if dense:
                routing = ops.to_dense(routing, shape[1])
            slots = keras.ops.sin(ops.dispatch(tokens, routing))
            outputs = ops.combine(slots, routing, shape[1])
            return keras.ops.sum(outputs * cotangent)

        return fn

    value, gradients = value_and_gradients(loss(False), [tokens, gate])
    expected_value, expected = value_and_gradients(loss(True), [tokens, gate])
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert_near(gradients[0], expected[0], rtol=1e-5, atol=1e-6)
    # The gate of an empty slot is 0 by definition, not a number to be learned.
    assert_near(
        np.where(filled, gradients[1], 0.0),
        np.where(filled, expected[1], 0.0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_bfloat16_tokens_stay_bfloat16():
    shape = SHAPES[1]
    routing = slot_routing(random_slots(shape))
    tokens = np.random.default_rng(0).normal(size=(2, 6, 4))
    tokens = keras.ops.convert_to_tensor(tokens, "bfloat16")
    for view in (routing, ops.to_dense(routing, 6)):
        slots = ops.dispatch(tokens, view)
        outputs = ops.combine(slots, view, 6)
        assert keras.backend.standardize_dtype(slots.dtype) == "bfloat16"
        assert keras.backend.standardize_dtype(outputs.dtype) == "bfloat16"
        dense = twins.to_dense(*random_slots(shape), 6)
        expected = twins.combine_outputs(
            twins.dispatch_tokens(to_numpy(tokens), dense[0]), dense[1]
        )
        assert_near(to_numpy(outputs), expected, rtol=0.03, atol=0.03)


def test_empty_slot_is_zero():
    # An empty slot points at token 0, which must not leak into it.
    token = np.zeros((1, 2, 1), "int32")
    filled = np.array([[[False], [True]]])
    routing = slot_routing((token, filled, filled.astype("float32")))
    slots = to_numpy(ops.dispatch(np.full((1, 3, 2), 7.0, "float32"), routing))
    np.testing.assert_array_equal(slots[0, :, 0], [[0.0, 0.0], [7.0, 7.0]])
