"""Calls of layers on PyTorch without Keras' steps around them (`quick`).

`keras_adapter/torch_modules.py` leaves the steps out where they change nothing. Here
each reason for a step is on, and `keras.layers.Layer.__call__` is counted or its
outputs are compared.
"""

import contextlib

import keras
import numpy as np
import pytest

import keras_softmoe as ksm
from keras_softmoe import layers, routers
from keras_softmoe.keras_adapter.layers import Layer
from keras_softmoe.layers.attention import LayerNormalization
from tests.support.close import assert_near
from tests.support.references import to_numpy

torch = pytest.importorskip("torch")

ROUTER = routers.SoftmaxTokenChoiceRouter(4, 2, capacity_factor=2.0)


def block(**kwargs):
    mlp = layers.MoE(ROUTER, mlp_dim=16, dtype=kwargs.get("dtype"))
    made = layers.EncoderBlock(num_heads=2, mlp=mlp, **kwargs)
    made.build((None, 9, 8))
    return made


def tokens(dtype="float32"):
    x = np.random.default_rng(0).normal(size=(3, 9, 8))
    return keras.ops.convert_to_tensor(x, dtype)


@contextlib.contextmanager
def calls_of_keras(monkeypatch):
    """Yield a list of the layers that Keras calls with all steps."""
    found, steps = [], keras.layers.Layer._maybe_build

    def counted(layer, *args):
        found.append(layer)
        return steps(layer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(keras.layers.Layer, "_maybe_build", counted)
        yield found


@contextlib.contextmanager
def all_steps(monkeypatch):
    """Let Keras call all layers with all steps."""
    with monkeypatch.context() as patch:
        for cls in (Layer, LayerNormalization):
            patch.setattr(cls, "__call__", keras.layers.Layer.__call__)
        yield


@pytest.mark.parametrize("training", [False, True])
def test_a_model_has_one_call_of_keras(monkeypatch, training):
    model = ksm.models.ViTMoEBackbone(
        image_shape=(8, 8, 3), patch_size=4, num_layers=2, num_heads=2, hidden_dim=8,
        mlp_dim=16, moe_layers=(1,), router=ROUTER, pooling="map",
    )  # fmt: skip
    with calls_of_keras(monkeypatch) as found:
        model(np.zeros((2, 8, 8, 3), "float32"), training=training)
    assert found == [model]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "mixed_bfloat16", "mixed_float16"]
)
def test_outputs_are_those_of_keras_calls(monkeypatch, dtype, training):
    layer = block(dtype=dtype, use_qk_norm=True, layer_scale=0.5)
    x = tokens("float32")
    keras.utils.set_random_seed(0)
    expected = layer(x, training=training)
    losses = list(map(to_numpy, layer.losses))
    with all_steps(monkeypatch):
        # The noise of the first call again
        for seed in (v for v in layer.non_trainable_variables if "seed" in v.path):
            seed.assign(seed - keras.ops.array([0, int(training)], seed.dtype))
        slow = layer(x, training=training)
    assert slow.dtype == expected.dtype
    tolerance = 1e-6 if dtype in ("float32", "float64") else 1e-12
    assert_near(to_numpy(expected), to_numpy(slow), atol=tolerance)
    assert len(losses) == len(layer.losses) == training
    np.testing.assert_allclose(losses, list(map(to_numpy, layer.losses)), rtol=1e-6)


def test_autocast_of_pytorch(monkeypatch):
    layer, x = block(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        quick = layer(x)
        with all_steps(monkeypatch):
            slow = layer(x)
    assert quick.dtype == slow.dtype
    assert torch.equal(quick, slow)


def test_hooks_are_called():
    layer, x = block(), tokens()
    seen = []
    for part in (layer, layer.attention, layer.moe, layer.mlp_norm):
        part.register_forward_hook(lambda module, *args: seen.append(module))
    layer(x)
    assert set(seen) == {layer, layer.attention, layer.moe, layer.mlp_norm}


def test_masks_are_passed_on(monkeypatch):
    layer, x = block(), tokens()
    mask = np.ones((3, 9), "bool")
    mask[:, 6:] = False
    mask = keras.ops.convert_to_tensor(mask)
    outputs = layer(x, mask=mask)
    assert torch.equal(outputs._keras_mask, mask)
    # The mask of the tensor, as no argument is given
    masked = to_numpy(layer(outputs + 0, mask=mask))
    assert_near(to_numpy(layer(outputs)), masked, atol=1e-6)


def test_training_is_that_of_the_outermost_call():
    moe = layers.MoE(routers.SoftmaxTokenChoiceRouter(4, noise_std=1.0), 16)
    outer = keras.Sequential([layers.EncoderBlock(2, moe)])
    outer.build((None, 9, 8))
    x = tokens()
    outer(x)
    assert not outer.losses
    outer(x, training=True)
    assert len(outer.losses) == 1
    outer(x, training=False)
    assert not outer.losses


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_inputs_by_name_are_converted(dtype):
    layer, x = block(), to_numpy(tokens()).astype(dtype)
    expected = to_numpy(layer(x))
    for inputs in (x, keras.ops.convert_to_tensor(x, dtype)):
        assert_near(to_numpy(layer(inputs=inputs)), expected, atol=1e-6)
    attention = layer.attention
    by_name = attention(tokens(), tokens=x, tokens_mask=np.ones((3, 9), "bool"))
    assert_near(to_numpy(by_name), to_numpy(attention(x, x)), atol=1e-6)


def test_a_failed_call_leaves_nothing_behind():
    layer = block()
    with pytest.raises((ValueError, RuntimeError)):
        layer(keras.ops.zeros((3, 9, 7)))
    from keras.src.backend.common import global_state

    assert global_state.get_global_attribute("current_call_ctx") is None
    layer(tokens(), training=True)
    assert len(layer.losses) == 1


def test_quantized_parts_and_factors(monkeypatch):
    layer, x = block(), tokens()
    for part in (layer.attention.query, layer.moe.experts.intermediate_dense):
        part.enable_lora(2, a_initializer="ones", b_initializer="ones")
    with all_steps(monkeypatch):
        expected = to_numpy(layer(x))
    assert_near(to_numpy(layer(x)), expected, atol=1e-6)
    layer = block()
    for part in layer._flatten_layers():
        if isinstance(part, keras.layers.EinsumDense):
            part.quantize("int8")
    with all_steps(monkeypatch):
        expected = to_numpy(layer(x))
    assert_near(to_numpy(layer(x)), expected, atol=1e-6)


def test_stateless_and_symbolic_calls(monkeypatch):
    layer, x = block(), tokens()
    weights = [v.value for v in layer.trainable_variables]
    rest = [v.value for v in layer.non_trainable_variables]
    doubled = [2 * value for value in weights]
    outputs, _ = layer.stateless_call(doubled, rest, x)
    with all_steps(monkeypatch):
        expected, _ = layer.stateless_call(doubled, rest, x)
    np.testing.assert_allclose(to_numpy(outputs), to_numpy(expected), rtol=1e-5)
    assert not np.allclose(to_numpy(outputs), to_numpy(layer(x)))
    assert layer(keras.Input((9, 8))).shape == (None, 9, 8)


def test_rematerialization(monkeypatch):
    with keras.RematScope(mode="full"):
        layer = block()
    with calls_of_keras(monkeypatch) as found:
        layer(tokens())
    assert layer in found
