"""What users do with any model of Keras: loops, callbacks, optimizers, precisions."""

import functools
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_softmoe import layers
from tests.skips import only_on
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.layer_checks import assert_same_weights
from tests.support.processes import ROOT
from tests.support.references import to_numpy

BATCH = 4
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SMALL = {"num_layers": 1, "moe_layers": (0,)}
SPARSE = {"router": tiny.SPARSE, "group_images": 2}
pytestmark = [tiny.FITTING, tiny.LOADING]
only = functools.partial(only_on, because="own loop")


def classifier(optimizer=None, loss=None, **overrides):
    """A model of one block, the same one each time."""
    keras.utils.set_random_seed(3)
    model = tiny.classifier(**{**SMALL, **overrides})
    model.compile(
        optimizer or keras.optimizers.SGD(0.1),
        "sparse_categorical_crossentropy",
        metrics=[],
    )
    return model


def data(num_images=2 * BATCH):
    return tiny.pixels(num_images), tiny.labels(num_images)


def fit(model, num_images=2 * BATCH, **kwargs):
    kwargs = {"shuffle": False, "batch_size": BATCH, "verbose": 0, **kwargs}
    return model.fit(*data(num_images), **kwargs).history["loss"]


def values(model):
    return [np.array(to_numpy(weight)) for weight in model.weights]


@only("torch")
# PyTorch's compiler looks at all attributes of a tensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_once_for_a_shape(monkeypatch):
    import torch

    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_ = functools.partial(torch.compile, backend=count)
    monkeypatch.setattr(torch, "compile", compile_)
    losses = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6, 8))
        x = layers.MoE(tiny.SOFT, mlp_dim=6)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(3)(x[:, 0]))
        model.compile("sgd", "mse", jit_compile=jit_compile)
        x, y = tiny.images(8).reshape(-1, 6, 8), np.zeros((32, 3))
        counts = Counts(graphs)
        callbacks = [counts]
        history = model.fit(x, y, 4, epochs=2, callbacks=callbacks, verbose=0).history
        losses.append(history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    # The second step finds gradients there.
    assert 0 < counts.found[0] <= counts.found[1]
    assert counts.found[2:] == counts.found[1:2] * 14


class Counts(keras.callbacks.Callback):
    """How long a list is after each batch."""

    def __init__(self, things):
        super().__init__()
        self.things, self.found = things, []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(len(self.things))


@only("jax", "torch")
def test_without_tensorflow():
    """In another process, since KerasHub imports it here."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.without_tensorflow"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


@only("torch")
@pytest.mark.parametrize("router", [tiny.SOFT, tiny.SPARSE], ids=["soft", "sparse"])
def test_one_graph(router):
    import torch

    torch._dynamo.reset()
    layer = layers.MoE(router, mlp_dim=6, group_images=2)
    x = keras.ops.convert_to_tensor(tiny.images(BATCH).reshape(BATCH, -1, 8))
    expected = to_numpy(layer(x))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert_near(to_numpy(compiled(x)), expected, rtol=1e-5, atol=1e-6)


@only("jax", "tensorflow")
@pytest.mark.parametrize("overrides", [{}, SPARSE], ids=["soft", "sparse"])
def test_jit_compile(overrides):
    model = classifier(**overrides)
    model.compile(model.optimizer, model.loss, metrics=[], jit_compile=True)
    assert np.isfinite(fit(model)).all()


@only("torch")
@pytest.mark.parametrize("overrides", [{}, SPARSE], ids=["soft", "sparse"])
def test_loop_of_torch(overrides):
    import torch

    model = classifier(**overrides)
    for part in (model, model.backbone):
        known = {id(parameter) for parameter in part.parameters()}
        assert known >= {id(weight.value) for weight in part.weights}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = map(keras.ops.convert_to_tensor, (tiny.images(BATCH), tiny.labels(BATCH)))
    before, losses = values(model), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x, training=True), y)
        (loss + sum(model.losses)).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    pairs = zip(values(model), before, strict=True)
    moved = [np.abs(one - other).max() > 0 for one, other in pairs]
    # Softmax does not feel what is added to all keys.
    assert sum(moved) >= len(model.trainable_weights) - 1


@only("jax")
@pytest.mark.parametrize("overrides", [{}, SPARSE], ids=["soft", "sparse"])
def test_loop_of_jax(overrides):
    import jax

    model = classifier(**overrides)
    x, y = tiny.images(BATCH), tiny.labels(BATCH)

    def loss_of(trainable, rest, x, y):
        logits, rest, losses = model.stateless_call(
            trainable, rest, x, training=True, return_losses=True
        )
        return model.loss(y, logits) + sum(losses), (rest, logits)

    traces = []

    @jax.jit
    def step(trainable, rest, x, y):
        traces.append(1)
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (rest, _)), gradients = gradient(trainable, rest, x, y)
        trainable = [w - 0.1 * g for w, g in zip(trainable, gradients, strict=True)]
        return loss, trainable, rest

    trainable = [v.value for v in model.trainable_variables]
    rest = [v.value for v in model.non_trainable_variables]
    losses = []
    for _ in range(5):
        loss, trainable, rest = step(trainable, rest, x, y)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert len(traces) == 1


@only("tensorflow")
@pytest.mark.parametrize("overrides", [{}, SPARSE], ids=["soft", "sparse"])
def test_loop_of_tensorflow(overrides):
    import tensorflow as tf

    model = classifier(**overrides)
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True)) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    x, y = tf.constant(tiny.images(BATCH)), tf.constant(tiny.labels(BATCH))
    losses = [float(step(x, y)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert step.experimental_get_tracing_count() == 1


class Interruption(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def test_backup_and_restore(tmp_path):
    def momentum():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    expected = classifier(momentum())
    losses = fit(expected, epochs=3)
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    with pytest.raises(KeyboardInterrupt):
        fit(classifier(momentum()), epochs=3, callbacks=[backup, Interruption()])
    model = classifier(momentum())
    rest = fit(model, epochs=3, callbacks=[backup])
    np.testing.assert_allclose(rest, losses[2:], rtol=1e-4)
    assert_same_weights(model, expected, **CLOSE)


@pytest.mark.parametrize("name", ["{epoch}.keras", "{epoch}.weights.h5"])
def test_model_checkpoint(tmp_path, name):
    model, x = classifier(**SPARSE), data()[0]
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(tmp_path / name), save_weights_only=name.endswith("h5")
    )
    fit(model, epochs=2, callbacks=[checkpoint])
    path = tmp_path / name.format(epoch=2)
    if name.endswith("h5"):
        revived = classifier(**SPARSE)
        revived.load_weights(path)
    else:
        revived = keras.saving.load_model(path)
    assert_near(tiny.predict(revived, x), tiny.predict(model, x), rtol=1e-5, atol=1e-6)


def test_averages():
    plain = classifier()
    steps = []
    for _ in range(2):
        plain.train_on_batch(*data(BATCH))
        steps.append(values(plain))
    model = classifier(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.75))
    fit(model, BATCH, epochs=2)
    # The first step is where the average begins.
    averages = [0.75 * a + 0.25 * b for a, b in zip(*steps, strict=True)]
    assert_same_weights(model, averages, **CLOSE)


def test_gradient_accumulation():
    expected = classifier()
    before = values(expected)
    expected.train_on_batch(*data(2 * BATCH))
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = classifier(optimizer)
    x, y = data(2 * BATCH)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    assert_same_weights(model, before, **CLOSE)
    model.train_on_batch(x[BATCH:], y[BATCH:])
    assert_same_weights(model, expected, **CLOSE)


@pytest.mark.parametrize("is_global", [True, False])
def test_loss_scaling(is_global):
    dtype = {}
    if is_global:
        keras.config.set_dtype_policy("mixed_float16")
    else:
        dtype = {"dtype": "mixed_float16"}
    model = classifier(**SPARSE, **dtype)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.backbone.blocks[0].moe.experts.compute_dtype == "float16"
    losses = fit(model, epochs=6)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    for weight in model.trainable_weights:
        assert keras.backend.standardize_dtype(weight.dtype) == "float32"


@only("tensorflow")
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_no_step_after_the_last_batch():
    import tensorflow as tf

    images, labels = tiny.images(3 * BATCH), tiny.labels(3 * BATCH)
    known = tf.data.Dataset.from_tensor_slices((images, labels))
    known = known.batch(BATCH, drop_remainder=True)
    unknown = tf.data.Dataset.from_generator(
        lambda: iter(known), output_signature=known.element_spec
    )
    found = []
    for batches in (known, unknown):
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
        model = classifier(optimizer, head={"preprocessor": None})
        history = model.fit(batches, epochs=2, verbose=0, validation_data=batches)
        assert int(to_numpy(optimizer.iterations)) == 6
        found.append((history.history, values(model)))
    (expected, weights), (history, others) = found
    for name in ("loss", "val_loss"):
        assert history[name] == pytest.approx(expected[name], rel=1e-5)
    for one, other in zip(others, weights, strict=True):
        assert_near(one, other, rtol=1e-5, atol=1e-6)
