"""One pass over data, whose decisions several reducers see."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_softmoe import analysis, layers, routers
from keras_softmoe.ops import DenseRouting
from tests.support.references import to_numpy

NUM_TOKENS = 4
X = np.random.default_rng(0).normal(size=(5, NUM_TOKENS, 6)).astype("float32")


class Kept:
    """Reducer that keeps all that it is shown."""

    def __init__(self):
        self.seen = []

    def update(self, name, decision, inputs):
        self.seen.append((name, decision, inputs))

    def result(self):
        return self.seen


class Spy(keras.layers.Layer):
    """Passes its input on; counts calls and whether a backward pass was prepared."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(6)
        self.seen = []

    def call(self, x):
        x = self.dense(x)
        self.seen.append(getattr(x, "requires_grad", False))
        return x


def own_model(spy=None):
    """A user's model: a soft layer, then one that chooses, in groups of two."""
    inputs = keras.Input((NUM_TOKENS, 6))
    x = inputs if spy is None else spy(inputs)
    x = x + layers.SoftMoE(3, 8, name="soft")(x)
    router = routers.SoftmaxTokenChoiceRouter(2, 1, 0.5)
    x = layers.MoE(router, 8, group_images=2, name="sparse")(x)
    return keras.Model(inputs, x)


def test_what_a_reducer_sees():
    model = own_model()
    (seen,) = analysis.observe(model, X, [Kept()], batch_size=3, verbose=0)
    assert [name for name, *_ in seen] == ["soft", "sparse"] * 2
    for batch, rows in enumerate((slice(0, 3), slice(3, 5))):
        with routers.record() as decisions:
            model(X[rows], training=False)
        for (_, found, inputs), decision in zip(
            seen[2 * batch : 2 * batch + 2], decisions.values(), strict=True
        ):
            np.testing.assert_array_equal(inputs, X[rows])
            parts = zip(
                keras.tree.flatten(found), keras.tree.flatten(decision), strict=True
            )
            for value, expected in parts:
                assert isinstance(value, np.ndarray)
                np.testing.assert_array_equal(value, to_numpy(expected))
    # Three images in groups of two: the fourth is padding.
    valid = np.ones((2, 2 * NUM_TOKENS), bool)
    valid[1, NUM_TOKENS:] = False
    np.testing.assert_array_equal(seen[1][1].summary["valid"], valid)


def test_reducers_share_a_pass():
    spy = Spy()
    model = own_model(spy)
    spy.seen.clear()
    found = analysis.observe(model, X, [Kept(), Kept()], batch_size=2, verbose=0)
    # Three batches, of which no gradients are kept.
    assert spy.seen == [False] * 3
    assert [len(kept) for kept in found] == [6, 6]


def test_a_layer_that_is_called_twice():
    inputs = keras.Input((NUM_TOKENS, 6))
    layer = layers.SoftMoE(3, 8, name="shared")
    model = keras.Model(inputs, layer(layer(inputs)))
    (seen,) = analysis.observe(model, X, [Kept()], verbose=0)
    assert [name for name, *_ in seen] == ["shared", "shared"]
    load = analysis.analyze(model, X, verbose=0).blocks["shared"]
    assert load.num_tokens == 2 * 5 * NUM_TOKENS
    combine = [decision.routing.combine.sum((0, 1, 3)) for _, decision, _ in seen]
    np.testing.assert_allclose(load.load, combine[0] + combine[1], rtol=1e-5)


class Doubling(routers.Router):
    """A user's router with dense weights: expert `e` takes token `e` alone."""

    def call(self, tokens, valid=None, training=False):
        num_groups, num_tokens = tokens.shape[:2]
        dispatch = np.zeros((num_groups, num_tokens, self.num_experts, 1), "float32")
        for expert in range(self.num_experts):
            dispatch[:, expert, expert] = 1.0
        dispatch = keras.ops.convert_to_tensor(dispatch)
        return routers.Decision(DenseRouting(dispatch, 2 * dispatch), {})


def test_dense_weights_of_a_users_router():
    inputs = keras.Input((NUM_TOKENS, 6))
    model = keras.Model(inputs, layers.MoE(Doubling(3), 8, name="doubling")(inputs))
    load = analysis.analyze(model, X, verbose=0).blocks["doubling"]
    # Combine weights; the last of four tokens goes to no expert.
    np.testing.assert_allclose(load.load, [10.0, 10.0, 10.0])
    assert load.dropped == 0.25


def test_experts_of_another_library_are_not_seen():
    """A mixture of experts of KerasHub is not dense; nor are its routers ours."""
    model = keras_hub.models.Qwen3MoeBackbone(
        vocabulary_size=8,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        hidden_dim=8,
        intermediate_dim=8,
        moe_intermediate_dim=4,
        shared_expert_intermediate_dim=4,
        num_experts=2,
        top_k=1,
    )
    message = "this library's MoE layers.*Received: a Qwen3MoeBackbone"
    with pytest.raises(ValueError, match=message):
        analysis.analyze(model, np.zeros((1, 2), "int32"), verbose=0)
