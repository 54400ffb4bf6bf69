"""Checks before each `fit`, `evaluate` and `predict`.

Tests `models/mutable_routing.py` and `models/fitting.py`.
"""

import threading

import keras
import numpy as np
import pytest

from keras_softmoe import routers
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.layer_checks import assert_same_weights

pytestmark = tiny.FITTING
IS_TORCH = keras.backend.backend() == "torch"
PATHS = ["block_0/moe/router", "block_1/moe/router"]


def runs(model):
    x, y = tiny.pixels(4), tiny.labels(4)
    return {
        "fit": lambda: model.fit(x, y, batch_size=4, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, batch_size=4, verbose=0),
        "predict": lambda: model.predict(x, batch_size=4, verbose=0),
    }


@pytest.mark.parametrize(
    ("method", "compiled_before"),
    [("fit", True), ("evaluate", False), ("predict", True), ("predict", False)],
)
def test_a_compiled_run_is_refused_where_decisions_are_recorded(
    method, compiled_before
):
    model = tiny.classifier(moe_layers=(0, 1))
    run = runs(model)[method]
    if compiled_before:
        run()
    before = model.get_weights()
    if IS_TORCH:
        with routers.record() as decisions:
            run()
        assert list(decisions)[:2] == PATHS
        return
    with (
        pytest.raises(ValueError, match=f"nothing of `{method}`.*in the scope"),
        routers.record() as decisions,
    ):
        run()
    assert decisions == {}
    assert_same_weights(model, before)
    run()


def test_eager_predictions_are_recorded():
    model = tiny.classifier(moe_layers=(0, 1))
    expected = tiny.predict(model, tiny.pixels(4))
    model.compile(run_eagerly=True)
    with routers.record() as decisions:
        found = tiny.predict(model, tiny.pixels(4))
    assert_near(found, expected, rtol=1e-5, atol=1e-6)
    assert list(decisions) == PATHS
    assert keras.ops.shape(decisions[PATHS[0]].routing.dispatch)[0] == 4


def in_thread(run):
    """What a callable returns in another thread, or the error that it raises."""
    found = []

    def note():
        try:
            found.append(run())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    return found[0]


def test_a_model_in_training_predicts_in_no_other_thread_on_jax():
    model, found = tiny.classifier(), []
    predict = runs(model)["predict"]
    expected = predict()
    model.fit(
        tiny.pixels(4),
        tiny.labels(4),
        batch_size=4,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_train_batch_begin=lambda batch, logs: found.append(
                    in_thread(predict)
                )
            )
        ],
    )
    if keras.backend.backend() == "jax":
        assert "in training in another thread" in str(found[0])
        assert isinstance(found[0], ValueError)
    else:
        assert_near(found[0], expected, rtol=1e-5, atol=1e-6)
    # The lock is free again, and the weights are there.
    np.testing.assert_array_equal(in_thread(predict), predict())


@pytest.mark.parametrize("change", ["freeze", "unfreeze"])
def test_other_weights_than_those_of_the_optimizer(change):
    model = tiny.classifier(moe_layers=(0,), router=tiny.SPARSE, num_layers=1)
    model.backbone.router.trainable = change == "freeze"
    model.compile(keras.optimizers.SGD(0.1))
    run = runs(model)["fit"]
    run()
    model.backbone.router.trainable = change == "unfreeze"
    before = model.get_weights()
    for refused in (run, lambda: model.train_on_batch(tiny.images(4), tiny.labels(4))):
        with pytest.raises(ValueError, match="call `compile` again.*router/kernel"):
            refused()
    assert_same_weights(model, before)
    model.compile(keras.optimizers.SGD(0.1))
    run()
    kernel = model.backbone.router.kernel
    index = [v is kernel for v in model.weights].index(True)
    is_kept = np.array_equal(model.get_weights()[index], before[index])
    assert is_kept == (change == "freeze")
