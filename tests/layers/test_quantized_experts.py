"""Quantized banks of experts: modes, and the errors of those not supported."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers
from keras_softmoe.layers.expert_bank import ExpertBank
from tests.support.close import assert_near
from tests.support.layer_checks import normal, randomize
from tests.support.references import to_numpy

E = 3


def bank(width, units, **kwargs):
    layer = ExpertBank(
        "end,edh->enh", output_shape=(None, units), bias_axes="eh", **kwargs
    )
    layer.build((E, None, width))
    randomize(layer)
    return layer


def test_experts_with_one_bank_in_int8():
    slots = normal((2, E, 3, 16))
    layer = layers.Experts(E, 24, remat=True)
    layer.build(slots.shape)
    randomize(layer)
    expected = to_numpy(layer(slots))
    layer.output_dense.quantize("int8")
    error = np.abs(to_numpy(layer(slots)) - expected).mean() / expected.std()
    assert 1e-4 < error < 0.15


@pytest.mark.parametrize("mode", ["int4", "gptq", "awq"])
def test_modes_that_mix_experts_are_refused(mode):
    layer = bank(6, 4)
    config = {
        "int4": keras.quantizers.Int4QuantizationConfig(block_size=-1),
        "gptq": keras.quantizers.GPTQConfig(dataset=["x"], tokenizer=lambda x: x),
        "awq": keras.quantizers.AWQConfig(dataset=["x"], tokenizer=lambda x: x),
    }[mode]
    kernel = to_numpy(layer.kernel)
    with pytest.raises(ValueError, match=f"quantized by '{mode}'.*'int8' or 'float8'"):
        layer.quantize(mode, config=config)
    assert layer.quantization_mode is None
    np.testing.assert_array_equal(to_numpy(layer.kernel), kernel)


def test_float8_goes_without_lora():
    layer = bank(6, 4)
    layer.enable_lora(2)
    with pytest.raises(ValueError, match="LoRA in float8.*merge_lora"):
        layer.quantize("float8")
    layer.merge_lora()
    expected = to_numpy(layer(normal((E, 4, 6))))
    layer.quantize("float8")
    assert_near(to_numpy(layer(normal((E, 4, 6)))), expected, atol=0.3)
    with pytest.raises(ValueError, match="LoRA in float8.*merge_lora"):
        layer.enable_lora(2)
