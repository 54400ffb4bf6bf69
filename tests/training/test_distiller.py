"""Distillation to a student with balancing losses."""

import functools

import keras
import numpy as np
import pytest

from keras_softmoe import ops, routers, training
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.layer_checks import reloaded
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
    wrap(model).fit(tiny.images(4), tiny.labels(4), batch_size=4, verbose=0)
    return to_numpy(kernel) - before


def plain(model):
    model.preprocessor = None
    model.compile(keras.optimizers.SGD(0.1), crossentropy(), metrics=[])
    return model


def moved_by_the_loss(wrap):
    """What the balancing loss adds to a step of the router."""
    return step_of_the_router(1.0, wrap) - step_of_the_router(0.0, wrap)


def test_the_balancing_loss_moves_the_router_as_in_fit():
    expected = moved_by_the_loss(plain)
    largest = np.abs(expected).max()
    assert largest > 1e-3
    found = moved_by_the_loss(distiller)
    assert_near(found / largest, expected / largest, rtol=1e-3, atol=1e-3)


def test_the_class_of_keras_warns_that_it_leaves_the_loss_out():
    wrap = functools.partial(distiller, cls=keras.distillation.Distiller)
    with pytest.warns(UserWarning, match="leaves out the balancing losses"):
        # If this fails, Keras adds it, and the class here is not needed.
        assert not moved_by_the_loss(wrap).any()


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
    history = made.fit(*data, batch_size=4, verbose=0).history
    assert history["loss"][0] - history["total_loss"][0] > 1e-2
    expected = made.evaluate(*data, verbose=0, return_dict=True)
    # Balancing losses are those of training steps.
    np.testing.assert_allclose(expected["loss"], expected["total_loss"], rtol=1e-5)
    loaded = reloaded(made, tmp_path)
    assert type(loaded) is training.Distiller
    np.testing.assert_allclose(
        loaded.predict(data[0], verbose=0), made.predict(data[0], verbose=0), rtol=1e-5
    )
