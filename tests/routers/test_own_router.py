"""A router written by a user (`routers/router.py`): trained, saved, errors."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_softmoe import (
    analysis,
    distribution,
    evaluation,
    exporting,
    layers,
    routers,
)
from keras_softmoe.ops import SlotRouting
from keras_softmoe.ops.assignment import identity
from keras_softmoe.ops.routing import choice_routing
from tests.support import cases, tiny
from tests.support.close import assert_near
from tests.support.layer_checks import reloaded
from tests.support.references import to_numpy

TOKENS = cases.array("normal", (3, 8, 4), 0)


@keras.saving.register_keras_serializable(package="own_router")
class PrototypeRouter(routers.Router):
    """Each expert takes the tokens that are nearest to its prototype."""

    def __init__(self, num_experts, slots=2, **kwargs):
        super().__init__(num_experts, **kwargs)
        self.slots = slots

    def build(self, tokens_shape):
        shape = (self.num_experts, tokens_shape[-1])
        self.prototypes = self.add_weight(name="prototypes", shape=shape)
        super().build(tokens_shape)

    def call(self, tokens, valid=None, training=False):
        logits = ops.einsum("gsd,ed->ges", tokens, self.prototypes)
        probabilities = ops.softmax(logits, axis=1)
        if valid is not None:
            valid = ops.expand_dims(valid, 1)
            probabilities = ops.where(valid, probabilities, -1.0)
        gate, token = ops.top_k(probabilities, self.slots)
        filled = ops.greater(gate, 0.0)
        gate = ops.where(filled, gate, 0.0)
        token = ops.cast(token, "int32")
        return routers.Decision(SlotRouting(token, filled, gate), {})

    def get_config(self):
        return {**super().get_config(), "slots": self.slots}


def test_learned_router_is_trained_saved_and_loaded(tmp_path):
    inputs = keras.Input((8, 4))
    layer = layers.MoE(PrototypeRouter(2, slots=3), mlp_dim=4, group_images=2)
    model = keras.Model(inputs, inputs + layer(inputs))
    before = to_numpy(layer.router.prototypes)
    model.compile("sgd", "mse")
    model.fit(TOKENS, np.zeros_like(TOKENS), batch_size=3, verbose=0)
    assert np.abs(to_numpy(layer.router.prototypes) - before).max() > 0
    loaded = reloaded(model, tmp_path)
    assert loaded.layers[1].router.slots == 3
    found = [m.predict(TOKENS, batch_size=3, verbose=0) for m in (model, loaded)]
    np.testing.assert_array_equal(*found)


@keras.saving.register_keras_serializable(package="own_router")
class AloneRouter(routers.Router):
    """Each token takes two experts, without slots."""

    chooses_alone = True

    def build(self, tokens_shape):
        shape = (tokens_shape[-1], self.num_experts)
        self.kernel = self.add_weight(name="kernel", shape=shape)
        super().build(tokens_shape)

    def call(self, tokens, valid=None, training=False):
        scores = ops.softmax(ops.matmul(tokens, self.kernel))
        chosen = ops.cast(ops.top_k(scores, 2)[1], "int32")
        return routers.Decision(choice_routing(scores, chosen, valid), {})

    def num_rows(self, num_tokens, training=False):
        return 2 * num_tokens

    def capacity(self, num_tokens, training=False):
        return num_tokens


@pytest.mark.filterwarnings("ignore:.*predicts without a capacity")
def test_router_without_slots_is_counted_analyzed_and_exported(tmp_path):
    model = tiny.classifier(moe_layers=(1,), router=AloneRouter(4))
    assert model.backbone.group_images == 1
    assert evaluation.cost(model).parameters == model.count_params()
    dense = evaluation.cost(tiny.classifier(**tiny.DENSE)).gflop_per_image
    # Two experts instead of an MLP, and the product of the router
    assert dense < evaluation.cost(model).gflop_per_image < 2 * dense
    x = tiny.images(3)
    found = analysis.analyze(model, x, verbose=0)
    assert found.blocks[1].load.sum() > 0
    plan = distribution.plan(model.backbone, devices=2, memory=1e9)
    assert "2 devices" in str(plan)
    if keras.backend.backend() == "torch":
        import torch

        file = tmp_path / "own.pt2"
        exporting.export_model(model, file, format="torch", verbose=False)
        outputs = torch.export.load(file).module()(torch.tensor(x))
        assert_near(to_numpy(outputs), to_numpy(model(x)), atol=1e-5)


def test_constructor_that_its_configuration_does_not_fit():
    class NoConfig(routers.Router):
        def __init__(self, num_experts, slots):
            super().__init__(num_experts)

    with pytest.raises(ValueError, match=r"`NoConfig` .*get_config.*num_experts"):
        layers.MoE(NoConfig(2, slots=1), mlp_dim=4)


def test_call_that_returns_no_decision():
    class OnlyRouting(routers.Router):
        def call(self, tokens, valid=None, training=False):
            token, filled = identity(tokens.shape[0], tokens.shape[1], self.num_experts)
            return SlotRouting(token, filled, ops.cast(filled, "float32"))

    with pytest.raises(ValueError, match="`SlotRouting` from `OnlyRouting`"):
        layers.MoE(OnlyRouting(2), mlp_dim=4)(TOKENS)


def test_subclass_with_another_argument():
    """It extends `config_arguments`, and sets its own after `super().__init__`."""

    class Warm(routers.SoftRouter):
        config_arguments = (*routers.SoftRouter.config_arguments, "temperature")

        def __init__(self, *args, temperature=2.0, **kwargs):
            super().__init__(*args, **kwargs)
            self.temperature = temperature

    again = Warm.from_config(Warm(4, temperature=3.0).get_config())
    assert again.temperature == 3.0 and again.num_experts == 4
