"""LoRA of `layers/expert_bank.py`: each expert has both factors for itself."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers
from keras_softmoe.layers.expert_bank import ExpertBank
from tests.support import twins
from tests.support.close import assert_near
from tests.support.gradients import layer_gradients
from tests.support.layer_checks import normal, randomize, revive
from tests.support.references import to_numpy

E, D, H, RANK = 3, 5, 6, 2


def experts(rank=RANK, alpha=3.0, **kwargs):
    """Adapted experts, with numbers in all weights."""
    layer = layers.Experts(E, H, **kwargs)
    layer.build((None, E, None, D))
    for bank in banks(layer):
        bank.enable_lora(rank, lora_alpha=alpha)
    randomize(layer)
    return layer


def banks(layer):
    return layer.intermediate_dense, layer.output_dense


def bank(width=D, units=H, **kwargs):
    layer = ExpertBank(
        "end,edh->enh", output_shape=(None, units), bias_axes="eh", **kwargs
    )
    layer.build((E, None, width))
    return layer


def merged(layer):
    """Kernel of a bank in NumPy: `kernel + alpha / rank * A @ B` of each expert."""
    kernel, a, b = (
        np.float64(to_numpy(next(w for w in layer.weights if w.name == name)))
        for name in ("kernel", "lora_kernel_a", "lora_kernel_b")
    )
    added = [a[e] @ b[e] for e in range(len(kernel))]
    return kernel + layer.lora_alpha / layer.lora_rank * np.array(added)


def weights(layer):
    for each in banks(layer):
        yield merged(each)
        yield np.float64(to_numpy(each.bias))


def gelu_slope(x, step=1e-6):
    return (twins.gelu(x + step) - twins.gelu(x - step)) / (2 * step)


@pytest.mark.parametrize("remat", [False, True])
def test_forward_and_gradients_are_those_of_numpy(remat):
    layer = experts(remat=remat, name="experts")
    slots, pull = normal((2, E, 4, D)), normal((2, E, 4, D), 1)
    value, of_slots, found = layer_gradients(
        layer,
        slots,
        lambda y, _: keras.ops.sum(keras.ops.multiply(y, pull)),
        training=True,
    )
    first, first_bias, second, second_bias = weights(layer)
    outputs = twins.experts(slots, first, first_bias, second, second_bias)
    assert_near(to_numpy(layer(slots)), outputs, rtol=1e-4, atol=1e-5)
    assert value == pytest.approx((outputs * pull).sum(), rel=1e-4)
    expected = {}
    for e in range(E):
        # (G * C, D), (G * C, H)
        x, g = (np.float64(a[:, e]).reshape(-1, D) for a in (slots, pull))
        before = x @ first[e] + first_bias[e]
        of_before = g @ second[e].T * gelu_slope(before)
        of_kernels = x.T @ of_before, twins.gelu(before).T @ g
        assert_near(
            of_slots[:, e].reshape(-1, D), of_before @ first[e].T, rtol=1e-3, atol=1e-5
        )
        for each, of_kernel in zip(banks(layer), of_kernels, strict=True):
            a, b = (to_numpy(x)[e] for x in (each.lora_kernel_a, each.lora_kernel_b))
            scale = each.lora_alpha / RANK
            expected[each.lora_kernel_a.path, e] = scale * of_kernel @ b.T
            expected[each.lora_kernel_b.path, e] = scale * a.T @ of_kernel
    assert len({path for path, _ in expected}) == 4
    for (path, e), gradient in expected.items():
        assert_near(found[path][e], gradient, rtol=1e-3, atol=1e-5)
    # Besides the factors only biases learn.
    assert {p.split("/")[-1] for p in found} == {
        "bias",
        "lora_kernel_a",
        "lora_kernel_b",
    }


def test_enabling_changes_nothing_yet():
    layer = layers.Experts(E, H)
    slots = normal((2, E, 4, D))
    expected = to_numpy(layer(slots))
    for each in banks(layer):
        each.enable_lora(RANK)
        assert not to_numpy(each.lora_kernel_b).any()
        assert to_numpy(each.lora_kernel_a).std() > 0.1
    np.testing.assert_array_equal(to_numpy(layer(slots)), expected)


def test_factors_start_with_the_fans_of_one_expert():
    layer = ExpertBank("end,edh->enh", output_shape=(None, 4), bias_axes="eh")
    layer.build((16, None, 30))
    layer.enable_lora(20)
    assert tuple(layer.lora_kernel_a.shape) == (16, 30, 20)
    assert tuple(layer.lora_kernel_b.shape) == (16, 20, 4)
    # He: uniform with this bound, whatever the number of experts
    bound = np.sqrt(6 / 30)
    a = to_numpy(layer.lora_kernel_a)
    assert 0.97 * bound < np.abs(a).max() <= bound
    assert not np.array_equal(a[0], a[1])


def test_merged_bank_is_an_ordinary_one():
    layer, slots = experts(), normal((2, E, 4, D))
    before = [w.path for w in layers_like(layer).weights]
    expected = to_numpy(layer(slots))
    for each in banks(layer):
        each.merge_lora()
        assert not each.lora_enabled
        assert "lora_rank" not in each.get_config()
    assert_near(to_numpy(layer(slots)), expected, rtol=1e-5, atol=1e-6)
    assert [w.path for w in layer.weights] == before
    assert len(layer.trainable_weights) == 4
    # And once more
    layer.output_dense.enable_lora(1)
    assert_near(to_numpy(layer(slots)), expected, rtol=1e-5, atol=1e-6)


def layers_like(layer):
    """The experts of the same configuration, without factors."""
    plain = layers.Experts.from_config(layer.get_config())
    plain.build((None, E, None, D))
    return plain


def test_merged_bank_that_was_frozen_stays_so():
    layer = experts()
    layer.trainable = False
    layer.output_dense.merge_lora()
    assert not layer.output_dense.trainable_weights


@pytest.mark.parametrize("first", ["lora", "quantize"])
def test_lora_of_a_quantized_bank(first):
    layer, slots = bank(), normal((E, 4, D))
    randomize(layer)
    exact = np.float64(to_numpy(layer.kernel))
    steps = {
        "lora": lambda: layer.enable_lora(RANK),
        "quantize": lambda: layer.quantize("int8"),
    }
    steps.pop(first)() if first == "quantize" else steps.pop("lora")()
    for step in steps.values():
        step()
    without = to_numpy(layer(slots))
    a, b = normal((E, D, RANK)), normal((E, RANK, H), 1)
    layer.lora_kernel_a.assign(a)
    layer.lora_kernel_b.assign(b)
    # Factors are floats: what they add is exact.
    assert_near(to_numpy(layer(slots)), without + slots @ a @ b, rtol=1e-4, atol=1e-4)
    _, _, found = layer_gradients(layer, slots, lambda y, _: keras.ops.sum(y))
    of_b = np.swapaxes(slots @ a, 1, 2) @ np.ones((E, 4, H))
    np.testing.assert_allclose(found[layer.lora_kernel_b.path], of_b, rtol=1e-3)
    assert abs(found[layer.lora_kernel_a.path]).max() > 0.1
    # Merged, the sum is rounded.
    expected = slots @ (exact + a @ b) + to_numpy(layer.bias)
    layer.merge_lora()
    assert layer.quantization_mode == "int8" and not layer.lora_enabled
    error = np.abs(to_numpy(layer(slots)) - expected).mean() / expected.std()
    assert error < 0.02
    assert [w.name for w in layer.trainable_weights] == ["bias"]


@pytest.mark.parametrize("mode", [None, "int8"])
def test_loading_keeps_the_factors_trainable(mode, tmp_path):
    model = keras.Sequential([keras.Input((E, 4, D)), experts(name="experts")])
    if mode:
        model.quantize(mode)
    x = normal((2, E, 4, D))
    expected = to_numpy(model(x))
    model.save_weights(tmp_path / "x.weights.h5")
    model.load_weights(tmp_path / "x.weights.h5")
    # What was saved is the sum.
    assert_near(to_numpy(model(x)), expected, atol=0.1 if mode else 1e-5)
    for each in banks(model.layers[0]):
        assert not to_numpy(each.lora_kernel_b).any()
        assert to_numpy(each.lora_kernel_a).any()


def test_files_of_mixed_precision_hold_float32():
    layer = experts(dtype="mixed_bfloat16")
    saved = {}
    layer.output_dense.save_own_variables(saved)
    assert_near(to_numpy(saved["0"]), merged(layer.output_dense), rtol=1e-5, atol=1e-6)
    slots = normal((2, E, 4, D))
    error = np.abs(to_numpy(layer(slots)) - twins.experts(slots, *weights(layer)))
    assert np.median(error) < 0.05


def test_bank_round_trip():
    layer = bank()
    layer.enable_lora(RANK, lora_alpha=5.0)
    # Built, as its configuration says
    revived = revive(layer)
    assert type(revived) is ExpertBank
    assert (revived.lora_rank, revived.lora_alpha) == (RANK, 5.0)
    assert tuple(revived.lora_kernel_b.shape) == (E, RANK, H)


@pytest.mark.parametrize("rank", [0, -1, 2.0, True, "2"])
def test_wrong_rank(rank):
    layer = bank()
    with pytest.raises(ValueError, match="positive integer.*Received: rank="):
        layer.enable_lora(rank)
    assert not layer.lora_enabled


def test_second_factors_are_refused():
    layer = bank()
    layer.enable_lora(1)
    with pytest.raises(ValueError, match="has LoRA factors already.*merge_lora"):
        layer.enable_lora(2)


@pytest.mark.parametrize(
    "equation, shape", [("end,dh->enh", (E, 4, D)), ("end,edh->neh", (E, 4, D))]
)
def test_other_equations_are_refused(equation, shape):
    layer = ExpertBank(equation, output_shape=(None, H))
    with pytest.raises(ValueError, match=r"(?s)form\s'end,edh->enh'.*Received: equ"):
        layer.build(shape)
