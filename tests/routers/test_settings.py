"""Settings of the routers that seat single tokens, some of which may change later."""

import keras
import numpy as np
import pytest

from keras_softmoe import routers
from tests import cases, twins
from tests.references import to_numpy
from tests.routers.sparse_routers import SPARSE, TOKEN_CHOICE, WIDTH, build, call


@pytest.mark.parametrize("name", SPARSE)
def test_capacity_outside_training(name):
    tokens = cases.array("normal", (2, 8, WIDTH), 0)
    router = build(name, 4, WIDTH, capacity_factor=0.5, eval_capacity_factor=1.5)
    choices = getattr(router, "num_selected_experts", 1)
    for training, factor in ((True, 0.5), (False, 1.5)):
        (token, _, _), _ = call(router, tokens, training=training)
        assert token.shape[-1] == np.ceil(8 * choices * factor / 4)


@pytest.mark.parametrize("name", TOKEN_CHOICE)
def test_normalized_gates(name):
    tokens = cases.array("normal", (2, 8, WIDTH), 0)
    router = build(
        name, 4, WIDTH, num_selected_experts=2, normalize_gates=True, capacity_factor=4
    )
    (token, filled, gate), summary = call(router, tokens)
    # The softmax over the chosen logits only: softmax(TOP-K), V-MoE table 3.
    order = np.argsort(-summary["selection"], axis=-1, kind="stable")[..., :2]
    chosen = np.full(summary["logits"].shape, -np.inf)
    np.put_along_axis(
        chosen, order, np.take_along_axis(summary["logits"], order, -1), -1
    )
    expected = twins.gates(twins.softmax(chosen), token, filled)
    np.testing.assert_allclose(gate, expected, rtol=2e-5)
    _, combine = twins.to_dense(token, filled, gate, 8)
    np.testing.assert_allclose(combine.sum((2, 3)), 1.0, rtol=1e-5)


def test_skipping_reaches_the_router():
    tokens = cases.array("normal", (2, 8, WIDTH), 0)
    router = build(
        "softmax_token_choice", 4, WIDTH, capacity_factor=4.0, keep_fraction=0.5
    )
    _, summary = call(router, tokens)
    # Half of the tokens, those with the largest probabilities, and no other.
    largest = summary["probabilities"].max(-1)
    expected = largest < np.sort(largest, -1)[:, 4:5]
    np.testing.assert_array_equal(summary["dropped"], expected)


@pytest.mark.parametrize("name", SPARSE)
def test_random_logits_look_at_no_token(name, set_noise):
    noise = cases.array("normal", (2, 8, 4), 3)
    router = build(name, 4, WIDTH, random_logits=True)
    undrawn = set_noise(noise, noise)
    _, one = call(router, cases.array("normal", (2, 8, WIDTH), 0))
    (token, filled, gate), other = call(router, cases.array("normal", (2, 8, WIDTH), 1))
    assert not undrawn
    np.testing.assert_allclose(one["logits"], noise, rtol=1e-6)
    np.testing.assert_array_equal(one["logits"], other["logits"])
    expected = twins.gates(twins.softmax(noise), token, filled)
    np.testing.assert_allclose(gate, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SPARSE)
def test_permuted_logits_are_the_tokens_own(name, set_noise):
    noise = cases.array("normal", (2, 8, 4), 3)
    tokens = cases.array("normal", (2, 8, WIDTH), 0)
    router = build(name, 4, WIDTH)
    _, learned = call(router, tokens)
    router.update(random_logits="permuted")
    undrawn = set_noise(noise)
    (token, filled, gate), permuted = call(router, tokens)
    assert not undrawn
    order = np.argsort(noise, axis=-1)
    expected = np.take_along_axis(learned["logits"], order, axis=-1)
    np.testing.assert_array_equal(permuted["logits"], expected)
    expected = twins.gates(twins.softmax(expected), token, filled)
    np.testing.assert_allclose(gate, expected, rtol=2e-5, atol=2e-5)


def test_unknown_random_logits():
    with pytest.raises(ValueError, match="'permuted'. Received: random_logits='no'"):
        build("softmax_token_choice", 4, WIDTH, random_logits="no")


@pytest.mark.parametrize("name", SPARSE)
def test_mutable_settings_change_the_next_call(name):
    tokens = cases.array("normal", (2, 8, WIDTH), 0)
    settings = {"capacity_factor": 0.5}
    if name in TOKEN_CHOICE:
        settings.update(num_selected_experts=1, priority="sum", keep_fraction=0.75)
    router = build(name, 4, WIDTH)
    router.update(**settings)
    fresh = build(name, 4, WIDTH, **settings)
    fresh.kernel.assign(router.kernel)
    assert {**router.get_config(), "name": ""} == {**fresh.get_config(), "name": ""}
    for actual, expected in zip(
        call(router, tokens)[0], call(fresh, tokens)[0], strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


def test_a_refused_setting_changes_nothing():
    router = build("softmax_token_choice", 4, WIDTH)
    before = router.get_config()
    for wrong, received in (
        ({"capacity_factor": 2.0, "num_selected_experts": 9}, "9"),
        ({"priority": "best"}, "best"),
        ({"num_experts": 8}, "num_experts"),
    ):
        with pytest.raises(ValueError, match=f"Received: .*{received}"):
            router.update(**wrong)
        assert router.get_config() == before
    with pytest.raises(ValueError, match="Received: capacity_factor"):
        routers.SoftRouter(4).update(capacity_factor=2.0)


# === Losses ===


def losses_of(router):
    """Losses of a training call on the same tokens and the same noise."""
    router.build((None, 6, 8))
    router.kernel.assign(np.random.default_rng(1).normal(size=router.kernel.shape))
    router.seed_generator.state.assign([0, 0])
    tokens = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    return to_numpy(router(tokens, training=True).summary["auxiliary_loss"])


def test_losses_are_objects_with_weights():
    weights = {
        "importance_loss_weight": 0.3,
        "load_loss_weight": 0.2,
        "gshard_loss_weight": 0.1,
        "z_loss_weight": 0.4,
    }
    kinds = (
        routers.ImportanceLoss,
        routers.LoadLoss,
        routers.GShardLoss,
        routers.ZLoss,
    )
    losses = [
        kind(weight=weight)
        for kind, weight in zip(kinds, weights.values(), strict=True)
    ]
    router = routers.SoftmaxTokenChoiceRouter(4, losses=losses)
    # As files that were saved before have them.
    named = routers.SoftmaxTokenChoiceRouter(4, **weights)
    assert named.routing_losses == router.routing_losses == tuple(losses)
    each = [losses_of(routers.SoftmaxTokenChoiceRouter(4, losses=[x])) for x in losses]
    np.testing.assert_allclose(losses_of(router), sum(each), rtol=1e-5)
    assert np.abs(each).min() > 0


def test_losses_by_default():
    paper = (routers.ImportanceLoss(weight=0.005), routers.LoadLoss(weight=0.005))
    assert routers.SoftmaxTokenChoiceRouter(4).routing_losses == paper
    # Without noise there is no load loss.
    router = routers.SoftmaxTokenChoiceRouter(4, noise_std=0.0)
    assert router.routing_losses == paper[:1]
    assert routers.SoftmaxTokenChoiceRouter(4, losses=()).routing_losses == ()
    assert routers.SinkhornTokenChoiceRouter(4).routing_losses == ()
    assert routers.SoftmaxExpertChoiceRouter(4).routing_losses == ()


def test_no_load_loss_without_noise_is_said():
    settings = {"noise_std": 0.0, "load_loss_weight": 0.1, "z_loss_weight": 0.2}
    with pytest.warns(UserWarning, match="left out. Received: noise_std=0, load_loss"):
        router = routers.SinkhornTokenChoiceRouter(4, **settings)
    assert router.routing_losses == (routers.ZLoss(weight=0.2),)
    # Not of files, which have the weight that was the default.
    config = {"num_experts": 4, **settings}
    router = routers.SinkhornTokenChoiceRouter.from_config(config)
    assert router.routing_losses == (routers.ZLoss(weight=0.2),)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"losses": [routers.LoadLoss()], "noise_std": 0.0}, "noise.*LoadLoss"),
        ({"losses": [routers.ZLoss(), routers.ZLoss()]}, "given once"),
        ({"losses": ["z"]}, "are objects like.*'z'"),
        ({"losses": (), "z_loss_weight": 0.1}, "Received: losses and z_loss_weight"),
    ],
)
def test_bad_losses(settings, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        routers.SoftmaxTokenChoiceRouter(4, **settings)


@keras.saving.register_keras_serializable(package="tests")
class LargestLogit(routers.RoutingLoss):
    """A loss of a user, which knows nothing of weights."""

    def __init__(self, modality=None):
        super().__init__(modality)

    def __call__(self, routed):
        return keras.ops.max(routed.logits, axis=(1, 2))


def test_a_loss_of_a_user_is_cloned_with_its_router():
    router = routers.SoftmaxExpertChoiceRouter(4, losses=[LargestLogit()])
    copy = router.clone(name="copy")
    assert copy.routing_losses == (LargestLogit(),)
    loss = losses_of(copy)
    assert loss.shape == (2,) and loss[0] > 0
