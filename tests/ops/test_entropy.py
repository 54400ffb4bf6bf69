"""LIMoE's entropy losses: twins, identities, gradients, errors."""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from hypothesis import given

from keras_softmoe import ops
from tests import cases, limoe_twins, twins
from tests.gradients import value_and_gradients
from tests.references import to_numpy


def probabilities(logits):
    return twins.softmax(logits).astype("float32")


def assert_close(actual, expected):
    actual = to_numpy(actual)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@given(
    logits=cases.scores(),
    num_selected_experts=st.sampled_from([1, 2]),
    share=st.sampled_from([-0.2, 0.0, 0.5, 1.0]),
    seed=cases.seeds,
)
def test_twins(logits, num_selected_experts, share, seed):
    probs = probabilities(logits)
    valid = cases.padding(logits.shape[:2], seed)
    num_experts = logits.shape[-1]
    count = min(num_selected_experts, num_experts)
    threshold = share * np.log(num_experts)
    for name, arguments in (
        ("local_entropy_loss", ()),
        ("target_entropy_loss", (count,)),
        ("merged_entropy_loss", (count,)),
        ("global_entropy_loss", (threshold,)),
    ):
        actual = getattr(ops, name)(probs, *arguments, valid=valid)
        assert_close(actual, getattr(limoe_twins, name)(probs, *arguments, valid))


@given(flavour=st.sampled_from(["normal", "equal", "huge"]), seed=cases.seeds)
def test_mutual_information(flavour, seed):
    # Modalities of different length.
    probs = [
        probabilities(cases.array(flavour, (2, length, 4), seed + length))
        for length in (8, 3)
    ]
    valid = [cases.padding(p.shape[:2], seed) for p in probs]
    actual = ops.mutual_information_loss(probs, valid)
    assert_close(actual, limoe_twins.mutual_information_loss(probs, valid))
    assert np.all(to_numpy(actual) <= 1e-6)
    assert np.all(to_numpy(actual) >= -np.log(2) - 1e-6)


def test_mutual_information_of_equal_and_of_disjoint_routing():
    alike = probabilities(cases.array("normal", (2, 8, 4), 0))
    assert_close(ops.mutual_information_loss([alike, alike]), np.zeros(2))
    # Three modalities, each with an expert of its own.
    apart = [np.tile(np.eye(4, dtype="float32")[m], (2, 5, 1)) for m in range(3)]
    assert_close(ops.mutual_information_loss(apart), np.full(2, -np.log(3)))


def test_values_by_hand():
    even = np.full((1, 6, 4), 0.25, "float32")
    sure = np.tile(np.eye(4, dtype="float32"), (1, 2, 1))
    assert_close(ops.local_entropy_loss(even), np.log([4.0]))
    assert_close(ops.local_entropy_loss(sure), np.zeros(1))
    assert_close(ops.target_entropy_loss(sure, 2), np.log([2.0]) ** 2)
    # Two of four experts have half of the weight.
    assert_close(ops.merged_entropy_loss(even, 2), np.log([2.0]))
    assert_close(ops.merged_entropy_loss(even, 4), np.zeros(1))
    # Sure tokens, evenly spread: all four experts are in use.
    assert_close(ops.global_entropy_loss(sure, np.log(4)), np.zeros(1))
    assert_close(ops.global_entropy_loss(sure[:, :1], np.log(4)), np.log([4.0]))


LOSSES = {
    "local": (ops.local_entropy_loss, limoe_twins.local_entropy_loss),
    "target": (
        lambda p: ops.target_entropy_loss(p, 2),
        lambda p: limoe_twins.target_entropy_loss(p, 2),
    ),
    "merged": (
        lambda p: ops.merged_entropy_loss(p, 2),
        lambda p: limoe_twins.merged_entropy_loss(p, 2),
    ),
    "global": (
        lambda p: ops.global_entropy_loss(p, 1.38),
        lambda p: limoe_twins.global_entropy_loss(p, 1.38),
    ),
    "mutual information": (
        lambda p: ops.mutual_information_loss([p[:, :5], p[:, 5:]]),
        lambda p: limoe_twins.mutual_information_loss(
            [p[:, :5], p[:, 5:]], [None, None]
        ),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name):
    ours, twin = LOSSES[name]
    probs = probabilities(cases.array("normal", (2, 8, 4), 0))
    _, (gradient,) = value_and_gradients(lambda p: keras.ops.sum(ours(p)), [probs])
    for direction in np.random.default_rng(0).normal(size=(3, *probs.shape)):
        step = 1e-6 * direction
        up, down = (twin(np.float64(probs) + s).sum() for s in (step, -step))
        np.testing.assert_allclose(
            (gradient * direction).sum(), (up - down) / 2e-6, rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("soft_minimum", [0.2, 0.8, 1.0])
def test_one_expert_is_always_used(soft_minimum):
    # So to ask for less is to ask for nothing: zero even if all tokens agree.
    probs = probabilities(cases.array("normal", (2, 8, 4), 0))
    probs[1] = np.eye(4)[2]
    losses, (gradient,) = value_and_gradients(
        lambda p: keras.ops.sum(ops.global_entropy_loss(p, np.log(soft_minimum))),
        [probs],
    )
    assert to_numpy(losses) == 0.0
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_finite_where_a_probability_is_zero(name):
    sure = np.tile(np.eye(4, dtype="float32"), (1, 2, 1))
    ours, _ = LOSSES[name]
    _, (gradient,) = value_and_gradients(lambda p: keras.ops.sum(ours(p)), [sure])
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize(
    "call, received",
    [
        (lambda p: ops.global_entropy_loss(p, 1.5), "threshold=1.5"),
        (lambda p: ops.global_entropy_loss(p, -np.inf), "threshold=-inf"),
        (lambda p: ops.global_entropy_loss(p, np.nan), "threshold=nan"),
        (lambda p: ops.target_entropy_loss(p, 5), "5"),
        (lambda p: ops.merged_entropy_loss(p, 0), "0"),
        (lambda p: ops.mutual_information_loss([]), "0 modalities"),
        (lambda p: ops.mutual_information_loss([p, p], [None]), "1 masks"),
    ],
)
def test_bad_arguments_are_named(call, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        call(np.full((1, 8, 4), 0.25, "float32"))
