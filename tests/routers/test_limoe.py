"""LIMoE's router against its twin: slots, gates, losses, gradients."""

import keras
import numpy as np
import pytest

from keras_softmoe import ops, routers
from tests.support import cases, limoe_router_twin as twin, twins
from tests.support.close import assert_near, assert_sum_near
from tests.support.gradients import layer_gradients
from tests.support.limoe_routers import (
    FORMS,
    MODALITIES,
    NAMES,
    NUM_EXPERTS,
    NUM_TOKENS,
    Pruned,
    build,
    call,
    kernels,
    padding,
    routed,
    tokens,
)
from tests.support.references import assert_all_equal, to_numpy

NOISE = cases.array("normal", (2, NUM_TOKENS, NUM_EXPERTS), 7)
PRIORITIES = ["sum", "max", "position", "pair", "image_first", "text_first"]


def about(function, **settings):
    """Callable from a modality to a loss of ours."""
    return lambda modality: routers.RoutingLoss(function, modality, **settings)


# Each kind of loss, of ours and of the twin's, for each modality that it can be about.
KINDS = {
    "importance": (about(ops.importance_loss), twin.importance),
    "z": (about(ops.z_loss), twin.z),
    "local": (about(ops.local_entropy_loss), twin.local),
    "target": (about(ops.target_entropy_loss), twin.target),
    "merged": (about(ops.merged_entropy_loss), twin.merged),
    "global": (about(ops.global_entropy_loss, soft_minimum=3.9), twin.at_least(3.9)),
}
LOSSES = {
    f"{kind}_{modality}": (ours(modality), (theirs, modality))
    for kind, (ours, theirs) in KINDS.items()
    for modality in ("image", "text", None)
}
LOSSES["mutual_information"] = (
    routers.RoutingLoss(ops.mutual_information_loss),
    (twin.mutual_information, None),
)
# One of each kind.
EACH = ["importance_None", "z_image", "local_text", "target_text", "merged_image"]
EACH += ["global_text", "mutual_information"]
ALL = tuple(ours for ours, _ in LOSSES.values())
ALL_TWINS = [theirs for _, theirs in LOSSES.values()]
CLASSIC = [(loss, None) for loss in (twin.importance, twin.load, twin.z)]


# === Seats and gates ===


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_router_is_its_twin(form, num_choices, padded):
    router = build(
        num_selected_experts=num_choices,
        capacity_factor=0.5,
        losses=ALL,
        loss_weight=0.5,
        **FORMS[form],
    )
    valid = padding() if padded else None
    x = cases.hide(tokens(), valid)
    (token, filled, gate), summary = call(router, x, valid)

    # Of padding: zeros.
    expected = routed(router, np.nan_to_num(x), valid)
    reachable = np.isfinite(expected.logits)
    assert_near(
        summary["logits"][reachable], expected.logits[reachable], rtol=2e-5, atol=2e-5
    )
    probabilities = twins.softmax(expected.logits)
    assert_near(summary["probabilities"], probabilities, rtol=2e-5, atol=2e-5)
    assert not summary["probabilities"][~reachable].any()

    # The seats follow exactly from the scores that the router itself reports.
    capacity = twins.expert_capacity(num_choices * NUM_TOKENS, NUM_EXPERTS, 0.5)
    seats = twin.token_choice(
        summary["selection"], num_choices, capacity, "sum", NAMES, valid
    )
    assert_all_equal((token, filled), seats)
    assert_near(gate, twins.gates(probabilities, token, filled), rtol=2e-5, atol=2e-5)
    dispatch, _ = twins.to_dense(token, filled, gate, NUM_TOKENS)
    dropped = dispatch.sum((2, 3)) == 0
    if padded:
        dropped &= valid
    np.testing.assert_array_equal(summary["load"], filled.sum(-1))
    np.testing.assert_array_equal(summary["dropped"], dropped)
    assert dropped.any()
    # Nobody sits with an expert of the other modality.
    assert not (dispatch.sum(-1) * ~reachable).any()

    assert_near(
        summary["auxiliary_loss"],
        twin.auxiliary_loss(ALL_TWINS, expected, 0.5),
        rtol=2e-5,
        atol=2e-6,
    )


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("priority", PRIORITIES)
def test_queue(priority, num_choices):
    router = build(
        num_selected_experts=num_choices, capacity_factor=0.5, priority=priority
    )
    valid = padding()
    (token, filled, _), summary = call(router, tokens(), valid)
    capacity = token.shape[-1]
    assert capacity == np.ceil(NUM_TOKENS * num_choices / NUM_EXPERTS / 2)
    seats = twin.token_choice(
        summary["selection"], num_choices, capacity, priority, NAMES, valid
    )
    assert_all_equal((token, filled), seats)
    assert summary["dropped"].any()


def test_a_modality_that_comes_first_loses_no_token_to_the_other():
    # All want expert 0, which has room for three of twelve: four words, eight patches.
    router = build(capacity_factor=1.0, priority="text_first")
    router.kernel.assign(np.eye(4)[:, :1] @ np.array([[9.0, 0.0, 0.0, 0.0]]))
    x = np.ones_like(tokens())
    words, patches = np.flatnonzero(np.array(NAMES) == "text"), [0, 1, 2]
    for priority, seated in (("text_first", words[:3]), ("image_first", patches)):
        router.update(priority=priority)
        (token, filled, _), _ = call(router, x)
        for group in range(2):
            assert token[group, 0][filled[group, 0]].tolist() == list(seated)
            assert not filled[group, 1:].any()


# === Losses ===


def test_a_soft_minimum_of_less_than_one_expert_is_averaged():
    # Images in figure 12's model with four experts: the loss is zero, and one of two.
    local = routers.RoutingLoss(ops.local_entropy_loss, "text")
    nothing = routers.RoutingLoss(ops.global_entropy_loss, "image", soft_minimum=0.8)
    both, one = (build(losses=losses) for losses in ((local, nothing), (local,)))
    of_both, of_one = (call(r, tokens())[1]["auxiliary_loss"] for r in (both, one))
    twin_losses = [(twin.local, "text"), (twin.at_least(0.8), "image")]
    expected = twin.auxiliary_loss(twin_losses, routed(both, tokens()), 0.04)
    np.testing.assert_allclose(of_both, expected, rtol=2e-5)
    np.testing.assert_allclose(of_both, of_one / 2, rtol=1e-6)
    assert (of_both > 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_its_twin(name):
    ours, theirs = LOSSES[name]
    # Two choices, since with one some forms agree.
    router = build(num_selected_experts=2, losses=(ours,), loss_weight=1.0)
    for valid in (None, padding()):
        _, summary = call(router, tokens(), valid)
        expected = twin.auxiliary_loss([theirs], routed(router, tokens(), valid), 1.0)
        assert summary["auxiliary_loss"].shape == (2,)
        assert_near(summary["auxiliary_loss"], expected, rtol=2e-5, atol=2e-6)
        # In no group is it trivially zero.
        assert np.abs(expected).min() > 1e-3


def test_losses_are_added_in_training_only():
    router = build(losses=ALL)
    call(router, tokens())
    assert not router.losses
    _, summary = call(router, tokens(), training=True)
    (loss,) = router.losses
    np.testing.assert_allclose(
        to_numpy(loss), summary["auxiliary_loss"].mean(), rtol=1e-5
    )
    router = build()
    _, summary = call(router, tokens(), training=True)
    assert not router.losses
    np.testing.assert_array_equal(summary["auxiliary_loss"], [0.0, 0.0])


@pytest.mark.parametrize("form", ["joint", "overlapping"])
def test_noise(form, set_noise):
    router = build(noise_std=2.0, losses=routers.classic_losses(), **FORMS[form])
    undrawn = set_noise(NOISE)
    expected = routed(router, tokens(), None, NOISE)

    # Outside training there is no noise, nor a loss about it.
    _, quiet = call(router, tokens())
    assert len(undrawn) == 1
    without_load = [CLASSIC[0], CLASSIC[2]]
    np.testing.assert_allclose(
        quiet["auxiliary_loss"],
        twin.auxiliary_loss(without_load, expected, 0.04),
        rtol=2e-5,
    )
    assert_near(
        quiet["probabilities"], twins.softmax(expected.logits), rtol=2e-5, atol=2e-5
    )

    (token, filled, gate), noisy = call(router, tokens(), training=True)
    assert not undrawn
    probabilities = twins.softmax(expected.noisy_logits)
    assert_near(noisy["probabilities"], probabilities, rtol=2e-5, atol=2e-5)
    assert_near(gate, twins.gates(probabilities, token, filled), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(
        noisy["auxiliary_loss"], twin.auxiliary_loss(CLASSIC, expected, 0.04), rtol=2e-5
    )


@pytest.mark.parametrize("modality", ["image", "text", None])
def test_load_loss_of_a_modality(modality, set_noise):
    router = build(
        noise_std=2.0,
        num_selected_experts=2,
        losses=(routers.RoutingLoss(ops.load_loss, modality),),
        loss_weight=1.0,
    )
    set_noise(NOISE)
    _, summary = call(router, tokens(), padding(), training=True)
    expected = twin.load(routed(router, tokens(), padding(), NOISE), modality)
    np.testing.assert_allclose(summary["auxiliary_loss"], expected, rtol=2e-5)


@pytest.mark.parametrize("form", ["joint", "disjoint_per_modality"])
def test_gradients_of_the_losses(form, set_noise):
    set_noise(NOISE)
    router = build(
        num_selected_experts=2,
        noise_std=2.0,
        losses=(
            *(LOSSES[name][0] for name in EACH),
            routers.RoutingLoss(ops.load_loss, "text"),
        ),
        loss_weight=1.0,
        **FORMS[form],
    )
    losses = [*(LOSSES[name][1] for name in EACH), (twin.load, "text")]
    _, for_tokens, gradients = layer_gradients(
        router,
        tokens(),
        lambda decision, losses: sum(losses),
        training=True,
        modalities=MODALITIES,
    )
    found = {path.rpartition("/")[2]: g for path, g in gradients.items()}
    names = ["kernel"] if form == "joint" else ["image_kernel", "text_kernel"]
    assert list(found) == names
    exact = {k: np.float64(v) for k, v in kernels(router).items()}

    def value(steps, shift=0.0):
        moved = {k: v + steps.get(k, 0.0) for k, v in exact.items()}
        at = routed(router, np.float64(tokens()) + shift, None, NOISE, values=moved)
        return twin.auxiliary_loss(losses, at, 1.0).mean()

    rng = np.random.default_rng(0)
    for key, name in zip(exact, names, strict=True):
        for direction in rng.normal(size=(2, *exact[key].shape)):
            step = 1e-5 * direction
            difference = (value({key: step}) - value({key: -step})) / 2e-5
            terms = found[name] * direction
            assert_sum_near(terms, difference, rtol=1e-3, atol=1e-5)
            assert abs(difference) > 1e-4
    direction = rng.normal(size=tokens().shape)
    difference = (value({}, 1e-5 * direction) - value({}, -1e-5 * direction)) / 2e-5
    assert_sum_near(for_tokens * direction, difference, rtol=1e-3, atol=1e-5)


def test_mutual_information_of_routing():
    # Images and text that are the same tokens are routed alike: nothing is told.
    modalities, names = (("image", 3), ("text", 3)), (["image"] * 3 + ["text"] * 3) * 2
    x = np.tile(tokens()[:, :3], (1, 4, 1))
    loss = {
        "losses": (routers.RoutingLoss(ops.mutual_information_loss),),
        "loss_weight": 1.0,
    }
    router = build(per_modality=True, **loss)
    router.text_kernel.assign(router.image_kernel)
    _, summary = call(router, x, modalities=modalities)
    assert_near(summary["auxiliary_loss"], 0.0, atol=1e-6)
    # Apart, they tell it all: log 2.
    router = build(**loss, **FORMS["disjoint"])
    _, summary = call(router, x, modalities=modalities)
    np.testing.assert_allclose(summary["auxiliary_loss"], -np.log(2), rtol=1e-5)
    # And in between, it is its twin.
    router = build(per_modality=True, **loss)
    _, summary = call(router, x, modalities=modalities)
    expected = twin.mutual_information(routed(router, x, names=names))
    np.testing.assert_allclose(summary["auxiliary_loss"], expected, rtol=1e-5)
    assert (-np.log(2) < expected).all() and (expected < -1e-3).all()


# === One modality alone ===


@pytest.mark.parametrize("name", ["image", "text"])
@pytest.mark.parametrize("form", FORMS)
def test_one_modality(form, name):
    router = build(losses=ALL, loss_weight=1.0, **FORMS[form])
    modalities = ((name, NUM_TOKENS // 2),)
    (token, filled, gate), summary = call(router, tokens(), modalities=modalities)
    # Sixteen times the room, which is more than all: everybody has a seat.
    assert token.shape == (2, NUM_EXPERTS, NUM_TOKENS)
    assert not summary["dropped"].any()
    expected = routed(router, tokens(), names=[name] * NUM_TOKENS)
    probabilities = twins.softmax(expected.logits)
    assert_near(gate, twins.gates(probabilities, token, filled), rtol=2e-5, atol=2e-5)
    # Losses about the other modality, or about both, are left out of the mean.
    there = [(loss, m) for loss, m in ALL_TWINS if m in (name, None)]
    there.remove((twin.mutual_information, None))
    assert len(there) == 12
    assert_near(
        summary["auxiliary_loss"],
        twin.auxiliary_loss(there, expected, 1.0),
        rtol=2e-5,
        atol=2e-6,
    )


def test_room_for_one_modality():
    router = build(
        capacity_factor=0.5,
        eval_capacity_factor=1.75,
        single_modality_capacity_factor=2,
    )
    # Twelve tokens, four experts
    assert router.capacity(12, training=True) == 2
    assert router.capacity(12, training=False) == 5
    for training in (True, False):
        assert router.capacity(12, training, single_modality=True) == 6
    # No more than there are tokens
    router.update(single_modality_capacity_factor=16, capacity_factor=16)
    assert router.capacity(12, training=True, single_modality=True) == 12
    assert router.capacity(12, training=True) == 12


def test_without_losses_that_apply_there_is_none():
    router = build(losses=(routers.RoutingLoss(ops.local_entropy_loss, "text"),))
    _, summary = call(router, tokens(), modalities=(("image", 6),), training=True)
    np.testing.assert_array_equal(summary["auxiliary_loss"], [0.0, 0.0])
    assert not router.losses


@pytest.mark.parametrize("priority", ["image_first", "text_first"])
def test_alone_a_modality_queues_by_position(priority):
    router = build(priority=priority, single_modality_capacity_factor=0.5)
    names = ["text"] * NUM_TOKENS
    (token, filled, _), summary = call(router, tokens(), modalities=(("text", 6),))
    seats = twin.token_choice(summary["selection"], 1, 2, "position", names)
    assert_all_equal((token, filled), seats)


# === Pruned ===


@pytest.mark.parametrize("form", ["joint", "per_modality"])
def test_pruned_router_predicts_all_experts(form):
    kept = (0, 2, 3)
    router = build(
        3,
        Pruned,
        kept_experts=kept,
        num_predicted_experts=NUM_EXPERTS,
        capacity_factor=1.0,
        losses=(routers.RoutingLoss(ops.local_entropy_loss, "text"),),
        loss_weight=1.0,
        **FORMS[form],
    )
    x = cases.hide(tokens(), padding())
    (token, filled, gate), summary = call(router, x, padding())
    expected = routed(router, np.nan_to_num(x), padding())
    assert summary["logits"].shape[-1] == NUM_EXPERTS
    # Not scaled up: the probabilities of those that are left sum to less than one.
    probabilities = twins.softmax(expected.logits)[..., kept]
    assert_near(summary["probabilities"], probabilities, rtol=2e-5, atol=2e-5)
    assert (probabilities.sum(-1) < 0.95).any()
    # Twelve tokens for three experts
    seats = twin.token_choice(summary["selection"], 1, 4, "sum", NAMES, padding())
    assert_all_equal((token, filled), seats)
    assert_near(gate, twins.gates(probabilities, token, filled), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(
        summary["auxiliary_loss"], twin.local(expected, "text"), rtol=2e-5
    )


def test_float32_under_mixed_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    router = build(losses=ALL, **FORMS["disjoint_per_modality"])
    x = keras.ops.convert_to_tensor(tokens(), "bfloat16")
    decision = router(x, modalities=MODALITIES)
    for value in (decision.routing.gate, *decision.summary.values(), *router.weights):
        assert keras.backend.standardize_dtype(value.dtype) in ("float32", "bool")
    expected = routed(router, to_numpy(x)).logits
    reachable = np.isfinite(expected)
    assert_near(
        to_numpy(decision.summary["logits"])[reachable],
        expected[reachable],
        rtol=1e-5,
        atol=1e-5,
    )
