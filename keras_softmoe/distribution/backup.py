"""Callback to resume training from any interruption."""

import contextlib
import os
import random
import shutil
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import h5py
import keras
import ml_dtypes
import numpy as np

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.files import atomic_file
from keras_softmoe.keras_adapter import runs
from keras_softmoe.sharding import variables as sharded

FILE = "training.h5"

# Prefix of temporary files beside it, see `atomic_file`
_PREFIX = f".{FILE}."


class Backup(keras.callbacks.Callback):
    """Callback that saves the state of `fit` to resume it after an interruption.

    Start the same program again, with the same arguments of `fit`: it skips completed
    batches without computing, and resumes with the same losses as if never interrupted.
    Saved are all variables of model, optimizer and metrics, and for a single process
    the random generators, but no other callbacks. Variables may be sharded, later over
    other devices. Several processes must share the directory.

    The data must have the same order after a restart: shuffle with a seed, with
    `reshuffle_each_iteration=False`, since each epoch begins the data again. With
    `steps_per_epoch` of data without end a resumed training begins them anew.

    Args:
        directory: str or path, for this backup only.
        every: int, batches between backups. `None`: only at the end of each epoch.
        delete: bool, whether the backup is removed at the end of training.

    Raises:
        ValueError: if an argument is not possible; when training starts, if the
            directory is not writable, or the backup cannot be read or does not fit.

    Examples:
        >>> classifier.compile("sgd")
        >>> backup = ksm.distribution.Backup("runs/1/backup", every=500)
        >>> classifier.fit(images, labels, epochs=1, callbacks=[backup])
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        every: int | None = None,
        delete: bool = True,
    ):
        super().__init__()
        if every is not None:
            check_whole_numbers(1, every=every)
        # For a symbolic link the target is created if it does not exist.
        self.path = Path(os.path.realpath(directory), FILE)
        self.every = every
        self.delete = delete
        self._start()

    def _start(self, epoch=0, batches=0):
        # Completed batches of this epoch, and how many of them are not saved
        self._epoch, self._batches, self._unsaved = epoch, batches, 0
        # Whether this `fit` resumes within an epoch
        self._is_resumed = False
        # Metrics in the backup, and the logs of skipped batches
        self._metrics, self._logs = None, {}
        # States of random generators: at the start of the epoch, and in the backup
        self._generators, self._saved_generators = {}, None

    def on_train_begin(self, logs=None):
        model = self.model
        self._start()
        self._check_directory()
        missing = sharded.failed_processes(self.path.is_file())
        if len(missing) == sharded.num_processes():
            return
        if missing:
            raise ValueError(
                f"All processes must share the directory. Received: '{self.path}', "
                f"which processes {missing} do not see."
            )
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        with open_backup(self.path) as backup:
            self._start(*backup.done)
            self._restore(backup)
            if sharded.num_processes() == 1:
                self._saved_generators = backup.generators
        runs.set_first_epoch(model, self._epoch)
        self._is_resumed = self._batches > 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        runs.set_first_epoch(self.model, None)
        if self._saved_generators is not None:
            # They determine the order of data in this epoch.
            set_generator_states(self._saved_generators[0])
        self._generators = generator_states()
        if not self._is_resumed:
            self._batches = 0
        elif runs.has_metrics(self.model):
            # Only now, because Keras resets metrics when an epoch begins.
            self._restore_metrics()
        self._is_resumed = False

    def on_train_batch_begin(self, batch, logs=None):
        if batch < self._batches:
            runs.replace_next_step(self.model, self._skip)

    def on_train_batch_end(self, batch, logs=None):
        if batch < self._batches:
            if batch + 1 == self._batches and self._saved_generators is not None:
                # Skipped steps have drawn nothing. (Data have, from other generators.)
                set_backend_states(self._saved_generators[1])
                self._saved_generators = None
            return
        self._saved_generators = None
        self._unsaved += batch + 1 - self._batches
        self._batches = batch + 1
        if self.every is not None and self._unsaved >= self.every:
            self._save(self._epoch, self._batches)

    def on_epoch_end(self, epoch, logs=None):
        self._batches = 0
        self._save(epoch + 1, 0)

    def on_train_end(self, logs=None):
        runs.set_first_epoch(self.model, None)
        if self.delete and sharded.process_index() == 0:
            self.path.unlink(missing_ok=True)

    def _skip(self, model, iterator):
        """Return the logs of a step completed before the interruption."""
        batch = _draw(iterator, model.steps_per_execution)
        if self._metrics is not None:
            runs.make_metrics(model, batch)
            self._restore_metrics()
        return dict(self._logs)

    def _check_directory(self):
        """Raise unless the directory is writable, and remove files of a killed run."""
        failure = None
        if sharded.process_index() == 0:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                for left in self.path.parent.glob(f"{_PREFIX}*"):
                    shutil.rmtree(left)
                if self.path.is_dir():
                    raise IsADirectoryError(f"'{self.path}' is a directory")
                with tempfile.TemporaryDirectory(
                    dir=self.path.parent, prefix=_PREFIX
                ) as directory:
                    Path(directory, FILE).touch()
            except OSError as error:
                failure = error
        if sharded.failed_processes(failure is None):
            raise ValueError(
                "No backup can be written: `directory` must be writable. Received: "
                f"directory='{self.path.parent}' ({failure or 'fails in process 0'})."
            ) from failure

    def _save(self, epoch, batches):
        self._unsaved = 0
        model, now = self.model, generator_states()
        # Between epochs the next one begins with the current states.
        generators = (self._generators if batches else now, now)

        def save(path):
            with h5py.File(path, "w") as file:
                file.attrs["done"] = epoch, batches
                file.attrs["optimizer"] = _optimizer_name(model.optimizer)
                for when, states in zip(("epoch", "now"), generators, strict=True):
                    for name, state in states.items():
                        file[f"generators/{when}/{name}"] = state
                for kind, variables in _variables_of(model).items():
                    group = file.create_group(kind)
                    for index, variable in enumerate(variables):
                        group[str(index)] = keras.ops.convert_to_numpy(variable)
                        dtype = keras.backend.standardize_dtype(variable.dtype)
                        about = {"path": variable.path, "trainable": variable.trainable}
                        group[str(index)].attrs.update({"dtype": dtype, **about})

        room = sharded.room_for(sum(_variables_of(model).values(), start=[]))
        sharded.save_in_one_process(save, lambda: atomic_file(self.path, room))

    def _restore(self, backup):
        """Check a backup, and restore model and optimizer from it."""
        model = self.model
        if not model.built:
            raise ValueError(
                "A model must be built before it is restored from a backup. Received: "
                f"the model {model.name!r} without variables, and '{self.path}'."
            )
        name = _optimizer_name(model.optimizer)
        if backup.optimizer != name:
            raise ValueError(
                f"The backup in '{self.path}' is of another optimizer. Received: {name}"
                f", for {backup.optimizer}. Compile with that one, or remove the file."
            )
        for kind in ("model", "optimizer"):
            self._check(kind, _variables_of(model)[kind], backup.datasets[kind])
        for kind in ("model", "optimizer"):
            pairs = zip(_variables_of(model)[kind], backup.datasets[kind], strict=True)
            for variable, dataset in pairs:
                if sharded.is_sharded(variable):
                    sharded.assign_shards(variable, dataset)
                else:
                    variable.assign(_read(dataset))
        # Between epochs metrics are reset.
        if self._batches:
            self._metrics = [
                (_shape_and_dtype(dataset), dataset.attrs["path"], _read(dataset))
                for dataset in backup.datasets["metrics"]
            ]

    def _check(self, kind, variables, datasets):
        specs = ([_shape_and_dtype(x) for x in xs] for xs in (variables, datasets))
        expected, found = specs
        if found != expected:
            pairs = zip(expected, found, strict=False)
            first = next((f"; {a}, for {b}" for a, b in pairs if a != b), "")
            raise ValueError(
                f"The backup in '{self.path}' is of another {kind}: remove it to start "
                f"anew. Received: {len(expected)} variables, for {len(found)}{first}."
            )
        for variable, dataset in zip(variables, datasets, strict=True):
            # The state of the optimizer would belong to other variables.
            if kind == "model" and dataset.attrs["trainable"] != variable.trainable:
                raise ValueError(
                    f"The backup in '{self.path}' is of a training in which other "
                    "parts of the model were frozen. Received: trainable="
                    f"{variable.trainable} for {variable.path!r}. Freeze the same ones,"
                    " or remove the file."
                )

    def _restore_metrics(self):
        model, metrics = self.model, self._metrics
        variables = model.metrics_variables
        now = [(_shape_and_dtype(variable), variable.path) for variable in variables]
        if now == [(spec, path) for spec, path, _ in metrics]:
            for variable, (_, _, value) in zip(variables, metrics, strict=True):
                variable.assign(value)
        else:
            warnings.warn(
                f"The backup in '{self.path}' is of other metrics. Those of epoch "
                f"{self._epoch + 1} start anew with batch {self._batches + 1}.",
                stacklevel=2,
            )
        self._metrics = None
        self._logs = model.get_metrics_result()


def _draw(iterator, count):
    """Draw batches and return the first of them."""
    # On PyTorch this is the batch itself.
    if not hasattr(iterator, "__next__"):
        return None
    first = next(iterator)
    for _ in range(count - 1):
        # With `steps_per_execution` the last batches of an epoch may be fewer.
        next(iterator, None)
    return first


def _variables_of(model):
    """Return the variables of a backup, a dict of lists by kind."""
    return {
        "model": model.variables,
        "optimizer": model.optimizer.variables if model.optimizer is not None else [],
        "metrics": model.metrics_variables,
    }


def _optimizer_name(optimizer):
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    return name if inner is None else f"{name} of {_optimizer_name(inner)}"


def _shape_and_dtype(variable):
    """Return shape and dtype of a `keras.Variable`, or of that in an `h5py.Dataset`."""
    is_dataset = isinstance(variable, h5py.Dataset)
    dtype = variable.attrs["dtype"] if is_dataset else variable.dtype
    return tuple(variable.shape), keras.backend.standardize_dtype(dtype)


def _read(dataset):
    """Return the value of a variable in a file, an array."""
    value = np.asarray(dataset)
    if dataset.attrs["dtype"] == "bfloat16":
        value = value.view(ml_dtypes.bfloat16)
    return value


@contextlib.contextmanager
def open_backup(path):
    """Yield the content of a backup; raise if it is damaged or not a backup.

    `done` has completed epochs, and completed batches of the next one, `datasets` lists
    of `h5py.Dataset` by kind, `generators` the states at the epoch's start and now.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(h5py.File(path))
            epoch, batches = (int(n) for n in file.attrs["done"])
            datasets = {
                kind: [file[f"{kind}/{index}"] for index in range(len(file[kind]))]
                for kind in ("model", "optimizer", "metrics")
            }
            for dataset in sum(datasets.values(), start=[]):
                if not {"dtype", "path", "trainable"} <= set(dataset.attrs):
                    raise KeyError(f"{dataset.name} has not all attributes")
            backup = SimpleNamespace(
                done=(epoch, batches),
                optimizer=str(file.attrs["optimizer"]),
                datasets=datasets,
                generators=tuple(
                    {n: np.asarray(s) for n, s in file[f"generators/{when}"].items()}
                    for when in ("epoch", "now")
                ),
            )
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"The backup in '{path}' cannot be read: it is damaged, or not a file "
                f"of this callback. Remove it to start anew. Received: {error}"
            ) from error
        yield backup


def generator_states():
    """Return the states of the generators of Python, NumPy and backend as arrays."""
    version, words, gauss = random.getstate()
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    found = {
        "python": np.array([version, *words], "int64"),
        "python_gauss": np.array([np.nan if gauss is None else gauss]),
        "numpy": state["state"]["key"],
        "numpy_position": np.array([state["state"]["pos"], state["has_gauss"]]),
        "numpy_gauss": np.array([state["gauss"]]),
    }
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        found["torch"] = torch.get_rng_state().numpy()
        for index, cuda in enumerate(torch.cuda.get_rng_state_all()):
            found[f"torch_cuda_{index}"] = cuda.numpy()
    elif backend == "tensorflow":
        import tensorflow as tf

        found["tensorflow"] = tf.random.get_global_generator().state.numpy()
    return found


def set_generator_states(states):
    """Restore the states of all generators from `generator_states`."""
    version, *words = (int(word) for word in states["python"])
    gauss = float(states["python_gauss"][0])
    random.setstate((version, tuple(words), None if np.isnan(gauss) else gauss))
    position, has_gauss = (int(n) for n in states["numpy_position"])
    np.random.set_state(  # noqa: NPY002 (the one that users' code may draw from)
        {
            "bit_generator": "MT19937",
            "state": {"key": states["numpy"], "pos": position},
            "has_gauss": has_gauss,
            "gauss": float(states["numpy_gauss"][0]),
        }
    )
    set_backend_states(states)


def set_backend_states(states):
    """Restore the states of the generators that this backend has saved."""
    backend = keras.backend.backend()
    if backend == "torch" and "torch" in states:
        import torch

        torch.set_rng_state(torch.from_numpy(states["torch"]))
        for index in range(torch.cuda.device_count()):
            if f"torch_cuda_{index}" in states:
                cuda = torch.from_numpy(states[f"torch_cuda_{index}"])
                torch.cuda.set_rng_state(cuda, index)
    elif backend == "tensorflow" and "tensorflow" in states:
        import tensorflow as tf

        tf.random.get_global_generator().state.assign(states["tensorflow"])
