"""Experts balanced by a bias (`SoftmaxTokenChoiceRouter`), without a loss."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, ops, routers
from tests.support import cases, tiny, twins
from tests.support.close import assert_near
from tests.support.layer_checks import reloaded
from tests.support.references import assert_all_equal, to_numpy
from tests.support.sparse_routers import WIDTH, call_in_training

RATE = 0.1
EXPERTS = 4


def balanced(**settings):
    settings = {"bias_update_rate": RATE, "num_selected_experts": 2, **settings}
    router = routers.SoftmaxTokenChoiceRouter(EXPERTS, **settings)
    router.build((None, 8, WIDTH))
    router.kernel.assign(cases.array("normal", (WIDTH, EXPERTS, 1), 5)[..., 0])
    return router


def scores_twin(router, tokens):
    logits = np.float64(tokens) @ np.float64(to_numpy(router.kernel.value))
    if router.score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return twins.softmax(logits)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_bias_is_its_twins(score):
    """Of a few steps, with padding, whatever the capacity drops."""
    router = balanced(score=score, capacity_factor=0.5, priority="sum")
    bias, step, differs = np.zeros(EXPERTS), call_in_training(router), False
    for seed in range(1, 6):
        # Padding in the odd steps
        tokens = cases.array("normal", (2, 8, WIDTH), seed) + 0.5
        valid = cases.padding((2, 8), seed)
        if valid is None:
            valid = np.ones((2, 8), bool)
        scores = scores_twin(router, tokens)
        (token, filled, gate), summary = step(
            np.where(valid[..., None], tokens, 7), valid
        )
        seats = twins.token_choice(scores, 2, token.shape[-1], "sum", valid, bias=bias)
        assert_all_equal((token, filled), seats)
        np.testing.assert_allclose(gate, twins.gates(scores, token, filled), rtol=2e-5)
        for key, expected in (("probabilities", scores), ("selection", scores + bias)):
            assert_near(summary[key][valid], expected[valid], atol=2e-5)
        unbiased = twins.token_choice(scores, 2, token.shape[-1], "sum", valid)
        differs |= not np.array_equal(unbiased[0], seats[0])
        bias = twins.moved_bias(bias, scores, 2, RATE, valid)
        assert_near(to_numpy(router.bias), bias, atol=1e-6)
    assert differs


def test_the_bias_changes_what_is_chosen_and_nothing_else():
    """Order of choices, priorities and gates are by the score, also of all choices."""
    for priority in ("max", "pair", "position"):
        router = balanced(num_selected_experts=3, priority=priority)
        router.bias.assign([0.0, 0.9, 0.3, -0.4])
        scores = scores_twin(router, cases.TOKENS)
        routing = router(cases.TOKENS).routing
        seats = twins.token_choice(
            scores, 3, routing.token.shape[-1], priority, bias=to_numpy(router.bias)
        )
        np.testing.assert_array_equal(to_numpy(routing.token), seats[0])
    router = balanced(capacity_factor=None, normalize_gates=True, score="sigmoid")
    router.bias.assign([0.0, 0.9, 0.3, -0.4])
    routing = router(cases.TOKENS).routing
    expert, gate = to_numpy(routing.expert), to_numpy(routing.gate)
    scores = np.take_along_axis(scores_twin(router, cases.TOKENS), expert, -1)
    assert (np.diff(scores, axis=-1) <= 0).all()
    assert (expert == 1).any(-1).mean() > 0.9
    np.testing.assert_allclose(gate, scores / scores.sum(-1, keepdims=True), rtol=2e-5)


def test_when_the_bias_stays():
    for settings, training in (
        ({}, False),
        ({"trainable": False}, True),
        ({"bias_update_rate": 0.0}, True),
        ({"random_logits": True}, True),
        ({"random_logits": "permuted"}, True),
    ):
        router = balanced(**settings)
        router(cases.TOKENS, training=training)
        assert not to_numpy(router.bias).any(), settings
    # Random routing is even, whatever was learned.
    router = balanced(num_selected_experts=1, random_logits=True, capacity_factor=None)
    router.bias.assign([0.9, 0.0, 0.0, 0.0])
    load = to_numpy(router(np.zeros((8, 64, WIDTH), "float32")).summary["load"])
    assert load.sum(0).max() < 1.3 * load.sum(0).mean()


def test_one_move_for_an_accumulated_gradient():
    tokens = cases.array("normal", (4, 8, WIDTH), 0) + 0.5
    whole, halves = balanced(), balanced(bias_update_every=2)
    for _ in range(2):
        whole(tokens, training=True)
        before = to_numpy(halves.bias)
        halves(tokens[:2], training=True)
        np.testing.assert_array_equal(to_numpy(halves.bias), before)
        assert to_numpy(halves.load).sum() == 2 * 2 * 8
        halves(tokens[2:], training=True)
        assert not to_numpy(halves.load).any()
        np.testing.assert_array_equal(to_numpy(halves.bias), to_numpy(whole.bias))
    assert to_numpy(whole.bias).any()


if keras.backend.backend() == "jax":

    @pytest.mark.parametrize("rate", [None, 0.001])
    def test_load_is_even_after_500_steps(rate):
        """Where the same router without a bias drops over 30 % of the tokens."""
        import jax

        keras.utils.set_random_seed(1)
        router = routers.SoftmaxTokenChoiceRouter(
            EXPERTS, bias_update_rate=rate, noise_std=0.0, losses=(), capacity_factor=1
        )
        layer = layers.MoE(router, mlp_dim=8, group_images=16)
        layer.build((None, 16, 8))

        def tokens(seed):
            # Most look alike.
            x = jax.random.normal(jax.random.key(seed), (16, 16, 8))
            return x.at[..., 0].add(1.5)

        def loss(trainable, state, x):
            y, state = layer.stateless_call(trainable, state, x, training=True)
            return jax.numpy.mean((y - abs(x)) ** 2), state

        def step(carried, seed):
            trainable, state = carried
            gradients, state = jax.grad(loss, has_aux=True)(
                trainable, state, tokens(seed)
            )
            trainable = [w - 0.1 * g for w, g in zip(trainable, gradients, strict=True)]
            return (trainable, state), None

        weights = (layer.trainable_variables, layer.non_trainable_variables)
        start = tuple([v.value for v in variables] for variables in weights)
        trained, _ = jax.lax.scan(step, start, jax.numpy.arange(500))
        for variables, values in zip(weights, trained, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

        @jax.jit
        def found(seeds):
            x = jax.vmap(tokens)(seeds).reshape(-1, 256, 8)
            summary = layer.router(x).summary
            return summary["selection"].argmax(-1), summary["dropped"]

        chosen, dropped = map(to_numpy, found(jax.numpy.arange(1000, 1064)))
        load = np.bincount(chosen.ravel(), minlength=EXPERTS) / chosen.size * EXPERTS
        dropped = dropped.mean()
        if rate is None:
            assert dropped > 0.3, (dropped, load)
        else:
            assert np.abs(load - 1).max() < 0.1 and dropped < 0.1, (dropped, load)


# === Settings and files ===


def test_losses_of_balanced_routers():
    assert balanced().routing_losses == () and balanced().noise_std == 0.0
    of_sigmoids = [routers.RoutingLoss(f) for f in (ops.importance_loss, ops.load_loss)]
    router = routers.SoftmaxTokenChoiceRouter(
        EXPERTS, score="sigmoid", losses=of_sigmoids
    )
    logits = to_numpy(router(cases.TOKENS).summary["logits"])
    loss = to_numpy(router(cases.TOKENS).summary["auxiliary_loss"])
    np.testing.assert_allclose(
        loss, twins.importance_loss(1 / (1 + np.exp(-np.float64(logits)))), rtol=1e-4
    )
    for function, settings, received in (
        (ops.gshard_loss, {"score": "sigmoid"}, "gshard_loss.*score='sigmoid'"),
        (ops.z_loss, {"score": "sigmoid"}, "z_loss.*score='sigmoid'"),
        (ops.load_loss, {"bias_update_rate": 0.1, "noise_std": 1.0}, "load_loss.*=0.1"),
        (ops.gshard_loss, {"bias_update_rate": 0.1}, "gshard_loss.*=0.1"),
    ):
        with pytest.raises(ValueError, match=f"Received: losses with.*{received}"):
            losses = [routers.RoutingLoss(function)]
            routers.SoftmaxTokenChoiceRouter(EXPERTS, losses=losses, **settings)


@pytest.mark.parametrize(
    ("settings", "received"),
    [
        ({"score": "tanh"}, "score='tanh'"),
        ({"bias_update_rate": -0.1}, "bias_update_rate=-0.1"),
        ({"bias_update_every": 0}, "bias_update_every=0"),
        ({"bias_update_every": 2, "bias_update_rate": None}, "bias_update_every=2"),
    ],
)
def test_bad_settings(settings, received):
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        balanced(**settings)


def test_the_rate_may_change():
    router = balanced()
    router.update(bias_update_rate=0.2)
    router(cases.TOKENS, training=True)
    assert np.abs(to_numpy(router.bias)).max() == np.float32(0.2)
    plain = routers.SoftmaxTokenChoiceRouter(EXPERTS)
    for changed, rate in ((router, None), (plain, 0.1)):
        with pytest.raises(ValueError, match=f"Received: bias_update_rate={rate}"):
            changed.update(bias_update_rate=rate)
    with pytest.raises(ValueError, match="Received: score"):
        router.update(score="sigmoid")


def test_the_bias_is_trained_in_a_model_and_saved(tmp_path):
    """Under mixed precision, and with the optimizer's accumulation of gradients."""
    router = routers.SoftmaxTokenChoiceRouter(
        EXPERTS, score="sigmoid", bias_update_rate=RATE, bias_update_every=2
    )
    model = tiny.classifier(router=router, group_images=2, dtype="mixed_bfloat16")
    (found,) = model.backbone.routers.values()
    found.bias.assign(np.zeros(EXPERTS))
    found.load.assign(np.zeros(EXPERTS))
    found.calls.assign(0.0)
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    x = np.random.default_rng(0).uniform(0, 255, size=(8, *tiny.IMAGE_SHAPE))
    model.fit(x, np.zeros(8), batch_size=4, shuffle=False, verbose=0)
    bias = to_numpy(found.bias)
    assert bias.dtype == "float32"
    assert np.abs(bias).max() == np.float32(RATE) and not to_numpy(found.load).any()
    revived = reloaded(model, tmp_path)
    (again,) = revived.backbone.routers.values()
    np.testing.assert_array_equal(to_numpy(again.bias), bias)
    clone = again.clone("clone")
    clone.build((None, 8, 8))
    assert not to_numpy(clone.bias).any()
    model.set_routing(bias_update_rate=0.0)
    model.compile(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="every=2 of.*accumulation_steps=1"):
        model.fit(x, np.zeros(8), verbose=0)
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    model.fit(x, np.zeros(8), batch_size=4, shuffle=False, verbose=0)
    np.testing.assert_array_equal(to_numpy(found.bias), bias)
