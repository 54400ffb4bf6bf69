"""Transport plans: marginals, sparsity, and the twins' numbers."""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from hypothesis import given, settings

from keras_softmoe import ops
from tests.support import cases, twins
from tests.support.close import assert_near
from tests.support.gradients import value_and_gradients
from tests.support.references import to_numpy

pytestmark = pytest.mark.usefixtures("quick_loops")


@given(logits=cases.scores(), num_iterations=st.sampled_from([1, 20]), seed=cases.seeds)
def test_sinkhorn_plan(logits, num_iterations, seed):
    valid = cases.padding(logits.shape[:2], seed)
    plan = to_numpy(ops.sinkhorn_plan(logits, num_iterations, valid=valid))
    assert plan.dtype == np.float32
    expected = twins.sinkhorn_plan(logits, num_iterations, valid)
    # Float32 resolves logits of 1e4 to 1e-3, and a plan is their exponential.
    tolerance = 1e-2 if np.abs(logits).max() > 1e3 else 2e-5
    assert_near(plan, expected, rtol=tolerance, atol=tolerance)
    # Rows are scaled last: every token hands out exactly its mass of 1.
    rows = np.ones(logits.shape[:2]) if valid is None else valid
    assert_near(plan.sum(-1), rows, rtol=tolerance, atol=tolerance)


# Differences of logits this large are lost in rounding.
LARGE = [1e4, 1e6, 1e8, 1e18, 1e30, np.finfo("float32").max]

# The second group has padding, the third nothing else.
WITH_PADDING = np.array([[True] * 8, [True, False] * 4, [False] * 8])


def large(flavour, scale, shape=(3, 8, 4)):
    rng = np.random.default_rng(0)
    values = {
        "spread": lambda: rng.uniform(-1, 1, shape),
        "by token": lambda: rng.uniform(-1, 1, (*shape[:2], 1)) + np.zeros(shape),
        "by expert": lambda: rng.uniform(-1, 1, (1, 1, shape[2])) + np.zeros(shape),
        "extremes": lambda: rng.choice([-1.0, 1.0], shape),
    }
    return (values[flavour]() * scale).astype("float32")


@pytest.mark.parametrize("scale", LARGE)
@pytest.mark.parametrize("flavour", ["spread", "by token", "by expert", "extremes"])
def test_plans_of_large_logits(flavour, scale):
    logits = large(flavour, scale)
    for valid in (None, WITH_PADDING):
        real = np.ones((3, 8)) if valid is None else valid
        plan = to_numpy(ops.sinkhorn_plan(logits, valid=valid))
        assert plan.min() >= 0 and plan.max() <= 1 + 1e-5
        # Of padding alone it is empty.
        assert_near(plan.sum(-1), real, atol=1e-5)
        plan = to_numpy(ops.sparse_transport_plan(logits, 3, valid=valid))
        assert plan.min() >= 0 and ((plan > 0).sum(1) <= 3).all()
        assert not plan[real == 0].any()
        mass = np.repeat(real.sum(1, keepdims=True) / 4, 4, axis=1)
        np.testing.assert_allclose(plan.sum(1), mass, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e6, 1e30])
def test_gradient_of_a_plan_of_large_logits(scale):
    weights = keras.ops.convert_to_tensor(cases.array("normal", (3, 8, 4), 1))
    valid = keras.ops.convert_to_tensor(WITH_PADDING)

    def fn(logits):
        return keras.ops.sum(ops.sinkhorn_plan(logits, valid=valid) * weights)

    _, (gradient,) = value_and_gradients(fn, [large("spread", scale)])
    assert np.isfinite(gradient).all()
    assert not gradient[~WITH_PADDING].any()


def test_large_logits_of_an_expert_change_no_plan():
    # A number that is added to all of them does not, and here none is rounded.
    logits = np.round(cases.array("normal", (2, 8, 4), 0) * 64) / 64
    moved = logits + np.array([0, 2**16, -(2**16), 2**10], "float32")
    found, expected = map(to_numpy, map(ops.sinkhorn_plan, (moved, logits)))
    assert_near(found, expected, rtol=1e-5, atol=1e-6)


def test_plans_are_computed_in_float32():
    logits = cases.array("normal", (2, 8, 4), 0)
    logits = keras.ops.convert_to_tensor(logits, "bfloat16")
    found = ops.sinkhorn_plan(logits), ops.sparse_transport_plan(logits, 8)
    rounded = to_numpy(keras.ops.cast(logits, "float32"))
    expected = ops.sinkhorn_plan(rounded), ops.sparse_transport_plan(rounded, 8)
    for one, two in zip(map(to_numpy, found), map(to_numpy, expected), strict=True):
        assert one.dtype == "float32"
        np.testing.assert_array_equal(one, two)


def test_sinkhorn_columns_converge():
    logits = cases.array("normal", (2, 8, 4), 0)
    plan = to_numpy(ops.sinkhorn_plan(logits, 200))
    np.testing.assert_allclose(plan.sum(1), 8 / 4, rtol=1e-5)


@settings(max_examples=8)
@given(
    shape=st.sampled_from([(2, 1, 3), (1, 3, 5), (2, 8, 4), (2, 6, 1)]),
    capacity=st.sampled_from([1, 3]),
    seed=cases.seeds,
)
def test_sparse_plan(shape, capacity, seed):
    scores = np.random.default_rng(seed).random(shape).astype("float32")
    valid = cases.padding(shape[:2], seed)
    plan = ops.sparse_transport_plan(scores, min(capacity, shape[1]), valid=valid)
    expected = twins.sparse_transport_plan(scores, capacity, valid=valid)
    assert_near(to_numpy(plan), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=10)
@given(scores=cases.scores(), capacity=st.sampled_from([1, 3]), seed=cases.seeds)
def test_sparse_plan_invariants(scores, capacity, seed):
    capacity = min(capacity, scores.shape[1])
    valid = cases.padding(scores.shape[:2], seed)
    plan = to_numpy(ops.sparse_transport_plan(scores, capacity, valid=valid))
    assert plan.dtype == np.float32
    assert np.all(plan >= 0)
    assert np.all((plan > 0).sum(1) <= capacity)
    kept = np.ones(scores.shape[:2], bool) if valid is None else valid
    assert np.all(plan[~kept] == 0)
    # Columns are exact, whatever the solver did: every expert carries its share.
    mass = kept.sum(1) / scores.shape[-1]
    tolerance = 1e-2 if np.abs(scores).max() > 1e3 else 1e-5
    np.testing.assert_allclose(
        plan.sum(1), np.repeat(mass[:, None], scores.shape[-1], 1), rtol=tolerance
    )


@pytest.mark.parametrize("num_experts", [3, 5])
def test_sparse_plan_takes_no_step_from_a_solution(num_experts):
    # Probabilities meet the token marginals at dual zero, capacity S, up to rounding:
    # and Adam makes a full step of any gradient.
    scores = np.random.default_rng(0).normal(0, 0.1, (2, 64, num_experts))
    scores = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    plan = ops.sparse_transport_plan(
        scores.astype("float32"), 64, num_iterations=1, learning_rate=0.05
    )
    assert_near(to_numpy(plan).sum(-1), 1.0, atol=1e-5)


def test_sparse_plan_converges_to_the_marginals():
    scores = np.random.default_rng(0).random((2, 8, 4)).astype("float32")
    plan = ops.sparse_transport_plan(scores, 8, num_iterations=1000, learning_rate=0.05)
    assert_near(to_numpy(plan).sum(-1), 1.0, atol=2e-3)


@pytest.mark.parametrize(
    "call",
    [
        lambda s: ops.sinkhorn_plan(s, 0),
        lambda s: ops.sparse_transport_plan(s, 0),
        lambda s: ops.sparse_transport_plan(s, 2, num_iterations=0),
    ],
)
def test_bad_arguments_are_named(call):
    with pytest.raises(ValueError, match="Received"):
        call(np.zeros((1, 8, 4), "float32"))
