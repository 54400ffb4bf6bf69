"""Banks of experts (`layers/experts.py`): outputs and initial weights."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers
from keras_softmoe.layers.experts import EqualExperts
from tests.support import twins
from tests.support.close import assert_near, difference
from tests.support.gradients import layer_gradients
from tests.support.layer_checks import normal, randomize
from tests.support.references import to_numpy

NUM_EXPERTS, WIDTH, MLP_DIM = 16, 24, 40


def build(**kwargs):
    layer = layers.Experts(NUM_EXPERTS, MLP_DIM, **kwargs)
    layer.build((None, NUM_EXPERTS, None, WIDTH))
    return layer


def banks(layer):
    return layer.intermediate_dense, layer.output_dense


def test_each_expert_is_an_mlp_of_its_own():
    layer = layers.Experts(3, 6)
    slots = normal((2, 3, 4, 5))
    layer.build(slots.shape)
    randomize(layer)
    weights = [to_numpy(w) for bank in banks(layer) for w in (bank.kernel, bank.bias)]
    expected = twins.experts(slots, *weights)
    assert_near(to_numpy(layer(slots)), expected, rtol=1e-5, atol=1e-5)
    # Another number of slots, the same weights
    actual = to_numpy(layer(slots[:, :, :2]))
    assert_near(actual, expected[:, :, :2], rtol=1e-5, atol=1e-5)


def test_expert_is_an_mlp():
    mlp, layer = layers.MLP(6), layers.Experts(1, 6)
    tokens = normal((2, 4, 5))
    mlp.build(tokens.shape)
    layer.build((None, 1, None, 5))
    randomize(mlp)
    for weight, value in zip(layer.weights, mlp.get_weights(), strict=True):
        weight.assign(value.reshape(weight.shape))
    assert_near(
        to_numpy(layer(tokens[:, None]))[:, 0],
        to_numpy(mlp(tokens)),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("dropout_rate", [0.0, 0.5])
def test_remat_changes_no_number(dropout_rate):
    slots = normal((2, NUM_EXPERTS, 3, WIDTH))
    found = []
    for remat in (False, True):
        keras.utils.set_random_seed(1)
        layer = build(dropout_rate=dropout_rate, remat=remat, name="experts")
        assert layer.get_config()["remat"] == remat
        found.append(
            layer_gradients(
                layer, slots, lambda y, _: keras.ops.mean(y**2), training=True
            )
        )
    (value, of_slots, gradients), other = found
    np.testing.assert_allclose(other[0], value, rtol=1e-5)
    assert_near(other[1], of_slots, rtol=1e-4, atol=1e-7)
    assert len(gradients) == 4
    for name, gradient in gradients.items():
        assert abs(gradient).max() > 1e-6
        assert_near(other[2][name], gradient, rtol=1e-4, atol=1e-7)


def test_dropout_between_quantized_banks():
    """Adapters are trained on banks in int8, too."""
    layer = build(dropout_rate=0.5)
    slots = normal((2, NUM_EXPERTS, 3, WIDTH))
    layer(slots)
    for bank in banks(layer):
        bank.quantize("int8")
    quiet, again, trained = (
        to_numpy(layer(slots, training=training)) for training in (False, False, True)
    )
    np.testing.assert_array_equal(again, quiet)
    assert difference(trained, quiet) > 0.01


@pytest.mark.parametrize("equal_experts", [False, True])
def test_fans_are_those_of_one_expert(equal_experts):
    layer = build(equal_experts=equal_experts)
    # Glorot: uniform with this bound, whatever the number of experts
    bound = np.sqrt(6 / (WIDTH + MLP_DIM))
    for bank in banks(layer):
        kernel = to_numpy(bank.kernel)
        assert kernel.shape[0] == NUM_EXPERTS
        assert 0.97 * bound < np.abs(kernel).max() <= bound
        for expert in kernel:
            # 960 uniform numbers: the deviation is known to some 1.5 %
            np.testing.assert_allclose(expert.std(), bound / np.sqrt(3), rtol=0.08)
        assert 0.5e-6 < to_numpy(bank.bias).std() < 2e-6


@pytest.mark.parametrize("equal_experts", [False, True])
def test_equal_or_different_experts(equal_experts):
    for bank in banks(build(equal_experts=equal_experts)):
        kernel = to_numpy(bank.kernel)
        for expert in kernel[1:]:
            assert np.array_equal(expert, kernel[0]) == equal_experts


def test_equal_experts_initializer_round_trip():
    initializer = EqualExperts(keras.initializers.RandomUniform(-1, 1, seed=3))
    config = keras.saving.serialize_keras_object(initializer)
    revived = keras.saving.deserialize_keras_object(config)
    assert type(revived) is EqualExperts
    values = [to_numpy(each((4, 2, 3))) for each in (initializer, revived)]
    np.testing.assert_array_equal(*values)
    np.testing.assert_array_equal(values[0], values[0][:1].repeat(4, axis=0))


@pytest.mark.parametrize("shape", [(2, 16, 24), (2, 15, 4, 24)])
def test_wrong_slots(shape):
    layer = layers.Experts(NUM_EXPERTS, MLP_DIM)
    with pytest.raises(ValueError, match=r"(?s)with 16 experts.*slots_shape=\(2, 1"):
        layer.build(shape)
