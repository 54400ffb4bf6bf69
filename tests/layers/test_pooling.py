"""The learned scale and bias of similarities, and pooling without a layer."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers
from keras_softmoe.layers.pooling import TEXT_POOLINGS, ContrastiveScale, pool
from tests.support.close import assert_near
from tests.support.layer_checks import dtype_of, normal, randomize, revive
from tests.support.references import to_numpy

BATCH, WIDTH = 3, 8


@pytest.mark.parametrize("bias", [None, -10.0])
def test_scale_and_bias(bias):
    layer = ContrastiveScale(5.0, bias)
    outputs = layer(normal((BATCH, WIDTH)))
    names = ["logit_scale"] if bias is None else ["logit_scale", "logit_bias"]
    assert sorted(outputs) == sorted(names)
    np.testing.assert_allclose(to_numpy(outputs["logit_scale"]), [5.0] * 3, rtol=1e-6)
    assert [w.path.rpartition("/")[2] for w in layer.trainable_weights] == (
        ["log_scale"] if bias is None else ["log_scale", "logit_bias"]
    )
    # What is learned is the logarithm, so the scale stays positive.
    layer.log_scale.assign(-2.0)
    if bias is not None:
        layer.logit_bias.assign(3.0)
    outputs = layer(normal((BATCH, WIDTH)))
    np.testing.assert_allclose(to_numpy(outputs["logit_scale"]), np.exp(-2.0), 1e-6)
    if bias is not None:
        np.testing.assert_allclose(to_numpy(outputs["logit_bias"]), [3.0] * 3)
    revived = revive(layer)
    assert revived.get_config() == layer.get_config()
    assert (revived.scale, revived.bias) == (5.0, bias)


def test_scale_is_never_rounded():
    keras.config.set_dtype_policy("mixed_bfloat16")
    layer = ContrastiveScale(7.3)
    outputs = layer(keras.ops.cast(normal((BATCH, WIDTH)), "bfloat16"))
    assert dtype_of(outputs["logit_scale"]) == "float32"
    np.testing.assert_allclose(to_numpy(outputs["logit_scale"]), [7.3] * 3, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_scale_must_be_positive(scale):
    with pytest.raises(ValueError, match=f"number over 0.*scale={scale}"):
        ContrastiveScale(scale)


@pytest.mark.parametrize("pooling", [*TEXT_POOLINGS, "token"])
def test_pool(pooling):
    tokens = normal((BATCH, 6, WIDTH))
    attention = layers.AttentionPooling(2, 5)
    attention.build(tokens.shape)
    randomize(attention)
    expected = {
        "first": lambda: tokens[:, 0],
        "token": lambda: tokens[:, 0],
        "last": lambda: tokens[:, 5],
        "gap": lambda: tokens.mean(1),
        "gmp": lambda: tokens.max(1),
        "map": lambda: to_numpy(attention(tokens)),
    }[pooling]()
    actual = pool(keras.ops.convert_to_tensor(tokens), pooling, attention)
    assert_near(to_numpy(actual), expected, rtol=1e-5, atol=1e-6)
