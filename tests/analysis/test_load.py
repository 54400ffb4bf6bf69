"""Load of experts, token by token, in any model with any router."""

import keras
import numpy as np
import pytest

from keras_softmoe import analysis, layers, ops, routers
from tests.models import tiny
from tests.recorded import recorded
from tests.references import to_numpy

ROUTERS = {
    "token choice": routers.SoftmaxTokenChoiceRouter(3, 1, 0.5),
    "expert choice": routers.SoftmaxExpertChoiceRouter(3, 0.5),
    "identity": routers.IdentityRouter(4),
    "soft": routers.SoftRouter(3, slots_per_expert=2),
}
NUM_TOKENS = 4


@pytest.mark.parametrize("name", ROUTERS)
def test_load(name):
    # Three inputs in groups of two, in batches of two.
    x = np.random.default_rng(0).normal(size=(3, NUM_TOKENS, 6)).astype("float32")
    inputs = keras.Input((NUM_TOKENS, 6))
    layer = layers.MoE(ROUTERS[name], 8, group_images=2, name="moe")
    model = keras.Model(inputs, layer(inputs))
    found = analysis.expert_load(model, x, batch_size=2, verbose=0)
    assert list(found) == ["moe"]
    _, (routing, _) = recorded(layer, x)
    num_experts = layer.router.num_experts
    dispatch, combine = map(to_numpy, ops.to_dense(routing, 2 * NUM_TOKENS))
    load, dropped = np.zeros(num_experts), 0
    for token in range(3 * NUM_TOKENS):
        group, place = divmod(token, 2 * NUM_TOKENS)
        taken = combine if name == "soft" else dispatch
        load += taken[group, place].sum(-1)
        dropped += not dispatch[group, place].any()
    np.testing.assert_allclose(found["moe"].load, load, rtol=1e-5)
    np.testing.assert_allclose(found["moe"].dropped, dropped / (3 * NUM_TOKENS))
    assert found["moe"].num_groups == 2
    assert found["moe"].num_tokens == 3 * NUM_TOKENS
    np.testing.assert_allclose(
        found["moe"].imbalance, load.max() / load.mean(), rtol=1e-5
    )
    assert (dropped > 0) == name.endswith("choice")


def test_names_that_are_there_twice():
    class Block(keras.layers.Layer):
        """Its layers build without a scope of its own."""

        def __init__(self):
            super().__init__()
            self.moe = layers.SoftMoE(2, 4, name="mixed")

        def build(self, shape):
            self.moe.build(shape)

        def call(self, x):
            return self.moe(x)

    inputs = keras.Input((NUM_TOKENS, 6))
    model = keras.Model(inputs, Block()(Block()(inputs)))
    x = np.ones((1, NUM_TOKENS, 6), "float32")
    found = analysis.expert_load(model, x, verbose=0)
    assert len(found) == 2
    for load in found.values():
        np.testing.assert_allclose(load.load.sum(), NUM_TOKENS, rtol=1e-5)


def test_a_model_without_routers():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    with pytest.raises(ValueError, match=r"MoE layers.*Received: Functional .* \[\]"):
        analysis.expert_load(model, np.ones((1, 6)), verbose=0)


def test_images_must_be_finite():
    """NaN has no best expert."""
    images = tiny.pixels(4)
    images[2, 1, 1, 0] = np.inf
    for analyse in (analysis.expert_load, analysis.routing_maps):
        with pytest.raises(ValueError, match="Images must be finite.*image 2 of 4"):
            analyse(tiny.classifier(), images)
