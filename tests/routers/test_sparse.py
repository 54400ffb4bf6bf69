"""Sparse routers against the twins.

Covers `routers/token_choice.py`, `routers/expert_choice.py`, `routers/race.py` and
`routers/identity.py`.
"""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from hypothesis import given, settings

from keras_softmoe import layers, routers
from tests.support import cases, twins
from tests.support.close import assert_near, assert_sum_near
from tests.support.gradients import layer_gradients
from tests.support.references import assert_all_equal, to_numpy
from tests.support.sparse_routers import (
    BIAS,
    EXPERT_CHOICE,
    PLANS,
    SPARSE,
    THRESHOLD,
    TOKEN_CHOICE,
    WIDTH,
    as_numpy,
    build,
    call,
    losses,
)

FINITE_FLAVOURS = ["normal", "equal", "zero"]
# (G, S, E): more experts than tokens; one expert; an ordinary one.
SHAPES = [(1, 3, 5), (2, 4, 1), (2, 8, 4)]


def capacity_of(router, num_tokens):
    choices = num_tokens * getattr(router, "num_selected_experts", 1)
    found = twins.expert_capacity(choices, router.num_experts, router.capacity_factor)
    # In a race an expert chooses a token once.
    return (
        min(found, num_tokens)
        if isinstance(router, routers.ExpertRaceRouter)
        else found
    )


def selection_twin(name, logits, capacity, valid):
    if name.startswith("sinkhorn"):
        return twins.sinkhorn_plan(logits, 20, valid)
    if name == "sparse_transport":
        return twins.sparse_transport_plan(twins.softmax(logits), capacity, valid=valid)
    if name == "balanced_token_choice":
        return twins.softmax(logits) + BIAS[: logits.shape[-1]]
    return gates_twin(name, logits)


def gates_twin(name, logits):
    return logits if name == "expert_race" else twins.softmax(logits)


@pytest.mark.parametrize("name", SPARSE)
@settings(max_examples=5)
@given(shape=st.sampled_from(SHAPES), seed=cases.seeds)
def test_router_is_its_twin(name, shape, seed):
    num_groups, num_tokens, num_experts = shape
    tokens = cases.array("normal", (num_groups, num_tokens, WIDTH), seed)
    valid = cases.padding(shape[:2], seed)
    router = build(name, num_experts)
    (token, filled, gate), summary = call(router, cases.hide(tokens, valid), valid)

    kept = np.ones(shape[:2], bool) if valid is None else valid
    logits = np.float64(tokens) @ np.float64(to_numpy(router.kernel.value))
    assert_near(summary["logits"][kept], logits[kept], rtol=2e-5, atol=2e-5)
    probabilities = twins.softmax(logits)
    assert_near(
        summary["probabilities"][kept], probabilities[kept], rtol=2e-5, atol=2e-5
    )
    capacity = capacity_of(router, num_tokens)
    if name != "sparse_transport":
        # (The solver's steps amplify rounding; its numbers are tested in tests/ops.)
        expected = selection_twin(name, logits, capacity, valid)
        assert_near(summary["selection"][kept], expected[kept], rtol=2e-5, atol=2e-5)

    # The seats follow exactly from the scores that the router itself reports.
    if name in TOKEN_CHOICE or name == "balanced_token_choice":
        bias = BIAS[:num_experts] if name == "balanced_token_choice" else 0.0
        seats = twins.token_choice(
            summary["probabilities" if bias else "selection"],
            router.num_selected_experts,
            capacity,
            router.priority,
            valid,
            bias=bias,
        )
    elif name == "expert_race":
        thresholds = [THRESHOLD] * num_groups
        seats = twins.race(summary["selection"], thresholds, capacity, valid)
    else:
        seats = twins.expert_choice(summary["selection"], capacity, valid)
    assert_all_equal((token, filled), seats)
    gates = twins.gates(gates_twin(name, logits), token, filled)
    assert_near(gate, gates, rtol=2e-5, atol=2e-5)

    dispatch, _ = twins.to_dense(token, filled, gate, num_tokens)
    np.testing.assert_array_equal(summary["load"], filled.sum(-1))
    np.testing.assert_array_equal(
        summary["dropped"], (dispatch.sum((2, 3)) == 0) & kept
    )


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("flavour", [*cases.FLAVOURS, "bfloat16"])
def test_invariants(name, flavour):
    shape = (2, 8, 4)
    rounded = flavour == "bfloat16"
    tokens = cases.array("normal" if rounded else flavour, (*shape[:2], WIDTH), 1)
    tokens = keras.ops.convert_to_tensor(tokens, "bfloat16" if rounded else None)
    valid = cases.padding(shape[:2], 1)
    router = build(name, shape[2])
    (token, filled, gate), summary = as_numpy(
        router(tokens, valid=keras.ops.convert_to_tensor(valid))
    )

    assert token.min() >= 0 and token.max() < shape[1]
    for value in (gate, *summary.values()):
        assert np.all(np.isfinite(value))
    assert np.all(gate[~filled] == 0)
    if name != "expert_race":
        assert np.all((gate >= 0) & (gate <= 1 + 1e-6))
    dispatch, _ = twins.to_dense(token, filled, gate, shape[1])
    slots = dispatch.sum(-1)
    assert slots.max() <= 1, "a token twice with one expert"
    assert np.all(slots[~valid] == 0), "a padded token in a slot"
    if name.endswith("token_choice"):
        assert slots.sum(-1).max() <= router.num_selected_experts
    elif name in EXPERT_CHOICE:
        enough = np.minimum(valid.sum(1), token.shape[2])[:, None]
        np.testing.assert_array_equal(filled.sum(-1), np.repeat(enough, shape[2], 1))


@pytest.mark.parametrize("name", SPARSE)
def test_padding_has_no_say(name):
    # The values of padded tokens change nothing, the losses included.
    valid = cases.padding((2, 8), 1)
    other = cases.hide(cases.TOKENS, valid)
    weights = {"z_loss": 1.0}
    if name in TOKEN_CHOICE:
        weights.update(importance_loss=1.0, gshard_loss=1.0)
    router = build(name, losses=losses(**weights))
    routing, summary = call(router, cases.TOKENS, valid)
    other_routing, other_summary = call(router, other, valid)
    for actual, expected in zip(other_routing, routing, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    for key in ("auxiliary_loss", "load", "dropped"):
        np.testing.assert_allclose(other_summary[key], summary[key], rtol=1e-5)

    # And an all-true mask is the same as none.
    _, everything = call(router, cases.TOKENS, np.ones((2, 8), bool))
    _, unmasked = call(router, cases.TOKENS)
    for key in unmasked:
        assert_near(everything[key], unmasked[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPARSE)
def test_auxiliary_loss_is_the_weighted_sum(name):
    weights = {"z_loss": 0.5}
    if name in TOKEN_CHOICE:
        weights.update(importance_loss=0.3, gshard_loss=0.1)
    router = build(name, losses=losses(**weights))
    _, summary = call(router, cases.TOKENS)
    probabilities = twins.softmax(summary["logits"])
    expected = 0.5 * twins.z_loss(summary["logits"])
    if name in TOKEN_CHOICE:
        # No load loss without noise.
        expected += 0.3 * twins.importance_loss(probabilities)
        expected += 0.1 * twins.gshard_loss(probabilities)
    np.testing.assert_allclose(summary["auxiliary_loss"], expected, rtol=2e-5)


@pytest.mark.parametrize("name", [*SPARSE, "identity"])
def test_losses_are_added_in_training_only(name):
    if name == "identity":
        router, expected = routers.IdentityRouter(4), 0
    else:
        router, expected = build(name, losses=losses(z_loss=1.0)), 1
    router(cases.TOKENS, training=False)
    assert len(router.losses) == 0
    _, summary = call(router, cases.TOKENS, training=True)
    assert len(router.losses) == expected
    if expected:
        np.testing.assert_allclose(
            to_numpy(router.losses[0]), summary["auxiliary_loss"].mean(), rtol=1e-5
        )


@pytest.mark.parametrize("name", [n for n in SPARSE if n != "sparse_transport"])
def test_stateless_calls_draw_what_their_state_says(name):
    """The state before a call gives its noise again, also after another call."""
    tokens = keras.ops.convert_to_tensor(cases.array("normal", (2, 8, WIDTH), 0))
    router = build(name, noise_std=2.0)
    seeds = router.non_trainable_variables

    def call(state):
        with keras.StatelessScope(list(zip(seeds, state, strict=True))) as scope:
            logits = router(tokens, training=True).summary["selection"]
        return to_numpy(logits), [scope.get_current_value(v) for v in seeds]

    before = [v.value for v in seeds]
    first, after = call(before)
    second, _ = call(after)
    again, _ = call(before)
    assert (first != second).any()
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("name", [n for n in SPARSE if n != "sparse_transport"])
def test_noise(name, set_noise):
    noise = cases.array("normal", (2, 8, 4), 7)
    weights = {}
    if name in TOKEN_CHOICE:
        weights = {"load_loss": 1.0, "importance_loss": 0.5}
    router = build(name, noise_std=2.0, losses=losses(**weights))
    undrawn = set_noise(noise)
    _, quiet = call(router, cases.TOKENS, training=False)
    assert len(undrawn) == 1
    (token, filled, gate), noisy = call(router, cases.TOKENS, training=True)
    assert not undrawn

    clean_logits = np.float64(quiet["logits"])
    # The standard deviation is given for all experts together: 2 / 4 for each.
    noisy_logits = clean_logits + 0.5 * noise
    selection = selection_twin(name, noisy_logits, token.shape[-1], None)
    assert_near(noisy["selection"], selection, rtol=2e-5, atol=2e-5)
    # Sinkhorn token choice combines with the probabilities without noise, as released.
    combine = clean_logits if name == "sinkhorn_token_choice" else noisy_logits
    assert_near(
        gate,
        twins.gates(gates_twin(name, combine), token, filled),
        rtol=2e-5,
        atol=2e-5,
    )
    if name in TOKEN_CHOICE:
        expected = 0.5 * twins.importance_loss(twins.softmax(clean_logits))
        expected += twins.load_loss(
            clean_logits, noisy_logits, router.num_selected_experts, 0.5
        )
        np.testing.assert_allclose(noisy["auxiliary_loss"], expected, rtol=2e-5)


@pytest.mark.parametrize("name", PLANS)
def test_plan_combine(name):
    router = build(name, combine="plan")
    (token, filled, gate), summary = call(router, cases.TOKENS)
    expected = twins.gates(summary["selection"], token, filled)
    np.testing.assert_allclose(gate, expected, rtol=1e-6)


def test_sparse_plan_is_a_constant_to_the_gradient():
    router = build("sparse_transport", combine="plan")
    _, _, gradients = layer_gradients(
        router, cases.TOKENS, lambda d, _: keras.ops.sum(d.routing.gate)
    )
    (gradient,) = gradients.values()
    assert np.all(gradient == 0)


@pytest.mark.parametrize("name", ["sinkhorn_token_choice", "sinkhorn_expert_choice"])
def test_sinkhorn_plan_has_the_gradient_of_its_iterations(name):
    router = build(name, combine="plan")
    (token, filled, gate), _ = call(router, cases.TOKENS)
    cotangent = cases.array("normal", gate.shape, 1)
    _, _, gradients = layer_gradients(
        router,
        cases.TOKENS,
        lambda d, _: keras.ops.sum(keras.ops.multiply(d.routing.gate, cotangent)),
    )
    (gradient,) = gradients.values()

    def value(kernel):
        plan = twins.sinkhorn_plan(np.float64(cases.TOKENS) @ kernel)
        return (twins.gates(plan, token, filled) * cotangent).sum()

    kernel = np.float64(to_numpy(router.kernel.value))
    for direction in np.random.default_rng(0).normal(size=(3, *kernel.shape)):
        step = 1e-5 * direction
        difference = (value(kernel + step) - value(kernel - step)) / 2e-5
        assert_sum_near(gradient * direction, difference, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("flavour", FINITE_FLAVOURS)
def test_gradients_are_finite(name, flavour):
    tokens = cases.array(flavour, (2, 8, WIDTH), 0)
    weights = {"z_loss": 1.0}
    if name in TOKEN_CHOICE:
        weights.update(importance_loss=1.0, gshard_loss=1.0)
    router = build(name, losses=losses(**weights))

    def loss(decision, added):
        return keras.ops.sum(decision.routing.gate**2) + sum(added)

    value, for_tokens, for_weights = layer_gradients(
        router, tokens, loss, training=True
    )
    assert np.isfinite(value)
    for gradient in (for_tokens, *for_weights.values()):
        assert np.all(np.isfinite(gradient))
    if flavour == "normal":
        assert all(np.abs(g).max() > 0 for g in for_weights.values())


@pytest.mark.parametrize("name", SPARSE)
def test_float32_under_mixed_bfloat16(name):
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.ops.convert_to_tensor(
        cases.array("normal", (2, 8, WIDTH), 0), "bfloat16"
    )
    router = build(name)
    decision = router(tokens)
    summary = decision.summary
    floats = [decision.routing.gate, summary["logits"], summary["selection"]]
    for value in (*floats, summary["auxiliary_loss"], router.kernel):
        assert keras.backend.standardize_dtype(value.dtype) == "float32"
    # Not merely cast at the end: the numbers are those of a float32 product.
    logits = np.float64(to_numpy(tokens)) @ np.float64(to_numpy(router.kernel.value))
    assert_near(to_numpy(summary["logits"]), logits, atol=1e-5)


def test_identity():
    router = routers.IdentityRouter(4)
    (token, filled, gate), summary = call(router, cases.TOKENS)
    assert_all_equal((token, filled), twins.identity(2, 8, 4))
    np.testing.assert_array_equal(gate, np.ones((2, 4, 2)))
    np.testing.assert_array_equal(summary["load"], np.full((2, 4), 2))
    assert not router.weights

    valid = cases.padding((2, 8), 1)
    (token, filled, gate), _ = call(router, cases.TOKENS, valid)
    dispatch, _ = twins.to_dense(token, filled, gate, 8)
    np.testing.assert_array_equal(dispatch.sum((2, 3)), valid)
    assert np.all(gate == filled)


def test_an_expert_takes_at_most_all_tokens():
    router = build("softmax_expert_choice", capacity_factor=8.0)
    (_, filled, _), _ = call(router, cases.array("normal", (2, 8, WIDTH), 0))
    assert filled.shape == (2, 4, 8) and np.all(filled)


@pytest.mark.parametrize(
    "make, received",
    [
        (lambda: routers.SoftmaxTokenChoiceRouter(0), "num_experts=0"),
        (lambda: routers.SoftmaxExpertChoiceRouter(0), "num_experts=0"),
        (lambda: routers.SoftmaxTokenChoiceRouter(4, num_selected_experts=5), "5"),
        (lambda: routers.SoftmaxTokenChoiceRouter(4, priority="best"), "best"),
        (lambda: routers.SinkhornTokenChoiceRouter(4, combine="both"), "both"),
        (lambda: routers.SoftmaxTokenChoiceRouter(4, keep_fraction=2.0), "2.0"),
        (
            lambda: routers.SoftmaxExpertChoiceRouter(4, eval_capacity_factor=0.0),
            "eval_capacity_factor=0.0",
        ),
        (lambda: routers.IdentityRouter(3)(np.zeros((1, 8, 4), "float32")), "8"),
        (
            lambda: routers.SoftmaxExpertChoiceRouter(4, 0.01)(
                np.zeros((1, 8, 4), "float32")
            ),
            "0.01",
        ),
    ],
)
def test_bad_arguments_are_named(make, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        make()


def test_settings_that_a_router_has_not():
    router = routers.SparseTransportExpertChoiceRouter(4)
    assert router.noise_std == 0
    with pytest.raises(AttributeError, match="always 0.0: leave it. Received: 0.5"):
        router.noise_std = 0.5
    with pytest.raises(AttributeError, match="has no setting `priority`"):
        router.priority = "max"


def test_normalized_gates_of_a_plan_without_weight():
    """Padding has no weight in a plan, and some choices none in a softmax."""
    router = routers.SinkhornTokenChoiceRouter(
        4, num_selected_experts=2, combine="plan", normalize_gates=True, noise_std=0.0
    )
    layer = layers.MoE(router, mlp_dim=8, group_images=4)
    x = np.random.default_rng(0).normal(size=(6, 5, 3)).astype("float32")
    layer.build(x.shape)
    loss, of_inputs, of_weights = layer_gradients(
        layer, x, lambda y, losses: keras.ops.sum(y * y), training=True
    )
    assert np.isfinite(loss)
    for gradient in (of_inputs, *of_weights.values()):
        assert np.isfinite(gradient).all()

    router = routers.SinkhornTokenChoiceRouter(2, normalize_gates=True)
    router.build((1, 2, 2))
    router.kernel.assign(np.eye(2))
    # Both prefer expert 0 by far; the plan gives one of them to expert 1, to which the
    # softmax gives nothing.
    gate = router(np.array([[[400.0, 0.0], [300.0, 0.0]]], "float32")).routing.gate
    assert np.isfinite(to_numpy(gate)).all()


@pytest.mark.parametrize("gap", [30.0, 60.0, 80.0, 95.0, 103.0, 300.0])
def test_normalized_gates_of_tiny_probabilities_have_gradients(gap):
    """The plan gives tokens to experts that the softmax gives next to nothing."""
    router = routers.SinkhornTokenChoiceRouter(
        3, normalize_gates=True, noise_std=0.0, losses=(), capacity_factor=2.0
    )
    layer = layers.MoE(router, mlp_dim=4)
    layer.build((1, 3, 3))
    layer.router.kernel.assign(np.eye(3))
    x = np.zeros((1, 3, 3), "float32")
    x[:, :, 0] = [gap, gap * 1.001, gap * 1.002]
    loss, of_inputs, of_weights = layer_gradients(
        layer, x, lambda y, losses: keras.ops.sum(y * y)
    )
    for gradient in (loss, of_inputs, *of_weights.values()):
        assert np.isfinite(gradient).all()
    # All of the gate, or none of it where there is no probability.
    routing = layer.router(x).routing
    known = to_numpy(routing.gate)[to_numpy(routing.filled)]
    np.testing.assert_allclose(known, np.round(known), rtol=1e-5)
    assert known.max() == pytest.approx(1.0)


def test_padding_gives_no_slots():
    tokens = np.random.default_rng(0).normal(size=(2, 16, WIDTH)).astype("float32")
    valid = np.arange(16) < np.array([[16], [6]])
    router = routers.SoftmaxTokenChoiceRouter(2, capacity_factor=1.0)
    decision = router(tokens, valid=valid, num_tokens=np.array([16, 6], "int32"))
    capacity = to_numpy(decision.summary["capacity"])
    assert_all_equal(capacity, [8, 3])
    load, dropped = (to_numpy(decision.summary[k]) for k in ("load", "dropped"))
    assert_all_equal(load.max(-1), capacity)
    assert_all_equal(load.sum(-1) + dropped.sum(-1), [16, 6])
