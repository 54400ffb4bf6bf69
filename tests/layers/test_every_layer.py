"""Each layer alone, with the shared layer test; for `layers/encoder_block.py`, too."""

import functools

import keras
import numpy as np
import pytest

from keras_softmoe import layers, ops, routers
from keras_softmoe.layers.embedding import Registers, TokenEmbedding
from keras_softmoe.layers.encoder_block import LayerScale
from tests.support.layer_checks import (
    check_layer,
    check_training_step,
    check_weights,
    encoder_block,
    revive,
)
from tests.support.references import to_numpy

TOKENS = (6, 8)
NOISY = {
    "noise_std": 1.0,
    "losses": [routers.RoutingLoss(ops.z_loss, weight=0.1)],
    "capacity_factor": 2.0,
}
# Name -> router, its number of weights, of seed generators and of added losses.
ROUTERS = {
    "soft": (routers.SoftRouter(3, slots_per_expert=2), 2, 0, 0),
    "soft_noisy": (routers.SoftRouter(3, noise_std=1.0), 2, 1, 0),
    "soft_not_normalized": (routers.SoftRouter(3, normalize=False), 1, 0, 0),
    "uniform_soft": (routers.SoftRouter(3, dispatch="uniform"), 2, 0, 0),
    "soft_uniform": (routers.SoftRouter(3, combine="uniform"), 2, 0, 0),
    "uniform": (routers.SoftRouter(3, dispatch="uniform", combine="uniform"), 0, 0, 0),
    "identity": (routers.IdentityRouter(3), 0, 0, 0),
    "softmax_token_choice": (routers.SoftmaxTokenChoiceRouter(3, 2, **NOISY), 1, 1, 1),
    "balanced_token_choice": (
        routers.SoftmaxTokenChoiceRouter(
            3, bias_update_rate=0.01, bias_update_every=2, **NOISY
        ),
        *(1, 1, 1),
    ),
    "expert_race": (routers.ExpertRaceRouter(3, **NOISY), 1, 1, 1),
    "sinkhorn_token_choice": (
        routers.SinkhornTokenChoiceRouter(3, priority="max", **NOISY),
        *(1, 1, 1),
    ),
    "softmax_expert_choice": (routers.SoftmaxExpertChoiceRouter(3, **NOISY), 1, 1, 1),
    "sinkhorn_expert_choice": (
        routers.SinkhornExpertChoiceRouter(3, combine="plan", **NOISY),
        *(1, 1, 1),
    ),
    "sparse_transport": (routers.SparseTransportExpertChoiceRouter(3), 1, 1, 0),
}
# Name -> number of weights without gradient.
STATES = {"balanced_token_choice": 3, "expert_race": 2}
# Two layers of kernel and bias.
EXPERT_WEIGHTS = MLP_WEIGHTS = 4
# Query, key, value and output with biases, two normalizations with scale and offset.
BLOCK_WEIGHTS = 8 + 4


@pytest.mark.parametrize(
    ("name", "group_images"),
    [("soft", 1), ("identity", 1), ("softmax_token_choice", 2)],
)
def test_moe(name, group_images):
    router, num_weights, num_seeds, num_losses = ROUTERS[name]

    def make(**kwargs):
        return layers.MoE(router, mlp_dim=5, group_images=group_images, **kwargs)

    num_weights += EXPERT_WEIGHTS
    check_layer(make, TOKENS, TOKENS, num_weights, num_seeds, num_losses)


@pytest.mark.parametrize("name", ROUTERS)
def test_training_step_with_every_router(name):
    router, *_ = ROUTERS[name]
    check_training_step(lambda: layers.MoE(router, mlp_dim=5), TOKENS, TOKENS)


@pytest.mark.parametrize("name", ROUTERS)
def test_weights_of_every_router(name):
    router, num_weights, num_seeds, num_losses = ROUTERS[name]

    def make(**kwargs):
        return layers.MoE(router, mlp_dim=5, **kwargs)

    num_weights += EXPERT_WEIGHTS
    states = STATES.get(name, 0)
    check_weights(make, TOKENS, num_weights, num_seeds, num_losses, num_states=states)
    layer = make()
    serialize = keras.saving.serialize_keras_object
    assert serialize(revive(layer)) == serialize(layer)


@pytest.mark.parametrize("name", ROUTERS)
def test_router_is_a_template(name):
    router = ROUTERS[name][0]
    first, second = layers.MoE(router, 5), layers.MoE(router, 5)
    for layer in (first, second):
        layer.build((None, *TOKENS))
        own = layer.router.get_config()
        assert own.pop("name") == "router"
        template = router.get_config()
        template.pop("name")
        assert own == template
    assert first.router is not second.router
    assert not router.built
    ids = {id(w) for w in first.weights} & {id(w) for w in second.weights}
    assert not ids


def test_router_configuration_is_kept_by_the_layer():
    losses = (
        routers.RoutingLoss(ops.gshard_loss, weight=0.3),
        routers.RoutingLoss(ops.z_loss, weight=0.4),
    )
    settings = {
        "num_selected_experts": 2,
        "capacity_factor": 1.5,
        "priority": "max",
        "rounding": "ceil",
        "multiple_of": 2,
        "noise_std": 0.5,
        "num_iterations": 7,
        "combine": "plan",
        "eval_capacity_factor": 3.0,
        "keep_fraction": 0.5,
        "normalize_gates": True,
        "random_logits": True,
    }
    router = routers.SinkhornTokenChoiceRouter(4, losses=losses, **settings)
    revived = revive(layers.MoE(router, 5)).router
    assert revived.routing_losses == losses and revived.num_experts == 4
    config = revived.get_config()
    assert {key: config[key] for key in settings} == settings


# Constructor, shapes of an input and an output, number of weights
PLAIN = {
    "SoftMoE": (
        functools.partial(layers.SoftMoE, 3, mlp_dim=5, slots_per_expert=2),
        *(TOKENS, TOKENS, 2 + EXPERT_WEIGHTS),
    ),
    "Experts": (
        functools.partial(layers.Experts, 3, mlp_dim=5),
        *((3, 2, 8), (3, 2, 8), EXPERT_WEIGHTS),
    ),
    "MLP": (functools.partial(layers.MLP, 5), TOKENS, TOKENS, MLP_WEIGHTS),
    "PatchEmbedding": (
        functools.partial(layers.PatchEmbedding, (2, 4), 8),
        *((4, 8, 3), (4, 8), 2),
    ),
    "ClassToken": (layers.ClassToken, TOKENS, (7, 8), 1),
}


@pytest.mark.parametrize("name", PLAIN)
def test_layer(name):
    check_layer(*PLAIN[name])


def test_token_embedding():
    check_layer(functools.partial(TokenEmbedding, 11, 6, 8), (6,), TOKENS, 2, ids=11)


@pytest.mark.parametrize(
    "name, group_images", [("soft", 1), ("softmax_token_choice", 2)]
)
def test_moe_encoder_block(name, group_images):
    router, num_weights, num_seeds, num_losses = ROUTERS[name]

    def make(**kwargs):
        return encoder_block(2, 5, router=router, group_images=group_images, **kwargs)

    num_weights += BLOCK_WEIGHTS + EXPERT_WEIGHTS
    check_layer(make, TOKENS, TOKENS, num_weights, num_seeds, num_losses)


@pytest.mark.parametrize("use_qk_norm, dropout_rate", [(False, 0.0), (True, 0.1)])
def test_dense_encoder_block(use_qk_norm, dropout_rate):
    def make(**kwargs):
        return encoder_block(
            2, 5, use_qk_norm=use_qk_norm, dropout_rate=dropout_rate, **kwargs
        )

    num_weights = BLOCK_WEIGHTS + MLP_WEIGHTS + 2 * use_qk_norm
    check_layer(make, TOKENS, TOKENS, num_weights, num_seeds=int(dropout_rate > 0))


def test_encoder_block_with_layer_scale():
    def make(**kwargs):
        mlp = layers.MLP(5, activation="gelu", dtype=kwargs.get("dtype"), name="mlp")
        return layers.EncoderBlock(
            2, mlp, layer_norm_epsilon=1e-3, layer_scale=0.5, **kwargs
        )

    check_layer(make, TOKENS, TOKENS, BLOCK_WEIGHTS + MLP_WEIGHTS + 2)


def test_layer_scale():
    def make(**kwargs):
        return LayerScale(0.5, **kwargs)

    check_layer(make, TOKENS, TOKENS, 1)
    outputs = to_numpy(make()(np.ones((1, 3, 8))))
    np.testing.assert_array_equal(outputs, np.full((1, 3, 8), 0.5))


@pytest.mark.parametrize("has_class_token", [False, True])
def test_registers(has_class_token):
    def make(**kwargs):
        return Registers(2, has_class_token, **kwargs)

    check_layer(make, TOKENS, (8, 8), 1)
    layer, tokens = make(), np.arange(48, dtype="float32").reshape(1, 6, 8)
    outputs = to_numpy(layer(tokens))
    first = int(has_class_token)
    patches = np.delete(outputs, [first, first + 1], axis=1)
    np.testing.assert_array_equal(patches, tokens)
    registers = outputs[:, first : first + 2]
    np.testing.assert_array_equal(registers, to_numpy(layer.registers))


@pytest.mark.parametrize("use_qk_norm", [False, True])
def test_attention_pooling(use_qk_norm):
    def make(**kwargs):
        return layers.AttentionPooling(2, 5, use_qk_norm=use_qk_norm, **kwargs)

    # Probe, attention, normalization, MLP
    num_weights = 1 + 8 + 2 + MLP_WEIGHTS + 2 * use_qk_norm
    check_layer(make, TOKENS, (8,), num_weights)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("kind", ["learned", "sincos2d"])
@pytest.mark.parametrize("has_class_token", [False, True])
def test_position_embedding(kind, has_class_token):
    def make(**kwargs):
        return layers.PositionEmbedding((2, 3), kind, has_class_token, **kwargs)

    shape = (6 + has_class_token, 8)
    check_layer(make, shape, shape, int(kind == "learned"))
