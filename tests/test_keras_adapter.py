"""Uses of private Keras do what their docstrings say.

`keras_adapter/layers.py`, `keras_adapter/runs.py`, `keras_adapter/data.py` and
`keras_adapter/exports.py`; what the library makes of them is tested where it does.
"""

import contextlib

import keras
import numpy as np
import pytest

from keras_softmoe.keras_adapter import data, exports, layers as adapted, runs


def model():
    layers = [keras.layers.Dense(3, name="first"), keras.layers.Dense(1, name="second")]
    return keras.Sequential([keras.Input((2,)), *layers])


class Pair(adapted.Layer):
    """A layer with a part that is made when it is built."""

    def build(self, shape):
        self.part = keras.layers.Dense(2, name="part")
        self.part.build(shape)

    def call(self, x):
        return self.part(x)


def test_parts_made_later_are_frozen_with_their_layer():
    layer = Pair(trainable=False)
    layer.build((None, 2))
    assert layer.part.trainable_weights == []
    layer.trainable = True
    layer.part.bias.trainable = False
    assert adapted.trainable_parts(layer) == {"part/bias": False}
    adapted.set_trainable(layer, {"part/bias": True, "absent": False})
    assert adapted.trainable_parts(layer) == {}
    adapted.set_trainable(layer, False)
    assert layer.trainable_weights == []


def test_all_layers_are_listed():
    inner = model()
    outer = keras.Sequential([keras.Input((2,)), inner])
    names = {layer.name for layer in adapted.flatten_layers(outer)}
    assert {outer.name, inner.name, "first", "second"} <= names


def test_weights_start_as_zeros_in_the_scope_only():
    with adapted.zero_initialization():
        zeros = model()
        with adapted.zero_initialization(enabled=False):
            drawn = model()
    assert all(adapted.is_initialized(weight) for weight in zeros.weights)
    assert not np.any(zeros.get_weights()[0])
    assert np.all(drawn.get_weights()[0])
    assert np.all(model().get_weights()[0])


def test_a_run_calls_the_function_that_wraps_its_step():
    class Wrapped(keras.Sequential):
        """A model whose runs are noted."""

    calls = []

    @contextlib.contextmanager
    def around(model, step):
        calls.append(step)
        yield False

    runs.wrap_compilation(Wrapped, around)
    wrapped = Wrapped(model().layers)
    wrapped.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    x, y = np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")
    assert not runs.has_metrics(wrapped)
    runs.make_metrics(wrapped, (x, y))
    assert runs.has_metrics(wrapped)
    wrapped.fit(x, y, verbose=0)
    wrapped.evaluate(x, y, verbose=0)
    wrapped.predict(x, verbose=0)
    assert calls == ["train", "test", "predict"]


def test_batches_are_preprocessed():
    batches = data.BatchesOf(
        [(np.ones((2, 2), "float32"),)], lambda batch: (2 * batch[0],), shuffle=False
    )
    (batch,) = batches.get_numpy_iterator()
    np.testing.assert_array_equal(batch[0], np.full((2, 2), 2.0))
    assert batches.num_batches == 1


def test_a_spent_iterator_is_reported():
    batches = data.BatchesOf(iter([]), tuple, shuffle=False)
    with pytest.raises(ValueError, match="no batches left"):
        list(batches.get_numpy_iterator())


def test_state_of_optimizers():
    optimizer = keras.optimizers.SGD(use_ema=True)
    trained = model()
    optimizer.build(trained.trainable_variables)
    for index, variable in enumerate(trained.trainable_variables):
        assert runs.variables_of(optimizer)[index] is variable
        assert runs.index_of(optimizer, variable) == index
    assert len(runs.averages_of(optimizer)) == len(trained.trainable_variables)
    assert int(runs.num_gradients(optimizer)) == 0


def test_distributions():
    version = tuple(map(int, keras.__version__.split(".")[:2]))
    assert data.backend_distributes() == (version >= (3, 16))
    assert data.layout_map_of(None) is None


def test_assertions_on_sizes_are_removed():
    import torch

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for text in ("expression Ne(s0, 1) on", "expression Ge(s0, 2) on"):
        graph.call_function(torch.ops.aten._assert_scalar.default, (x, text))
    graph.output(x)
    exports.drop_assertions_of_more_than_one(graph)
    left = [node.args[1] for node in graph.nodes if node.op == "call_function"]
    assert left == ["expression Ge(s0, 2) on"]
