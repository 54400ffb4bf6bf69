"""Training that is interrupted at any point and goes on from there."""

import contextlib
import os
import tempfile
from pathlib import Path

import h5py
import keras
import ml_dtypes
import numpy as np

from keras_softmoe.converters.spread import (
    agree,
    assign_pieces,
    is_spread,
    num_processes,
    process_index,
    save_by_one,
)

_FILE = "training.h5"


class Backup(keras.callbacks.Callback):
    """Keeps what a training run needs to go on after it was interrupted.

    Start the same program again, with the same arguments of `fit`: it finds the backup,
    draws the batches that were done from the data without computing anything, and goes
    on, with the losses that it would have had. Kept are all variables: of the model
    (the states of dropout and of noise among them), of its optimizer and of its
    metrics. `keras.callbacks.BackupAndRestore` keeps no random states, starts an
    interrupted epoch again, and fails where several processes share a model.

    Variables may be spread over devices and processes, and over others when training
    goes on. Where there are several processes, the first one writes, and all of them
    read: the directory has to be one that they share.

    The data must come in the same order when the program is started again: shuffle
    with a seed. One more thing depends on how an epoch begins. Without
    `steps_per_epoch` Keras starts the data from the front in each epoch, so the order
    must be the same in each, or depend on the epoch alone:
    `dataset.shuffle(..., seed=1, reshuffle_each_iteration=False)`. With
    `steps_per_epoch` all epochs draw from one stream, `dataset.shuffle(..., seed=1)
    .repeat()`: say so with `one_stream=True`.

    Args:
        directory: str or path. Nothing else should be kept there.
        every: int, the number of batches between backups. `None`: only at the end of
            each epoch, where there is one in any case.
        one_stream: bool, see above.
        delete: bool, whether the backup is removed when training has ended.

    Raises:
        ValueError: if `every` is not positive; when training starts, if the backup is
            of another model or optimizer, or some processes cannot see it.

    Other callbacks keep nothing: one that waits for an improvement counts anew.

    Example:

    >>> backup = ksm.distribution.Backup("runs/1/backup", every=500)
    >>> model.fit(dataset, epochs=30, callbacks=[backup])
    """

    def __init__(self, directory, every=None, one_stream=False, delete=True):
        super().__init__()
        if every is not None and every < 1:
            raise ValueError(
                "`every` is a positive number of batches, or `None` for the end of each"
                f" epoch. Received: every={every!r}."
            )
        self.path = Path(directory, _FILE)
        self.every = every
        self.one_stream = one_stream
        self.delete = delete
        self._epoch = self._batches = self._unsaved = 0
        self._metrics = None

    def on_train_begin(self, logs=None):
        model = self.model
        missing = agree(self.path.is_file())
        if len(missing) == num_processes():
            return
        if missing:
            raise ValueError(
                "Some processes see a backup and others do not. All have to share the "
                f"directory. Received: directory='{self.path.parent}', not seen by "
                f"processes {missing}."
            )
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        with h5py.File(self.path) as file:
            self._epoch, self._batches = (int(n) for n in file.attrs["done"])
            self._restore(file)
        # As Keras' own `BackupAndRestore` does it: `fit` looks here after this.
        model._initial_epoch = self._epoch
        self._pass_over(model, self._batches)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        if self._metrics is None:
            self._batches = 0
            return
        # Only now, because Keras resets them when an epoch begins.
        for variable, value in zip(
            self.model.metrics_variables, self._metrics, strict=True
        ):
            variable.assign(value)
        self._metrics = None

    def on_train_batch_end(self, batch, logs=None):
        if batch < self._batches:
            return
        self._unsaved += batch + 1 - self._batches
        self._batches = batch + 1
        if self.every is not None and self._unsaved >= self.every:
            self._save(self._epoch, self._batches)

    def on_epoch_end(self, epoch, logs=None):
        self._batches = 0
        self._save(epoch + 1, 0)

    def on_train_end(self, logs=None):
        # It would hold for the next `fit` as well.
        self.model._initial_epoch = None
        if self.delete and process_index() == 0:
            self.path.unlink(missing_ok=True)

    def _save(self, epoch, batches):
        self._unsaved = 0
        model = self.model

        def save(directory):
            with h5py.File(Path(directory, _FILE), "w") as file:
                file.attrs["done"] = (epoch, batches)
                for kind, variables in _variables(model).items():
                    for index, variable in enumerate(variables):
                        _write(file, f"{kind}/{index}", variable)

        save_by_one(save, lambda: _replaced_file(self.path))

    def _restore(self, file):
        for kind, variables in _variables(self.model).items():
            found = [file[f"{kind}/{index}"] for index in range(len(file[kind]))]
            shapes = [tuple(dataset.shape) for dataset in found]
            expected = [tuple(variable.shape) for variable in variables]
            if shapes != expected:
                raise ValueError(
                    f"The backup in '{self.path}' is of another {kind}. Remove it to "
                    f"start from the beginning. Received: {len(expected)} variables of "
                    f"{expected[:3]} and so on, for {len(shapes)} of {shapes[:3]}."
                )
            if kind == "metrics":
                # At the end of an epoch they have said what they had to say.
                if self._batches:
                    self._metrics = [_read(dataset) for dataset in found]
                continue
            for variable, dataset in zip(variables, found, strict=True):
                if is_spread(variable):
                    assign_pieces(variable, dataset)
                else:
                    variable.assign(_read(dataset))

    def _pass_over(self, model, batches):
        """Have the first steps of `fit` draw their batches and do nothing else."""
        train = model.train_function
        executed = model.steps_per_execution
        earlier = self._epoch * self.params["steps"] if self.one_stream else 0
        state = {"steps": -(-batches // executed), "earlier": earlier}

        def draw_only(*arguments):
            iterator = arguments[-1]
            _draw(iterator, state["earlier"])
            state["earlier"] = 0
            if not state["steps"]:
                model.train_function = train
                return train(*arguments)
            state["steps"] -= 1
            _draw(iterator, executed)
            # On JAX a step takes and gives back the state of the model.
            return ({}, arguments[0]) if len(arguments) > 1 else {}

        if state["steps"] or state["earlier"]:
            model.train_function = draw_only


def _variables(model):
    optimizer = model.optimizer.variables if model.optimizer is not None else []
    return {
        "model": model.variables,
        "optimizer": optimizer,
        "metrics": model.metrics_variables,
    }


def _write(file, name, variable):
    value = keras.ops.convert_to_numpy(variable)
    file[name] = value
    if keras.backend.standardize_dtype(variable.dtype) == "bfloat16":
        file[name].attrs["dtype"] = "bfloat16"


def _read(dataset):
    value = np.asarray(dataset)
    if dataset.attrs.get("dtype") == "bfloat16":
        value = value.view(ml_dtypes.bfloat16)
    return value


def _draw(iterator, count):
    # PyTorch is handed the batch itself.
    if hasattr(iterator, "__next__"):
        for _ in range(count):
            next(iterator)


@contextlib.contextmanager
def _replaced_file(path):
    """A directory to write a file to, which is put in place when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".backup.") as directory:
        yield directory
        os.replace(Path(directory, path.name), path)
