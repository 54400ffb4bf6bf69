"""Distillation to a student with balancing losses."""

import contextlib

import keras
import numpy as np
import pytest

from keras_softmoe import ops, routers, training
from tests.support import tiny
from tests.support.references import to_numpy

LOGITS = keras.distillation.LogitsDistillation(temperature=2.0)


def student(weight):
    loss = routers.RoutingLoss(ops.z_loss, weight=weight)
    router = routers.SoftmaxTokenChoiceRouter(
        4, capacity_factor=None, noise_std=0.0, losses=[loss]
    )
    return tiny.classifier(num_layers=1, moe_layers=(0,), router=router)


def teacher():
    inputs = keras.Input(tiny.IMAGE_SHAPE)
    x = keras.layers.Flatten()(inputs)
    x = keras.layers.Dense(tiny.NUM_CLASSES, activity_regularizer="l2")(x)
    return keras.Model(inputs, x)


def distiller(model, losses=LOGITS, cls=training.Distiller):
    made = cls(teacher(), model, losses, student_loss_weight=0.5)
    made.compile(keras.optimizers.SGD(0.1), crossentropy())
    return made


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def step_of_the_router(weight, wrap):
    """How far a step with this weight of the balancing loss moves the router."""
    keras.utils.set_random_seed(2)
    model = student(weight)
    kernel = model.backbone.router.kernel
    before = to_numpy(kernel)
    wrapped = wrap(model)
    history = wrapped.fit(tiny.images(4), tiny.labels(4), batch_size=4, verbose=0)
    return to_numpy(kernel) - before, history.history


def plain(model):
    model.preprocessor = None
    model.compile(keras.optimizers.SGD(0.1), crossentropy(), metrics=[])
    return model


def test_the_balancing_loss_moves_the_router_as_in_fit():
    (with_loss, _), (without, _) = (step_of_the_router(w, plain) for w in (1.0, 0.0))
    expected = with_loss - without
    assert np.abs(expected).max() > 1e-3
    found = {}
    for cls, warns in (
        (training.Distiller, contextlib.nullcontext()),
        (keras.distillation.Distiller, pytest.warns(UserWarning, match="balancing")),
    ):
        with warns:
            steps = [
                step_of_the_router(w, lambda m: distiller(m, cls=cls))  # noqa: B023
                for w in (1.0, 0.0)
            ]
        found[cls] = steps[0][0] - steps[1][0]
        logs = steps[0][1]
        added = logs["loss"][0] - logs["total_loss"][0]
        assert (added > 1e-2) == (cls is training.Distiller)
    np.testing.assert_allclose(
        found[training.Distiller], expected, rtol=1e-3, atol=1e-3 * expected.max()
    )
    # If this fails, Keras adds them itself, and the class here is not needed.
    assert not found[keras.distillation.Distiller].any()


@tiny.LOADING
def test_features_evaluation_and_files(tmp_path):
    features = keras.distillation.FeatureDistillation(
        loss="mse", teacher_layer_name="dense", student_layer_name="predictions"
    )
    keras.utils.set_random_seed(2)
    model = student(1.0)
    inputs = keras.Input(tiny.IMAGE_SHAPE)
    x = keras.layers.Flatten()(inputs)
    x = keras.layers.Dense(tiny.NUM_CLASSES, name="dense")(x)
    made = training.Distiller(keras.Model(inputs, x), model, [LOGITS, features])
    made.compile(keras.optimizers.SGD(0.1), crossentropy())
    data = tiny.images(4), tiny.labels(4)
    made.fit(*data, batch_size=4, verbose=0)
    expected = made.evaluate(*data, verbose=0, return_dict=True)
    # Balancing losses are those of training steps.
    np.testing.assert_allclose(expected["loss"], expected["total_loss"], rtol=1e-5)
    made.save(tmp_path / "distiller.keras")
    loaded = keras.models.load_model(tmp_path / "distiller.keras")
    assert type(loaded) is training.Distiller
    np.testing.assert_allclose(
        loaded.predict(data[0], verbose=0), made.predict(data[0], verbose=0), rtol=1e-5
    )
