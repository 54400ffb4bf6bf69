"""Losses of routers and of image and text pairs equal their twins.

Tests `ops/contrastive.py`, too.
"""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from hypothesis import given

from keras_softmoe import ops
from keras_softmoe.ops import contrastive
from tests.support import cases, limoe_router_twin, twins
from tests.support.close import assert_near, assert_sum_near
from tests.support.gradients import value_and_gradients
from tests.support.references import Reference, to_numpy


def assert_close(actual, expected, tolerance=2e-5):
    actual = to_numpy(actual)
    assert actual.shape == expected.shape
    assert_near(actual, expected, rtol=tolerance, atol=tolerance)


@given(logits=cases.scores(), seed=cases.seeds)
def test_losses_of_probabilities(logits, seed):
    probs = twins.softmax(logits).astype("float32")
    valid = cases.padding(logits.shape[:2], seed)
    for name in ("importance_loss", "gshard_loss"):
        actual = getattr(ops, name)(probs, valid=valid)
        assert_close(actual, getattr(twins, name)(probs, valid))


@given(logits=cases.scores(), seed=cases.seeds)
def test_z_loss(logits, seed):
    valid = cases.padding(logits.shape[:2], seed)
    assert_close(ops.z_loss(logits, valid=valid), twins.z_loss(logits, valid))


@given(
    logits=cases.scores(flavours=["normal", "ties", "equal", "zero"]),
    num_selected_experts=st.sampled_from([1, 2]),
    noise_std=st.sampled_from([0.25, 1.0]),
    seed=cases.seeds,
)
def test_load_loss(logits, num_selected_experts, noise_std, seed):
    num_selected_experts = min(num_selected_experts, logits.shape[-1])
    noise = cases.array("normal", logits.shape, seed)
    noisy = logits + np.float32(noise_std) * noise
    valid = cases.padding(logits.shape[:2], seed)
    actual = ops.load_loss(
        *map(keras.ops.convert_to_tensor, (logits, noisy)),
        num_selected_experts,
        noise_std,
        valid=valid,
    )
    expected = twins.load_loss(logits, noisy, num_selected_experts, noise_std, valid)
    assert_close(actual, expected)


@given(logits=cases.scores(flavours=["normal", "ties", "zero"]), seed=cases.seeds)
def test_router_similarity_loss(logits, seed):
    probs = twins.softmax(logits).astype("float32")
    chosen = np.random.default_rng(seed).random(logits.shape) < 0.4
    valid = cases.padding(logits.shape[:2], seed)
    actual = ops.router_similarity_loss(probs, chosen, valid=valid)
    assert_close(actual, twins.router_similarity_loss(probs, chosen, valid))


def test_similar_experts():
    # Every token has both experts: all weights are 1, and all products are 1/4.
    even, both = np.full((1, 6, 2), 0.5, "float32"), np.ones((1, 6, 2), bool)
    assert_close(ops.router_similarity_loss(even, both), np.array([1.0]))
    # Always the first expert, surely: a weight of 2 on a product of 1, and no pairs.
    first = np.tile(np.array([True, False]), (1, 6, 1))
    collapsed = first.astype("float32")
    assert_close(ops.router_similarity_loss(collapsed, first), np.array([2.0]))


def test_balanced_and_collapsed():
    # Two experts, each with half of every token: sums are equal, so no variation; the
    # fraction of first choices is (1, 0) by the tie rule, times (1/2, 1/2), averaged
    # over the experts and times 4: 1.
    even = np.full((1, 6, 2), 0.5, "float32")
    assert_close(ops.importance_loss(even), np.array([0.0]))
    assert_close(ops.gshard_loss(even), np.array([1.0]))
    # All on one expert: sums (6, 0), mean 3, standard deviation 3.
    collapsed = np.tile(np.array([1.0, 0.0], "float32"), (1, 6, 1))
    assert_close(ops.importance_loss(collapsed), np.array([1.0]))
    assert_close(ops.gshard_loss(collapsed), np.array([2.0]))
    # logsumexp(0, 0) = log 2.
    assert_close(ops.z_loss(np.zeros((1, 6, 2), "float32")), np.log([2.0]) ** 2)


@pytest.mark.parametrize("name", ["importance_loss", "gshard_loss"])
def test_bfloat16_probabilities(name):
    probs = twins.softmax(cases.array("normal", (2, 8, 4), 0))
    rounded = keras.ops.convert_to_tensor(probs, "bfloat16")
    # A loss is computed in float32 from whatever it is given.
    assert_close(
        keras.ops.cast(getattr(ops, name)(rounded), "float32"),
        getattr(twins, name)(to_numpy(rounded)),
        tolerance=1e-2,
    )


@pytest.mark.parametrize("flavour", ["normal", "zero", "huge"])
def test_gradients_are_finite(flavour):
    logits = cases.array(flavour, (2, 8, 4), 0)

    def fn(logits):
        probs = keras.ops.softmax(logits)
        losses = [
            ops.importance_loss(probs),
            ops.gshard_loss(probs),
            ops.z_loss(logits) * 1e-6,
            ops.load_loss(logits, logits + 0.1, 2, 0.5),
        ]
        return sum(keras.ops.sum(loss) for loss in losses)

    value, (gradient,) = value_and_gradients(fn, [logits])
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [1e18, 1e30])
def test_losses_of_large_logits(scale, masked):
    logits = cases.array("normal", (2, 8, 4), 0) * np.float32(scale)
    # Nothing of the second group is real.
    valid = np.array([[True, False] * 4, [False] * 8]) if masked else None

    def fn(logits):
        mask = None if valid is None else keras.ops.convert_to_tensor(valid)
        probs = keras.ops.softmax(logits)
        losses = [
            ops.importance_loss(probs, mask),
            ops.gshard_loss(probs, mask),
            ops.load_loss(logits, logits + 0.1, 2, 0.5, mask),
            ops.local_entropy_loss(probs, mask),
            ops.merged_entropy_loss(probs, 2, mask),
            ops.global_entropy_loss(probs, 1.0, mask),
        ]
        return sum(keras.ops.sum(loss) for loss in losses)

    def z_loss(logits):
        mask = None if valid is None else keras.ops.convert_to_tensor(valid)
        return keras.ops.sum(ops.z_loss(logits, mask))

    value, (gradient,) = value_and_gradients(fn, [logits])
    assert np.isfinite(value) and np.isfinite(gradient).all()
    # The square of more than 1.8e19 is infinite, its gradient is not.
    value, (gradient,) = value_and_gradients(z_loss, [logits])
    assert np.isfinite(value) == (scale < 1e19)
    assert np.isfinite(gradient).all()


def test_gshard_gradient_leaves_the_fraction_alone():
    # E^2 * mean_e(f_e * mean_s p_se): the derivative for p_se is E f_e / S.
    probs = twins.softmax(cases.array("normal", (1, 8, 4), 0)).astype("float32")
    _, (gradient,) = value_and_gradients(
        lambda p: keras.ops.sum(ops.gshard_loss(p)), [probs]
    )
    fraction = (probs.argmax(-1)[..., None] == np.arange(4)).mean(1, keepdims=True)
    expected = np.repeat(4 * fraction / 8, 8, axis=1)
    assert_near(gradient, expected, rtol=1e-5, atol=1e-7)


def probabilities(logits):
    return twins.softmax(logits).astype("float32")


@given(
    logits=cases.scores(),
    num_selected_experts=st.sampled_from([1, 2]),
    share=st.sampled_from([-0.2, 0.0, 0.5, 1.0]),
    seed=cases.seeds,
)
def test_entropy_losses(logits, num_selected_experts, share, seed):
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
        assert_close(actual, getattr(limoe_router_twin, name)(probs, *arguments, valid))


@given(flavour=st.sampled_from(["normal", "equal", "huge"]), seed=cases.seeds)
def test_mutual_information(flavour, seed):
    # Modalities of different length.
    probs = [
        probabilities(cases.array(flavour, (2, length, 4), seed + length))
        for length in (8, 3)
    ]
    valid = [cases.padding(p.shape[:2], seed) for p in probs]
    actual = ops.mutual_information_loss(probs, valid)
    assert_close(actual, limoe_router_twin.mutual_information_loss(probs, valid))
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
    "local": (ops.local_entropy_loss, limoe_router_twin.local_entropy_loss),
    "target": (
        lambda p: ops.target_entropy_loss(p, 2),
        lambda p: limoe_router_twin.target_entropy_loss(p, 2),
    ),
    "merged": (
        lambda p: ops.merged_entropy_loss(p, 2),
        lambda p: limoe_router_twin.merged_entropy_loss(p, 2),
    ),
    "global": (
        lambda p: ops.global_entropy_loss(p, 1.38),
        lambda p: limoe_router_twin.global_entropy_loss(p, 1.38),
    ),
    "mutual information": (
        lambda p: ops.mutual_information_loss([p[:, :5], p[:, 5:]]),
        lambda p: limoe_router_twin.mutual_information_loss(
            [p[:, :5], p[:, 5:]], [None, None]
        ),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_entropy_losses(name):
    ours, twin = LOSSES[name]
    probs = probabilities(cases.array("normal", (2, 8, 4), 0))
    _, (gradient,) = value_and_gradients(lambda p: keras.ops.sum(ours(p)), [probs])
    for direction in np.random.default_rng(0).normal(size=(3, *probs.shape)):
        step = 1e-6 * direction
        up, down = (twin(np.float64(probs) + s).sum() for s in (step, -step))
        terms = gradient * direction
        assert_sum_near(terms, (up - down) / 2e-6, rtol=1e-3, atol=1e-5)


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


CONTRASTIVE_LOSSES = ["softmax_contrastive_loss", "sigmoid_contrastive_loss"]


def logits(scale=1.0):
    return (scale * np.random.default_rng(0).normal(size=(5, 5))).astype("float32")


@pytest.mark.parametrize("name", CONTRASTIVE_LOSSES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_contrastive_losses(name, scale):
    actual = to_numpy(getattr(contrastive, name)(logits(scale)))
    expected = getattr(limoe_router_twin, name)(logits(scale))
    assert actual.shape == (5,)
    assert_near(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CONTRASTIVE_LOSSES)
def test_gradients_of_contrastive_losses(name):
    ours, twin = getattr(contrastive, name), getattr(limoe_router_twin, name)
    _, (gradient,) = value_and_gradients(lambda x: keras.ops.sum(ours(x)), [logits()])
    for direction in np.random.default_rng(1).normal(size=(3, 5, 5)):
        step = 1e-6 * direction
        up, down = (twin(np.float64(logits()) + s).sum() for s in (step, -step))
        np.testing.assert_allclose(
            (gradient * direction).sum(), (up - down) / 2e-6, rtol=1e-4
        )


@pytest.mark.parametrize("name", CONTRASTIVE_LOSSES)
def test_large_similarities_are_safe(name):
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


@pytest.mark.parametrize("name", CONTRASTIVE_LOSSES)
@pytest.mark.parametrize("shape", [(4, 3), (1, 1), (4,), (2, 3, 3)])
def test_bad_shapes_are_named(name, shape):
    with pytest.raises(ValueError, match="Received: logits of shape"):
        getattr(contrastive, name)(np.zeros(shape, "float32"))
