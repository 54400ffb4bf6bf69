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


def rounded(kernel, block_size):
    """What sixteen values leave of a kernel `(E, D, H)`, one block after the other."""
    kernel = np.float64(kernel)
    result = np.zeros_like(kernel)
    for e, start in np.ndindex(len(kernel), kernel.shape[1]):
        if start % block_size:
            continue
        for h in range(kernel.shape[2]):
            rows = slice(start, start + block_size)
            x = kernel[e, rows, h]
            low, high = min(x.min(), 0.0), max(x.max(), 0.0)
            step = (high - low) / 15
            zero = -8 - np.round(low / step)
            result[e, rows, h] = step * (
                np.clip(np.round(x / step) + zero, -8, 7) - zero
            )
    return result


@pytest.mark.parametrize(
    "width, units, block_size", [(6, 4, 128), (6, 5, -1), (7, 5, 3), (8, 4, 4)]
)
def test_int4_rounds_each_block_of_each_expert(width, units, block_size):
    layer, slots = bank(width, units), normal((E, 4, width))
    # Experts of different size, and an output that only grows
    layer.kernel.assign(to_numpy(layer.kernel) * np.array([1, 10, 0.01])[:, None, None])
    kernel = to_numpy(layer.kernel)
    kernel[0, :, 0] = np.abs(kernel[0, :, 0])
    layer.kernel.assign(kernel)
    expected = rounded(kernel, min(block_size if block_size > 0 else width, width))
    layer.quantize(
        config=keras.quantizers.Int4QuantizationConfig(block_size=block_size)
    )
    assert layer.quantization_mode == "int4"
    assert tuple(layer._kernel.shape) == (E, width, (units + 1) // 2)
    # A value just between two may go either way.
    step = (
        np.abs(to_numpy(layer.kernel) - expected)
        / np.abs(expected).max((1, 2))[:, None, None]
    )
    assert np.quantile(step, 0.9) < 1e-5
    error = np.abs(to_numpy(layer.kernel) - kernel).max((1, 2))
    assert (error < np.ptp(kernel, axis=(1, 2)) / 15).all()
    assert_near(
        to_numpy(layer(slots)),
        slots @ to_numpy(layer.kernel) + to_numpy(layer.bias),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("which", [(0, 1), (1,), (0,)])
def test_experts_with_banks_in_int8_and_int4(which, remat):
    slots = normal((2, E, 3, 16))
    layer = layers.Experts(E, 24, remat=remat)
    layer.build(slots.shape)
    randomize(layer)
    expected = to_numpy(layer(slots))
    for index, mode in zip(which, ("int8", "int4"), strict=False):
        (layer.intermediate_dense, layer.output_dense)[index].quantize(mode)
    error = np.abs(to_numpy(layer(slots)) - expected).mean() / expected.std()
    assert 1e-4 < error < 0.15


def test_int4_round_trip(tmp_path):
    model = keras.Sequential([keras.Input((E, 3, 16)), layers.Experts(E, 24)])
    randomize(model)
    model.quantize("int4")
    x = normal((2, E, 3, 16))
    model.save_weights(tmp_path / "x.weights.h5")
    again = keras.Sequential([keras.Input((E, 3, 16)), layers.Experts(E, 24)])
    again.quantize("int4")
    again.load_weights(tmp_path / "x.weights.h5")
    np.testing.assert_array_equal(to_numpy(again(x)), to_numpy(model(x)))


@pytest.mark.parametrize("mode", ["gptq", "awq"])
def test_modes_that_mix_experts_are_refused(mode):
    layer = bank(6, 4)
    config = {
        "gptq": keras.quantizers.GPTQConfig(dataset=["x"], tokenizer=lambda x: x),
        "awq": keras.quantizers.AWQConfig(dataset=["x"], tokenizer=lambda x: x),
    }[mode]
    kernel = to_numpy(layer.kernel)
    with pytest.raises(ValueError, match=f"quantized by '{mode}'.*'int8' or 'int4'"):
        layer.quantize(mode, config=config)
    assert layer.quantization_mode is None
    np.testing.assert_array_equal(to_numpy(layer.kernel), kernel)


def test_own_quantizers_in_int4_are_refused():
    layer = bank(6, 4)
    config = keras.quantizers.Int4QuantizationConfig(
        activation_quantizer=keras.quantizers.AbsMaxQuantizer(), block_size=-1
    )
    with pytest.raises(ValueError, match="a config with activation_quantizer"):
        layer.quantize(config=config)
    assert layer.quantization_mode is None


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
