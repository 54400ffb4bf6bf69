"""Settings of sparse routers, fields of policies.

Policies are in `routers/assignment.py`, `routers/scores.py` and
`routers/limoe.py`.
"""

import numpy as np
import pytest

from keras_softmoe import routers
from keras_softmoe.checks import keyword_names
from tests.support import cases, twins
from tests.support.close import assert_near
from tests.support.sparse_routers import SPARSE, TOKEN_CHOICE, WIDTH, build, call


@pytest.mark.parametrize("name", SPARSE)
def test_capacity_outside_training(name):
    router = build(name, capacity_factor=0.5, eval_capacity_factor=1.5)
    choices = getattr(router, "num_selected_experts", 1)
    for training, factor in ((True, 0.5), (False, 1.5)):
        (token, _, _), _ = call(router, cases.TOKENS, training=training)
        assert token.shape[-1] == np.ceil(8 * choices * factor / 4)


@pytest.mark.parametrize("name", TOKEN_CHOICE)
def test_normalized_gates(name):
    router = build(
        name, num_selected_experts=2, normalize_gates=True, capacity_factor=4
    )
    (token, filled, gate), summary = call(router, cases.TOKENS)
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
    router = build("softmax_token_choice", capacity_factor=4.0, keep_fraction=0.5)
    _, summary = call(router, cases.TOKENS)
    # Half of the tokens, those with the largest probabilities, and no other.
    largest = summary["probabilities"].max(-1)
    expected = largest < np.sort(largest, -1)[:, 4:5]
    np.testing.assert_array_equal(summary["dropped"], expected)


@pytest.mark.parametrize("name", SPARSE)
def test_random_logits_look_at_no_token(name, set_noise):
    noise = cases.array("normal", (2, 8, 4), 3)
    router = build(name, random_logits=True)
    undrawn = set_noise(noise, noise)
    _, one = call(router, cases.array("normal", (2, 8, WIDTH), 0))
    (token, filled, gate), other = call(router, cases.array("normal", (2, 8, WIDTH), 1))
    assert not undrawn
    np.testing.assert_allclose(one["logits"], noise, rtol=1e-6)
    np.testing.assert_array_equal(one["logits"], other["logits"])
    scores = noise if name == "expert_race" else twins.softmax(noise)
    expected = twins.gates(scores, token, filled)
    assert_near(gate, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SPARSE)
def test_permuted_logits_are_the_tokens_own(name, set_noise):
    noise = cases.array("normal", (2, 8, 4), 3)
    router = build(name)
    _, learned = call(router, cases.TOKENS)
    router.update(random_logits="permuted")
    undrawn = set_noise(noise)
    (token, filled, gate), permuted = call(router, cases.TOKENS)
    assert not undrawn
    order = np.argsort(noise, axis=-1)
    expected = np.take_along_axis(learned["logits"], order, axis=-1)
    np.testing.assert_array_equal(permuted["logits"], expected)
    scores = expected if name == "expert_race" else twins.softmax(expected)
    expected = twins.gates(scores, token, filled)
    assert_near(gate, expected, rtol=2e-5, atol=2e-5)


def test_unknown_random_logits():
    with pytest.raises(ValueError, match="'permuted'. Received: random_logits='no'"):
        build("softmax_token_choice", random_logits="no")


@pytest.mark.parametrize("name", SPARSE)
def test_mutable_settings_change_the_next_call(name):
    settings = {"capacity_factor": 0.5}
    if name in TOKEN_CHOICE:
        settings.update(num_selected_experts=1, priority="sum", keep_fraction=0.75)
    router = build(name)
    router.update(**settings)
    fresh = build(name, **settings)
    fresh.kernel.assign(router.kernel)
    assert {**router.get_config(), "name": ""} == {**fresh.get_config(), "name": ""}
    for actual, expected in zip(
        call(router, cases.TOKENS)[0], call(fresh, cases.TOKENS)[0], strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


def test_a_refused_setting_changes_nothing():
    router = build("softmax_token_choice")
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
