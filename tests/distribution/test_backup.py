"""Backups on one device: what goes on, what is refused, and what is left behind."""

import random
import tempfile
import warnings

import h5py
import keras
import numpy as np
import pytest

from keras_softmoe.distribution import Backup
from tests.skips import only_on
from tests.support.close import assert_near, difference

BATCH, STEPS, EPOCHS = 4, 5, 3
IMAGES = np.random.default_rng(0).normal(size=(BATCH * STEPS, 6)).astype("float32")
LABELS = (np.arange(BATCH * STEPS) * 7 % 3).astype("int32")

# What a backup refuses is the same code everywhere, and TensorFlow takes seconds to
# trace a model.
not_on_tensorflow = only_on("jax", "torch", because="one backend")


def classifier(optimizer="adam", width=5, metrics=("accuracy",), dtype=None, frozen=()):
    """A model with random states, the same weights each time."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(width, activation="relu", dtype=dtype),
            layers.Dropout(0.3, seed=2),
            layers.Dense(3),
        ]
    )
    for index in frozen:
        model.layers[index].trainable = False
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA is slow to compile on TensorFlow.
    jit = keras.backend.backend() == "jax"
    model.compile(optimizer, loss, metrics=list(metrics), jit_compile=jit)
    return model


class Watch(keras.callbacks.Callback):
    """Keeps the logs of all steps, and is interrupted when it is told.

    Args:
        steps: int or `None`, after how many steps.
        where: the method that is interrupted.
    """

    def __init__(self, steps=None, where="on_train_batch_end"):
        super().__init__()
        self.steps, self.where = steps, where
        self.logs, self.epochs = [], []

    def _count(self, where):
        if self.steps is not None and where == self.where:
            self.steps -= 1
            if self.steps <= 0:
                raise KeyboardInterrupt

    def on_train_begin(self, logs=None):
        self._count("on_train_begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        self._count("on_train_batch_begin")

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})
        self._count("on_train_batch_end")


def fit(model, *callbacks, **arguments):
    arguments = {"epochs": EPOCHS, "batch_size": BATCH, **arguments}
    return model.fit(
        IMAGES, LABELS, shuffle=False, verbose=0, callbacks=callbacks, **arguments
    )


def interrupted(directory, steps, where="on_train_batch_end", **arguments):
    """A model that was interrupted after some steps, with a backup every two."""
    model = classifier(**arguments)
    with pytest.raises(KeyboardInterrupt):
        fit(model, Backup(directory, every=2), Watch(steps, where))
    return model


def values(model):
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in model.variables]


def check(found, expected):
    for now, before in zip(found, expected, strict=True):
        assert_near(now, before, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def whole():
    """A run that nothing interrupted: its model and the logs of its steps."""
    model, watch = classifier(), Watch()
    fit(model, watch)
    return model, watch.logs


@pytest.mark.parametrize("steps", [3, STEPS, 2 * STEPS - 1])
def test_training_goes_on_as_if_nothing_had_happened(whole, steps, tmp_path):
    expected, logs = whole
    interrupted(tmp_path, steps)
    model, watch = classifier(), Watch()
    fit(model, Backup(tmp_path, every=2), watch)
    epoch, batches = divmod(steps, STEPS)
    # The last of an epoch is kept when the epoch has ended, which it had not.
    if not batches:
        epoch, batches = epoch - 1, STEPS
    done = epoch * STEPS + batches // 2 * 2
    assert watch.epochs == list(range(epoch, EPOCHS))
    for now, before in zip(
        watch.logs[done - epoch * STEPS :], logs[done:], strict=True
    ):
        assert now == pytest.approx(before, rel=1e-6, abs=1e-6)
    # Those that are passed over have the metrics as they were kept.
    for passed in watch.logs[: done - epoch * STEPS]:
        assert passed == pytest.approx(logs[done - 1], rel=1e-6, abs=1e-6)
    check(values(model), values(expected))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [3, STEPS + 1, 2 * STEPS])
def test_what_global_generators_draw(steps, tmp_path):
    """Dropout without a seed, and data in a random order from NumPy and Python."""

    def model():
        made = classifier()
        made.pop()
        made.add(keras.layers.Dropout(0.5))
        made.add(keras.layers.Dense(3, name="last"))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile("adam", loss, jit_compile=keras.backend.backend() == "jax")
        return made

    class Epochs(keras.utils.PyDataset):
        def __len__(self):
            return STEPS

        def __getitem__(self, index):
            rows = np.random.permutation(len(IMAGES))[:BATCH]  # noqa: NPY002
            return IMAGES[rows] * random.uniform(0.5, 1.5), LABELS[rows]

    def run(*callbacks):
        made = model()
        made.fit(Epochs(), epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
        return values(made)

    def start(seed):
        random.seed(seed)
        keras.utils.set_random_seed(seed)

    start(1)
    expected = run()
    start(1)
    with pytest.raises(KeyboardInterrupt):
        run(Backup(tmp_path, every=2), Watch(steps))
    start(2)
    check(run(Backup(tmp_path)), expected)


def test_an_epoch_of_which_only_the_end_was_missing(whole, tmp_path):
    _, logs = whole
    model = classifier()
    with pytest.raises(KeyboardInterrupt):
        fit(model, Backup(tmp_path, every=1), Watch(STEPS))
    history = fit(classifier(), Backup(tmp_path)).history
    expected = [logs[end - 1] for end in range(STEPS, len(logs) + 1, STEPS)]
    for name in ("loss", "accuracy"):
        assert_near(history[name], [log[name] for log in expected], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("steps", "where"),
    [
        # Steps 5 and 6 of the second epoch are passed over, the seventh is done.
        (1, "on_train_begin"),
        (1, "on_train_batch_begin"),
        (1, "on_train_batch_end"),
        (4, "on_train_batch_end"),
    ],
)
def test_the_next_fit_knows_nothing_of_an_interrupted_one(steps, where, tmp_path):
    interrupted(tmp_path, STEPS + 3)
    model = interrupted(tmp_path, steps, where)
    before, plain, watch = values(model), classifier(), Watch()
    for variable, value in zip(plain.variables, before, strict=True):
        variable.assign(value)
    history = fit(model, watch, epochs=2).history
    assert watch.epochs == [0, 1]
    assert len(history["loss"]) == 2
    # Another one with these weights, which had no backup, learns what this one does.
    assert watch.logs[0]["loss"] == pytest.approx(
        fit(plain, epochs=1, steps_per_epoch=1).history["loss"][0], rel=1e-6, abs=1e-6
    )
    for now, earlier in zip(values(model)[:2], before, strict=False):
        assert difference(now, earlier) > 1e-6


@not_on_tensorflow
def test_a_backup_may_be_used_again_after_an_interruption(whole, tmp_path):
    expected, _ = whole
    backup = Backup(tmp_path, every=2)
    for steps in (STEPS + 3, 1, 2):
        with pytest.raises(KeyboardInterrupt):
            fit(classifier(), backup, Watch(steps))
    model = classifier()
    fit(model, backup)
    check(values(model), values(expected))


@not_on_tensorflow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"optimizer": "adamw"},
            "another optimizer.*Received: AdamW, for Adam.*Compile",
        ),
        ({"width": 7}, r"another model.*\(6, 7\).*for \(\(6, 5\)"),
        ({"dtype": "bfloat16"}, "another model.*'bfloat16'.*'float32'"),
        (
            {"optimizer": keras.optimizers.Adam(gradient_accumulation_steps=2)},
            "another optimizer.*Received: 14 variables, for 10",
        ),
        ({"frozen": [2]}, "were frozen.*trainable=False for '.*dense.*Freeze"),
    ],
)
def test_a_foreign_backup_changes_nothing(arguments, message, tmp_path):
    interrupted(tmp_path, 3)
    model = classifier(**arguments)
    before = values(model)
    with pytest.raises(ValueError, match=message):
        fit(model, Backup(tmp_path))
    for now, earlier in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(now, earlier)
    assert (tmp_path / "training.h5").is_file()


def test_what_is_frozen_stays_so(tmp_path):
    expected = classifier(frozen=[0])
    start = values(expected)
    fit(expected)
    interrupted(tmp_path, 3, frozen=[0])
    model = classifier(frozen=[0])
    fit(model, Backup(tmp_path))
    check(values(model), values(expected))
    np.testing.assert_array_equal(values(model)[0], start[0])


def test_other_metrics_start_anew(whole, tmp_path):
    expected, _ = whole
    interrupted(tmp_path, STEPS + 3)
    # As many variables, of the same shapes
    metrics = [keras.metrics.SparseTopKCategoricalAccuracy(2)]
    model, watch = classifier(metrics=metrics), Watch()
    with pytest.warns(UserWarning, match="other metrics.*epoch 2 start.*batch 3"):
        fit(model, Backup(tmp_path), watch)
    assert all("loss" in logs for logs in watch.logs)
    check(values(model), values(expected))
    assert len(watch.logs) == 2 * STEPS


@not_on_tensorflow
def test_half_precision_is_kept(tmp_path):
    expected = classifier(dtype="bfloat16")
    fit(expected)
    interrupted(tmp_path, STEPS + 3, dtype="bfloat16")
    model = classifier(dtype="bfloat16")
    fit(model, Backup(tmp_path))
    for now, before in zip(model.weights, expected.weights, strict=True):
        assert now.dtype == before.dtype
        now, before = (
            np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(w, "float32")))
            for w in (now, before)
        )
        assert_near(now, before, rtol=0, atol=1e-2)


@pytest.mark.parametrize("every", [0, -1, True, 2.0, "2", np.float32(3)])
def test_every_is_a_number_of_batches(every, tmp_path):
    with pytest.raises(ValueError, match="`every` must be a positive integer.*every="):
        Backup(tmp_path, every=every)
    assert Backup(tmp_path, every=np.int64(3)).every == 3


def begin(directory):
    """What `fit` does with a backup before it trains."""
    backup = Backup(directory)
    backup.set_model(classifier())
    backup.set_params({"steps": STEPS})
    backup.on_train_begin()


def test_a_file_in_place_of_the_directory(tmp_path):
    path = tmp_path / "backup"
    path.write_text("")
    for directory in (path, path / "below"):
        with pytest.raises(ValueError, match="No backup can be.*/backup"):
            begin(directory)


def test_a_directory_in_place_of_the_file(tmp_path):
    (tmp_path / "training.h5").mkdir()
    with pytest.raises(ValueError, match="No backup can be.*is a directory"):
        begin(tmp_path)


def test_a_directory_that_cannot_be_written_to(tmp_path, monkeypatch):
    # Not by its mode: a superuser may write everywhere.
    def refuse(*arguments, **settings):
        raise PermissionError("Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ValueError, match="No backup can be.*Permission denied"):
        begin(tmp_path)


@not_on_tensorflow
@pytest.mark.parametrize("damage", ["truncated", "foreign", "text", "half"])
def test_a_file_that_cannot_be_read(damage, tmp_path):
    path = tmp_path / "training.h5"
    if damage == "text":
        path.write_text("no HDF5")
    elif damage == "foreign":
        with h5py.File(path, "w") as file:
            file["weights"] = np.zeros(3)
    else:
        interrupted(tmp_path, 3)
        if damage == "truncated":
            path.write_bytes(path.read_bytes()[:-100])
        else:
            with h5py.File(path, "a") as file:
                del file["model/0"].attrs["dtype"]
    with pytest.raises(ValueError, match="training.h5' cannot be read.*Remove it"):
        begin(tmp_path)


@not_on_tensorflow
def test_an_unbuilt_model_is_told_from_another_one(tmp_path):
    interrupted(tmp_path, 3)
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("adam", "mse")
    backup = Backup(tmp_path)
    backup.set_model(model)
    with pytest.raises(ValueError, match="must be built before it is restored"):
        backup.on_train_begin()


def test_what_a_killed_run_left_is_cleared_away(tmp_path):
    left = tmp_path / ".training.h5.left"
    left.mkdir()
    (left / "training.h5").write_bytes(b"half")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin(tmp_path)
    assert list(tmp_path.iterdir()) == []
