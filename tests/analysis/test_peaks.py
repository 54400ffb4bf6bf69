"""Largest weights of several models, against maxima taken one by one."""

import weakref

import keras
import numpy as np
import pytest

from keras_softmoe import analysis, layers, routers
from tests.layers.common import randomize
from tests.references import to_numpy

DATA = np.random.default_rng(0).normal(size=(3, 4, 6)).astype("float32")
VALUES = (1.0, 3.0)


def make_model(value, normalize, seed):
    """Two soft layers whose logits grow with the value."""
    x = inputs = keras.Input((4, 6))
    for name in ("first", "second"):
        router = routers.SoftRouter(2, 2, normalize=normalize)
        x = layers.MoE(router, 8, name=name)(x)
    model = keras.Model(inputs, x)
    randomize(model, seed)
    for name in ("first", "second"):
        router = model.get_layer(name).router
        weight = router.scale if normalize else router.mu
        weight.assign(weight * value)
    return model


def test_peaks_of_each_model():
    made = []

    def make(*arguments):
        made.append(arguments)
        return make_model(*arguments)

    sweep = analysis.peak_sweep(
        make, VALUES, DATA, seeds=2, score=lambda m: float(m.count_params()), verbose=0
    )
    assert sweep.blocks == ("first", "second")
    assert sweep.dispatch.shape == sweep.combine.shape == (2, 2, 2, 2)
    places = [
        (mode, index, seed) for mode in (0, 1) for index in (0, 1) for seed in (0, 1)
    ]
    assert made == [(VALUES[i], sweep.normalize[mode], s) for mode, i, s in places]
    np.testing.assert_array_equal(sweep.values, VALUES)
    for place, arguments in zip(places, made, strict=True):
        model = make_model(*arguments)
        x = DATA
        for block, name in enumerate(sweep.blocks):
            x, (routing, _) = model.get_layer(name)(x, return_decision=True)
            dispatch, combine = map(to_numpy, routing)
            tallest = [max(dispatch[g, :, e, c]) for g, e, c in np.ndindex(3, 2, 2)]
            np.testing.assert_allclose(
                sweep.dispatch[place][block], np.mean(tallest), rtol=1e-5
            )
            tallest = [combine[g, s].max() for g, s in np.ndindex(3, 4)]
            np.testing.assert_allclose(
                sweep.combine[place][block], np.mean(tallest), rtol=1e-5
            )
        assert sweep.scores[place] == model.count_params()
    # Larger logits, larger peaks.
    assert (sweep.dispatch[:, 1] > sweep.dispatch[:, 0]).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"values": ()}, r"Received: values=\[\]"),
        ({"values": (1.0, 1.0)}, r"Received: values=\[1.0, 1.0\]"),
        ({"seeds": 0}, "seeds=0"),
        ({"data": iter([DATA])}, "read only once.*Received: data="),
    ],
)
def test_nothing_to_sweep(arguments, message):
    arguments = {"values": VALUES, "data": DATA, **arguments}
    with pytest.raises(ValueError, match=message):
        analysis.peak_sweep(make_model, verbose=0, **arguments)


def test_models_that_differ_in_their_blocks():
    def make(value, normalize, seed):
        inputs = outputs = keras.Input((4, 6))
        for block in range(1 + (value == 3)):
            outputs = layers.SoftMoE(2, 8, name=f"block_{block}")(outputs)
        return keras.Model(inputs, outputs)

    match = r"\('block_0',\) of the first one, then \('block_0', 'block_1'\) at 3"
    with pytest.raises(ValueError, match=match):
        analysis.peak_sweep(make, VALUES, DATA, verbose=0)


def test_models_whose_layers_keras_names():
    """Every model has other names then, and lives until its successor is made."""
    alive = []

    def make(value, normalize, seed):
        assert not [model for model in alive if model() is not None]
        inputs = keras.Input((4, 6))
        model = keras.Model(inputs, layers.SoftMoE(2, 8)(inputs))
        alive.append(weakref.ref(model))
        return model

    sweep = analysis.peak_sweep(make, VALUES, DATA, verbose=0)
    assert sweep.dispatch.shape[-1] == len(sweep.blocks) == 1
