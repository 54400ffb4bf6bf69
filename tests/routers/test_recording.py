"""Decisions of routers, collected while a model runs."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_softmoe import layers, routers
from keras_softmoe.ops import SlotRouting
from tests.support.close import assert_near
from tests.support.layer_checks import assert_same_weights
from tests.support.references import assert_each_near

BACKEND = keras.backend.backend()
DATA = np.random.default_rng(0).normal(size=(3, 16, 8)).astype("float32")


def model():
    """A model of a user: a soft layer, then a sparse one over groups of two images."""
    inputs = keras.Input((16, 8))
    x = layers.SoftMoE(4, 16, name="soft")(inputs)
    router = routers.SoftmaxTokenChoiceRouter(4, capacity_factor=0.5)
    x = layers.MoE(router, 16, group_images=2, name="sparse")(x)
    return keras.Model(inputs, x)


def compiled(function):
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    import torch

    # The compiler of the processor's code is not needed to trace.
    return torch.compile(function, backend="eager")


def numbers(decisions):
    return keras.tree.map_structure(ops.convert_to_numpy, decisions)


def test_decisions_of_all_routers_in_order():
    built = model()
    with routers.record() as decisions:
        built(DATA)
    assert list(decisions) == ["soft/moe/router", "sparse/router"]
    soft, sparse = numbers(list(decisions.values()))
    assert set(soft.summary) == {"logits", "auxiliary_loss", "valid"}
    np.testing.assert_array_equal(soft.summary["valid"], np.ones((3, 16), bool))
    # The second group is half padding.
    valid = np.ones((2, 32), bool)
    valid[1, 16:] = False
    np.testing.assert_array_equal(sparse.summary["valid"], valid)
    filled, token = sparse.routing.filled, sparse.routing.token
    np.testing.assert_array_equal(sparse.summary["load"], filled.sum(-1))
    taken = np.zeros((2, 32), bool)
    for group in range(2):
        taken[group, token[group][filled[group]]] = True
    np.testing.assert_array_equal(sparse.summary["dropped"], ~taken & valid)
    assert sparse.summary["dropped"].any()


def test_a_second_call_has_an_entry_of_its_own():
    layer = layers.SoftMoE(4, 16, name="soft")
    with routers.record() as decisions:
        layer(DATA)
        layer(2.0 * DATA)
    assert list(decisions) == ["soft/moe/router", "soft/moe/router (2)"]
    first, second = numbers(list(decisions.values()))
    # The norm of tokens does not count, their direction does.
    assert_near(first.summary["logits"], second.summary["logits"], rtol=1e-4, atol=1e-5)


def test_nested_scopes_collect_alike():
    layer = layers.SoftMoE(4, 16, name="soft")
    with routers.record() as outer:
        layer(DATA)
        with routers.record() as inner:
            layer(DATA)
    assert len(outer) == 2 and len(inner) == 1
    assert inner["soft/moe/router"] is outer["soft/moe/router (2)"]
    with routers.record() as later:
        pass
    assert later == {}


# PyTorch's compiler looks at gradients where it breaks a graph, and warns of itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected:UserWarning")
def test_inside_a_compiled_function():
    # One layer: PyTorch's compiler takes long for each.
    router = routers.SoftmaxTokenChoiceRouter(4, capacity_factor=0.5)
    built = layers.MoE(router, 16, group_images=2, name="sparse")
    built.build(DATA.shape)

    def decide(x):
        with routers.record() as decisions:
            built(x)
        return {path: decision.summary for path, decision in decisions.items()}

    data = ops.convert_to_tensor(DATA)
    eager, traced = numbers(decide(data)), numbers(compiled(decide)(data))
    assert list(eager) == list(traced)
    for path in eager:
        assert set(eager[path]) == set(traced[path])
        assert_each_near(traced[path], eager[path], rtol=1e-4)


def test_around_a_compiled_function_the_scope_says_so():
    built = model()
    before = [ops.convert_to_numpy(w) for w in built.weights]
    if BACKEND == "torch":
        # It compiles nothing of its own accord.
        with routers.record() as decisions:
            built.predict(DATA, verbose=0)
        assert list(decisions) == ["soft/moe/router", "sparse/router"]
        return
    with (
        pytest.raises(ValueError, match=f"compiled by {BACKEND}.*soft/moe/router"),
        routers.record(),
    ):
        built.predict(DATA, verbose=0)
    assert_same_weights(built, before)


def test_nothing_is_computed_for_observers_that_are_not_there(monkeypatch):
    layer = model().get_layer("sparse")

    def complete(*args, **kwargs):
        raise AssertionError("computed for nobody")

    monkeypatch.setattr(routers.Router, "complete", complete)
    layer(DATA)
    with pytest.raises(AssertionError, match="for nobody"), routers.record():
        layer(DATA)


def test_a_router_of_a_user():
    class First(routers.Router):
        """All tokens to the first slots of the first expert."""

        def call(self, tokens, valid=None, training=False):
            num_groups = tokens.shape[0]
            token = np.tile(
                np.array([0, 1], "int32"), (num_groups, self.num_experts, 1)
            )
            token = ops.convert_to_tensor(token)
            filled = ops.ones_like(token, "bool")
            gate = ops.cast(filled, "float32")
            return routers.Decision(SlotRouting(token, filled, gate), {"mine": gate})

    router = First(3)
    summary = numbers(router(DATA).summary)
    np.testing.assert_array_equal(summary["load"], np.full((3, 3), 2.0))
    np.testing.assert_array_equal(summary["dropped"], [[False] * 2 + [True] * 14] * 3)
    assert "mine" in summary


def test_keys_of_ones_own():
    router = routers.SoftRouter(2)
    with routers.record(key=lambda router: router.num_experts) as decisions:
        router(DATA)
        router(DATA)
    assert list(decisions) == [2, "2 (2)"]


@pytest.mark.parametrize(
    "router",
    [
        routers.SoftRouter(4),
        routers.IdentityRouter(4),
        routers.SoftmaxTokenChoiceRouter(4),
        routers.SinkhornExpertChoiceRouter(4),
    ],
    ids=lambda router: type(router).__name__,
)
def test_a_router_in_a_functional_model(router):
    inputs = keras.Input((16, 8))
    decision = router(inputs)
    expected = numbers(router(DATA))
    assert set(decision.summary) == set(expected.summary)
    built = keras.Model(inputs, decision.summary)
    found = numbers(built(DATA))
    for name, value in expected.summary.items():
        assert decision.summary[name].shape == (None, *value.shape[1:]), name
        assert_near(found[name], value, rtol=1e-5, atol=1e-6)


def test_training_is_the_third_argument():
    router = routers.SoftmaxTokenChoiceRouter(4, noise_std=8.0)
    quiet, same = (numbers(router(DATA, None, False)) for _ in range(2))
    noisy = numbers(router(DATA, None, True))
    np.testing.assert_array_equal(
        quiet.summary["probabilities"], same.summary["probabilities"]
    )
    assert np.abs(noisy.summary["probabilities"] - quiet.summary["probabilities"]).max()
