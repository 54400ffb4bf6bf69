"""Settings of the routers that seat single tokens, some of which may change later."""

import json

import keras
import numpy as np
import pytest

from keras_softmoe import layers, ops, routers
from keras_softmoe.checks import keyword_names
from tests import cases, twins
from tests.references import to_numpy
from tests.routers.sparse_routers import (
    SPARSE,
    TOKEN_CHOICE,
    WIDTH,
    build,
    call,
    losses,
)


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


WEIGHTS = {"importance_loss": 0.3, "load_loss": 0.2, "gshard_loss": 0.1, "z_loss": 0.4}


def test_losses_are_objects_with_weights():
    each = losses(**WEIGHTS)
    router = routers.SoftmaxTokenChoiceRouter(4, losses=each)
    assert router.routing_losses == tuple(each)
    values = [losses_of(routers.SoftmaxTokenChoiceRouter(4, losses=[x])) for x in each]
    np.testing.assert_allclose(losses_of(router), sum(values), rtol=1e-5)
    assert np.abs(values).min() > 0


def test_losses_by_default():
    paper = (
        routers.RoutingLoss(ops.importance_loss, weight=0.005),
        routers.RoutingLoss(ops.load_loss, weight=0.005),
    )
    assert routers.SoftmaxTokenChoiceRouter(4).routing_losses == paper
    # Without noise there is no load loss.
    router = routers.SoftmaxTokenChoiceRouter(4, noise_std=0.0)
    assert router.routing_losses == paper[:1]
    assert routers.SoftmaxTokenChoiceRouter(4, losses=()).routing_losses == ()
    assert routers.SinkhornTokenChoiceRouter(4).routing_losses == ()
    assert routers.SoftmaxExpertChoiceRouter(4).routing_losses == ()


def test_losses_of_older_files():
    names = {f"{name}_weight": weight for name, weight in WEIGHTS.items()}
    config = {"num_experts": 4, **names}
    router = routers.SoftmaxTokenChoiceRouter.from_config(config)
    assert router.routing_losses == tuple(losses(**WEIGHTS))
    # Those that a file does not name have the weights of the paper, if any.
    config = {"num_experts": 4, "load_loss_weight": 0.1, "z_loss_weight": 0.0}
    router = routers.SoftmaxTokenChoiceRouter.from_config(config)
    expected = losses(importance_loss=0.005, load_loss=0.1)
    assert router.routing_losses == tuple(expected)
    # Without noise the weight of the load loss did nothing.
    config = {**config, "noise_std": 0.0}
    router = routers.SinkhornTokenChoiceRouter.from_config(config)
    assert router.routing_losses == ()
    with pytest.raises(ValueError, match="Received: losses and load_loss_weight"):
        routers.SoftmaxTokenChoiceRouter.from_config({**config, "losses": []})


def test_losses_of_files_are_classes():
    serialized = {
        "module": "keras_softmoe.routers._routing_losses",
        "class_name": "ZLoss",
        "config": {"modality": None, "weight": 0.4},
        "registered_name": "keras_softmoe>ZLoss",
    }
    router = routers.SoftmaxExpertChoiceRouter(4, losses=[serialized])
    assert router.routing_losses == tuple(losses(z_loss=0.4))
    (config,) = router.get_config()["losses"]
    assert {**config, "module": serialized["module"]} == serialized
    wrong = {**serialized, "config": {"wieght": 0.4}}
    with pytest.raises(TypeError, match="wieght"):
        routers.SoftmaxExpertChoiceRouter(4, losses=[wrong])


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"losses": [routers.RoutingLoss(ops.load_loss)], "noise_std": 0.0},
            "noise.*load_loss",
        ),
        (
            {
                "losses": [
                    routers.RoutingLoss(ops.z_loss),
                    routers.RoutingLoss(ops.z_loss),
                ]
            },
            "given once",
        ),
        ({"losses": ["z"]}, "are objects like.*'z'"),
    ],
)
def test_bad_losses(settings, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        routers.SoftmaxTokenChoiceRouter(4, **settings)


@keras.saving.register_keras_serializable(package="tests")
def largest_logit(routed, valid):
    """A loss of a user."""
    return keras.ops.max(routed.logits, axis=(1, 2))


def test_a_loss_of_a_user_is_saved_with_its_router():
    own = routers.RoutingLoss(largest_logit, weight=0.5)
    router = routers.SoftmaxExpertChoiceRouter(4, losses=[own])
    serialized = keras.saving.serialize_keras_object(router)
    revived = keras.saving.deserialize_keras_object(json.loads(json.dumps(serialized)))
    for copy in (revived, router.clone(name="copy")):
        assert copy.routing_losses == (own,)
        loss = losses_of(copy)
        assert loss.shape == (2,) and loss[0] > 0


def test_a_layer_takes_a_loss_that_no_file_could_name():
    def first_logit(routed, valid):
        return routed.logits[:, 0, 0]

    own = routers.RoutingLoss(first_logit)
    router = routers.SoftmaxExpertChoiceRouter(4, losses=[own])
    assert layers.MoE(router, mlp_dim=4).router.routing_losses == (own,)


# === Constructors ===


@pytest.mark.parametrize("name", SPARSE)
def test_misspelt_arguments(name):
    with pytest.raises(TypeError, match="Did you mean `capacity_factor`.*capacty_fact"):
        SPARSE[name](4, capacty_factor=2.0)
    with pytest.raises(TypeError, match="no such argument.*losses.*Received: z_loss_w"):
        SPARSE[name](4, z_loss_weight=1.0)


@pytest.mark.parametrize("name", [*SPARSE, "limoe"])
def test_configuration_has_every_argument(name):
    router = SPARSE[name](4) if name in SPARSE else routers.LIMoERouter(4)
    names = keyword_names(type(router).__init__)
    assert sorted(router.get_config()) == sorted(names)
    # And each is an attribute.
    other = {"losses": router.routing_losses, "num_predicted_experts": None}
    given = {n: getattr(router, n) for n in names if n not in other}
    again = type(router)(**given, **{n: x for n, x in other.items() if n in names})
    assert again.get_config() == router.get_config()


def test_an_argument_of_another_router_is_none():
    router = routers.SoftmaxExpertChoiceRouter(4)
    assert not hasattr(router, "priority")
    with pytest.raises(AttributeError, match="num_iterations"):
        router.num_iterations  # noqa: B018
