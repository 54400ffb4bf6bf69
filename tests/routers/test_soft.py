"""The soft router and its ablations, against the twin."""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from hypothesis import given, settings

from keras_softmoe import routers
from tests.support import cases, twins
from tests.support.close import assert_near
from tests.support.gradients import layer_gradients
from tests.support.references import to_numpy

WIDTH = 4
# (G, S, E, C)
SHAPES = [(1, 1, 1, 1), (1, 3, 5, 2), (2, 8, 4, 1)]
VARIANTS = [(d, c) for d in ("soft", "uniform") for c in ("soft", "uniform")]


def build(shape, **kwargs):
    router = routers.SoftRouter(shape[2], slots_per_expert=shape[3], **kwargs)
    router.build((None, None, WIDTH))
    for weight in router.weights:
        # Not the initial 1, so that forgetting the scale shows.
        if weight.name == "scale":
            weight.assign(1.7)
    return router


def call(router, tokens, valid=None, **kwargs):
    if valid is not None:
        valid = keras.ops.convert_to_tensor(valid)
    decision = router(keras.ops.convert_to_tensor(tokens), valid=valid, **kwargs)
    return [to_numpy(w) for w in decision.routing]


def twin(router, tokens, valid=None, noise=0.0):
    shape = (tokens.shape[-1], router.num_experts, router.slots_per_expert)
    weights = {w.name: to_numpy(w.value) for w in router.weights}
    return twins.soft_router(
        tokens,
        # A router that is uniform on both sides has no weights to look at.
        weights.get("mu", np.zeros(shape)),
        weights.get("scale", 1.0),
        router.dispatch,
        router.combine,
        router.normalize,
        noise=noise,
        valid=valid,
    )


@pytest.mark.parametrize("dispatch, combine", VARIANTS)
@pytest.mark.parametrize("normalize", [True, False])
@settings(max_examples=4)
@given(
    shape=st.sampled_from(SHAPES),
    flavour=st.sampled_from(cases.FLAVOURS),
    seed=cases.seeds,
)
def test_soft_router_is_its_twin(dispatch, combine, normalize, shape, flavour, seed):
    tokens = cases.array(flavour, (*shape[:2], WIDTH), seed)
    valid = cases.padding(shape[:2], seed)
    router = build(shape, dispatch=dispatch, combine=combine, normalize=normalize)
    actual = call(router, cases.hide(tokens, valid), valid)
    kept = np.ones(shape[:2], bool) if valid is None else valid
    # Without normalization the logits are of the size of the tokens: float32 resolves
    # 1e4 to 1e-3.
    tolerance = 2e-2 if flavour == "huge" and not normalize else 2e-5
    for weights, expected in zip(actual, twin(router, tokens, valid), strict=True):
        assert weights.shape == shape and weights.dtype == np.float32
        assert_near(weights[kept], expected[kept], rtol=tolerance, atol=tolerance)
    # Dispatch weights sum to one over the tokens, combine weights over the slots.
    np.testing.assert_allclose(actual[0].sum(1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(actual[1][kept].sum((-2, -1)), 1.0, rtol=1e-5)
    assert np.all(actual[0][~kept] == 0)


def test_epsilon_is_added_to_the_squared_norm():
    # Norms of 1e-3 have squares as small as the epsilon: x / (|x| + eps) would give
    # logits larger by the root of two.
    router = build((1, 3, 2, 1))
    tokens = cases.array("normal", (1, 3, WIDTH), 0) * 5e-4
    router.mu.assign(to_numpy(router.mu.value) * 1e-3)
    decision = router(tokens)
    mu = twins.l2_normalize(to_numpy(router.mu.value), 0)
    expected = 1.7 * np.einsum("gsd,dec->gsec", twins.l2_normalize(tokens, -1), mu)
    assert_near(to_numpy(decision.summary["logits"]), expected, rtol=2e-5, atol=1e-7)


def test_group_of_padding_alone():
    """Slots that take nothing, not equal parts of padding."""
    valid = np.array([[True] * 8, [False] * 8])
    tokens = cases.hide(cases.array("normal", (2, 8, WIDTH), 0), valid)
    dispatch, combine = call(build(SHAPES[2]), tokens, valid)
    assert not dispatch[1].any() and not combine[1].any()
    np.testing.assert_allclose(dispatch[0].sum(0), 1.0, rtol=1e-5)


@pytest.mark.parametrize("start, scale", [(4, 4.0), ("unit_variance", 512**0.5)])
def test_initial_scale(start, scale):
    """A softmax of logits with unit variance, as equation 1 has without a norm."""
    tokens = np.random.default_rng(0).normal(size=(2, 196, 512)).astype("float32")
    router = routers.SoftRouter(128, initial_scale=start)
    decision = router(tokens)
    np.testing.assert_allclose(to_numpy(router.scale.value), scale, rtol=1e-6)
    spread = to_numpy(decision.summary["logits"]).std()
    np.testing.assert_allclose(spread, scale / 512**0.5, rtol=0.05)
    copy = routers.SoftRouter.from_config(router.get_config())
    assert copy.initial_scale == start


def test_noise(set_noise):
    shape = SHAPES[2]
    tokens = cases.array("normal", (*shape[:2], WIDTH), 0)
    noise = cases.array("normal", shape, 7)
    router = build(shape, noise_std=0.5)
    undrawn = set_noise(noise)
    quiet = call(router, tokens, training=False)
    assert len(undrawn) == 1
    noisy = call(router, tokens, training=True)
    for actual, expected in zip(quiet, twin(router, tokens), strict=True):
        assert_near(actual, expected, rtol=2e-5, atol=2e-5)
    # Not divided by the number of experts.
    expected = twin(router, tokens, noise=0.5 * noise)
    for actual, weights in zip(noisy, expected, strict=True):
        assert_near(actual, weights, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("flavour", ["normal", "equal", "zero", "huge"])
def test_gradients_are_finite(flavour):
    router = build(SHAPES[2])
    tokens = cases.array(flavour, (2, 8, WIDTH), 0)

    def loss(decision, _):
        return keras.ops.sum(decision.routing.dispatch**2) + keras.ops.sum(
            decision.routing.combine**2
        )

    value, for_tokens, for_weights = layer_gradients(router, tokens, loss)
    assert np.isfinite(value)
    for gradient in (for_tokens, *for_weights.values()):
        assert np.all(np.isfinite(gradient))
    if flavour == "normal":
        assert all(np.abs(g).max() > 0 for g in for_weights.values())


def test_float32_under_mixed_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = cases.array("normal", (2, 8, WIDTH), 0)
    tokens = keras.ops.convert_to_tensor(tokens, "bfloat16")
    router = build(SHAPES[2])
    routing = router(tokens).routing
    for actual, expected in zip(routing, twin(router, to_numpy(tokens)), strict=True):
        assert keras.backend.standardize_dtype(actual.dtype) == "float32"
        assert_near(to_numpy(actual), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "kwargs, received",
    [
        ({"num_experts": 0}, "0"),
        ({"num_experts": 4, "slots_per_expert": 0}, "0"),
        ({"num_experts": 4, "dispatch": "hard"}, "hard"),
        ({"num_experts": 4, "combine": "hard"}, "hard"),
        ({"num_experts": 4, "initial_scale": 0}, "initial_scale=0"),
        ({"num_experts": 4, "initial_scale": "large"}, "initial_scale='large'"),
        ({"num_experts": 4, "initial_scale": 2.0, "normalize": False}, "2.0"),
    ],
)
def test_bad_arguments_are_named(kwargs, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        routers.SoftRouter(**kwargs)
