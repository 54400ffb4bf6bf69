"""Attention and what is built around it, against plain NumPy."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, routers
from keras_softmoe.layers.attention import Attention
from tests.support import layer_checks, twins
from tests.support.close import assert_near
from tests.support.gradients import recorded
from tests.support.references import to_numpy


def attend(layer, queries, tokens):
    """Multi-head attention (B, Q, D), written out head by head."""

    def project(dense, x):
        bias = to_numpy(dense.bias).reshape(1, layer.num_heads, 1, -1)
        return np.einsum("bsd,dhk->bhsk", x, to_numpy(dense.kernel)) + bias

    q, k = project(layer.query, queries), project(layer.key, tokens)
    v = project(layer.value, tokens)
    if layer.use_qk_norm:
        q = normalize(q, to_numpy(layer.query_norm.gamma))
        k = normalize(k, to_numpy(layer.key_norm.gamma))
    weights = twins.softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
    kernel, bias = map(to_numpy, layer.attention_output.weights)
    return np.einsum("bhqk,hkd->bqd", weights @ v, kernel) + bias


def normalize(x, gamma, beta=0.0):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gamma + beta


def norm(layer, x):
    return normalize(x, to_numpy(layer.gamma), to_numpy(layer.beta))


def with_attention(layer):
    """Random inputs of a block with random weights, and they plus their attention."""
    inputs = layer_checks.normal((2, 5, 8))
    layer.build(inputs.shape)
    layer_checks.randomize(layer)
    tokens = norm(layer.attention_norm, inputs)
    return inputs, inputs + attend(layer.attention, tokens, tokens)


def mlp(layer, x):
    (k0, b0), (k1, b1) = (
        (to_numpy(dense.kernel), to_numpy(dense.bias))
        for dense in (layer.intermediate_dense, layer.output_dense)
    )
    return twins.gelu(x @ k0 + b0) @ k1 + b1


@pytest.mark.parametrize("use_qk_norm", [False, True])
def test_attention(use_qk_norm):
    layer = Attention(2, use_qk_norm=use_qk_norm)
    queries, tokens = layer_checks.normal((2, 3, 8)), layer_checks.normal((2, 5, 8), 1)
    layer.build(queries.shape, tokens.shape)
    # Scales shared by the heads, and no offsets
    assert len(layer.trainable_weights) == 8 + 2 * use_qk_norm
    layer_checks.randomize(layer)
    outputs = layer(queries, tokens)
    assert layer_checks.dtype_of(outputs) == "float32"
    expected = attend(layer, queries, tokens)
    assert_near(to_numpy(outputs), expected, rtol=1e-4, atol=1e-5)


def test_attention_initialization():
    layer = Attention(4)
    layer.build((None, 5, 64), (None, 5, 64))
    # Glorot for the (D, D) matrices that the kernels fold
    bound = np.sqrt(6 / (64 + 64))
    for dense in (layer.query, layer.key, layer.value, layer.attention_output):
        kernel = to_numpy(dense.kernel)
        assert 0.99 * bound < np.abs(kernel).max() <= bound
        np.testing.assert_allclose(kernel.std(), bound / np.sqrt(3), rtol=0.04)
        assert not to_numpy(dense.bias).any()


@pytest.mark.parametrize("use_qk_norm", [False, True])
def test_attention_pooling(use_qk_norm):
    layer = layers.AttentionPooling(2, 6, use_qk_norm=use_qk_norm)
    tokens = layer_checks.normal((3, 5, 8))
    layer.build(tokens.shape)
    layer_checks.randomize(layer)
    probe = np.repeat(to_numpy(layer.probe), 3, axis=0)
    y = attend(layer.attention, probe, tokens)[:, 0]
    expected = y + mlp(layer.mlp, norm(layer.mlp_norm, y))
    assert_near(to_numpy(layer(tokens)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_qk_norm", [False, True])
def test_dense_encoder_block(use_qk_norm):
    layer = layer_checks.encoder_block(2, 6, use_qk_norm=use_qk_norm)
    inputs, x = with_attention(layer)
    expected = x + mlp(layer.mlp, norm(layer.mlp_norm, x))
    with routers.record() as decisions:
        outputs = layer(inputs)
    assert decisions == {}
    assert_near(to_numpy(outputs), expected, rtol=1e-4, atol=1e-4)


def test_moe_encoder_block():
    layer = layer_checks.encoder_block(2, 6, routers.SoftRouter(3))
    inputs, x = with_attention(layer)
    expected = x + to_numpy(layer.moe(norm(layer.mlp_norm, x).astype("float32")))
    outputs, decision = recorded(layer, inputs)
    assert_near(to_numpy(outputs), expected, rtol=1e-4, atol=1e-4)
    assert_near(to_numpy(layer(inputs)), to_numpy(outputs), rtol=1e-5, atol=1e-6)
    assert decision.routing.dispatch.shape == (2, 5, 3, 1)


def test_configuration():
    layer_checks.check_configuration(
        lambda: layer_checks.encoder_block(
            2,
            5,
            routers.IdentityRouter(3),
            use_qk_norm=True,
            dropout_rate=0.1,
            group_images=2,
            dispatcher="gather",
            equal_experts=True,
        ),
        (6, 8),
    )


def test_dropout_only_in_training():
    layer = layer_checks.encoder_block(2, 6, dropout_rate=0.5)
    inputs = layer_checks.normal((2, 5, 8))
    first, second = (to_numpy(layer(inputs)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    first, second = (to_numpy(layer(inputs, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 0.1


@pytest.mark.parametrize("num_heads", [3, 16])
def test_heads_that_do_not_divide_the_width(num_heads):
    layer = Attention(num_heads)
    with pytest.raises(ValueError, match=f"num_heads={num_heads}, width=8"):
        layer.build((None, 5, 8), (None, 5, 8))


# === The layer after attention ===


def test_any_layer_can_follow_attention():
    mlp = keras.layers.Dense(8, name="mine")
    layer = layers.EncoderBlock(2, mlp)
    inputs, x = with_attention(layer)
    kernel, bias = map(to_numpy, (mlp.kernel, mlp.bias))
    expected = x + norm(layer.mlp_norm, x) @ kernel + bias
    assert_near(to_numpy(layer(inputs)), expected, rtol=1e-4, atol=1e-4)
    assert layer.mlp is mlp and layer.moe is None


@pytest.mark.parametrize("mlp", [128, None, layers.MLP])
def test_what_is_no_layer_is_refused(mlp):
    with pytest.raises(ValueError, match=r"(?s)`mlp` must be a layer.*Received: mlp="):
        layers.EncoderBlock(2, mlp)


def test_a_subclass_of_the_moe_layer_keeps_its_settings():
    class Mine(layers.MoE):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    config = Mine(routers.IdentityRouter(5), 6, group_images=3).get_config()
    assert config["group_images"] == 3
