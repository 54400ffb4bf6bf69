"""Callback to resume training from any interruption."""

import os
import shutil
import tempfile
import warnings
from pathlib import Path

import h5py
import keras

from keras_softmoe.checks import is_whole_number, quote
from keras_softmoe.distribution.backup_file import (
    generator_states,
    open_backup,
    optimizer_name,
    read,
    set_backend_states,
    set_generator_states,
    shape_and_dtype,
    variables_of,
    write,
)
from keras_softmoe.files import atomic_file
from keras_softmoe.keras_adapter.runs import (
    has_metrics,
    make_metrics,
    replace_next_step,
    set_first_epoch,
)
from keras_softmoe.sharding.variables import (
    assign_shards,
    failed_processes,
    is_sharded,
    num_processes,
    process_index,
    room_for,
    save_in_one_process,
)

FILE = "training.h5"

# Prefix of temporary files beside it, see `atomic_file`
_PREFIX = f".{FILE}."


class Backup(keras.callbacks.Callback):
    """Callback that saves the state of `fit` to resume it after an interruption.

    Start the same program again, with the same arguments of `fit`: it finds the backup,
    skips the completed batches of the data without computing, and resumes with the same
    losses as without an interruption. Saved are all variables of the model (with the
    states of dropout and of noise), of its optimizer and of its metrics; and, for a
    single process, the global random generators of Python, NumPy and the backend:
    PyTorch's determines dropout without a seed, and perhaps the order of the data.

    `keras.callbacks.BackupAndRestore` saves no random states, restarts an interrupted
    epoch, and fails if several processes share a model.

    Variables may be sharded over devices and processes, and over others when training
    resumes. Of several processes, the first one writes and all read, so they must share
    the directory.

    The data must have the same order when the program is restarted: shuffle with a
    seed. Without `steps_per_epoch` Keras iterates over the data from the beginning in
    each epoch, so the order must be the same in each, or depend on the epoch only:
    `dataset.shuffle(..., seed=1, reshuffle_each_iteration=False)`. With
    `steps_per_epoch` all epochs draw from one stream, `dataset.shuffle(..., seed=1)
    .repeat()`: then pass `one_stream=True`.

    Args:
        directory: str or path, for this backup only.
        every: int, the number of batches between backups. `None`: only at the end of
            each epoch, which always has one.
        one_stream: bool, whether all epochs draw from one stream. Not supported on
            PyTorch, where Keras draws the batches.
        delete: bool, whether the backup is removed at the end of training.

    Raises:
        ValueError: if `every` is not a positive integer, or `one_stream` is not
            supported; when training starts, if the directory is not writable, the
            backup cannot be read, belongs to another model or optimizer (then nothing
            is changed) or has other frozen parts, or some processes cannot see it.

    The state of other callbacks is not saved: one that waits for an improvement counts
    from zero. They are also called for skipped batches, with the metrics of the backup.
    If the metrics have changed they start from zero within the epoch, with a warning.

    Examples:
        >>> classifier.compile("sgd")
        >>> backup = ksm.distribution.Backup("runs/1/backup", every=500)
        >>> classifier.fit(images, labels, epochs=1, callbacks=[backup])
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        every: int | None = None,
        one_stream: bool = False,
        delete: bool = True,
    ):
        super().__init__()
        if every is not None and not is_whole_number(every):
            raise ValueError(
                "`every` must be a positive integer, the number of batches between "
                "backups, or `None` for the end of each epoch. Received: "
                f"every={quote(every)}. Pass one of these."
            )
        if one_stream and keras.backend.backend() == "torch":
            raise ValueError(
                "On PyTorch a callback cannot draw batches from the data, so batches "
                "of earlier epochs cannot be skipped in one stream. Received: "
                f"one_stream={one_stream!r}. Leave `steps_per_epoch` out, so that each "
                "epoch begins the data again, and with it `one_stream`."
            )
        # For a symbolic link the target is created if it does not exist.
        self.path = Path(os.path.realpath(directory), FILE)
        self.every = every
        self.one_stream = one_stream
        self.delete = delete
        self._start()

    def _start(self, epoch=0, batches=0):
        # Completed batches of this epoch, and those of them that are not saved
        self._epoch, self._batches, self._unsaved = epoch, batches, 0
        # Batches of earlier epochs to draw, and whether the first epoch of this `fit`
        # was interrupted
        self._earlier, self._is_resumed = 0, False
        # Metrics in the backup, and the logs of skipped batches
        self._metrics, self._logs = None, {}
        # States of random generators: at the start of the epoch, and in the backup
        self._generators, self._saved_generators = {}, None

    def on_train_begin(self, logs=None):
        model = self.model
        self._start()
        self._check_directory()
        missing = failed_processes(self.path.is_file())
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
        with open_backup(self.path) as backup:
            self._start(*backup.done)
            self._restore(backup)
            if num_processes() == 1:
                self._saved_generators = backup.generators
        if self.one_stream:
            self._earlier = self._epoch * self._steps()
        set_first_epoch(model, self._epoch)
        self._is_resumed = self._batches > 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        set_first_epoch(self.model, None)
        if self._saved_generators is not None:
            # They determine the order of data in this epoch.
            set_generator_states(self._saved_generators[0])
        self._generators = generator_states()
        if not self._is_resumed:
            self._batches = 0
        elif has_metrics(self.model):
            # Only now, because Keras resets metrics when an epoch begins.
            self._restore_metrics()
        self._is_resumed = False

    def on_train_batch_begin(self, batch, logs=None):
        if batch < self._batches:
            replace_next_step(self.model, self._skip)
        elif self._earlier:
            replace_next_step(self.model, self._skip_earlier)

    def on_train_batch_end(self, batch, logs=None):
        if batch < self._batches:
            if batch + 1 == self._batches and self._saved_generators is not None:
                # Skipped steps have drawn nothing. (The data have, so Python's and
                # NumPy's generators have advanced.)
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
        set_first_epoch(self.model, None)
        if self.delete and process_index() == 0:
            self.path.unlink(missing_ok=True)

    def _skip(self, model, iterator):
        """Return the logs of a step completed before the interruption."""
        self._skip_earlier(model, iterator)
        batch = _draw(iterator, model.steps_per_execution)
        if self._metrics is not None:
            make_metrics(model, batch)
            self._restore_metrics()
        return dict(self._logs)

    def _skip_earlier(self, model, iterator):
        """Draw the batches of earlier epochs, before the first step."""
        _draw(iterator, self._earlier)
        self._earlier = 0

    def _steps(self):
        if self.params["steps"] is None:
            raise ValueError(
                "The number of batches that an epoch draws from one stream is unknown. "
                "Received: one_stream=True, steps_per_epoch=None. Pass "
                "`steps_per_epoch` to `fit`, or leave `one_stream` out."
            )
        return self.params["steps"]

    def _check_directory(self):
        """Raise unless the directory is writable, and remove files of a killed run."""
        failure = None
        if process_index() == 0:
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
        if failed_processes(failure is None):
            raise ValueError(
                "No backup can be written. Pass a directory that does not exist yet or "
                "that this program may write to. Received: "
                f"directory='{self.path.parent}'"
                + (f" ({failure})." if failure else ", which process 0 cannot use.")
            ) from failure

    def _save(self, epoch, batches):
        self._unsaved = 0
        model, now = self.model, generator_states()
        # Between epochs the next one begins with the current states.
        generators = (self._generators if batches else now, now)

        def save(path):
            with h5py.File(path, "w") as file:
                write(file, (epoch, batches), model, generators)

        room = room_for(sum(variables_of(model).values(), start=[]))
        save_in_one_process(save, lambda: atomic_file(self.path, room))

    def _restore(self, backup):
        """Check a backup, and restore model and optimizer from it."""
        model = self.model
        if not model.built:
            raise ValueError(
                f"A model must be built before the backup in '{self.path}' can be "
                f"read into it. Received: the model {model.name!r} without variables. "
                "Call it on a batch before `fit`."
            )
        name = optimizer_name(model.optimizer)
        if backup.optimizer != name:
            raise ValueError(
                f"The backup in '{self.path}' is of another optimizer. Compile with "
                "that one, or remove the file to start from the beginning. Received: "
                f"{name}, for {backup.optimizer}."
            )
        variables = variables_of(model)
        self._check("model", variables["model"], backup.datasets["model"])
        self._check_frozen(variables["model"], backup.datasets["model"])
        self._check("optimizer", variables["optimizer"], backup.datasets["optimizer"])
        for kind in ("model", "optimizer"):
            for variable, dataset in zip(
                variables[kind], backup.datasets[kind], strict=True
            ):
                if is_sharded(variable):
                    assign_shards(variable, dataset)
                else:
                    variable.assign(read(dataset))
        # Between epochs metrics are reset.
        if self._batches:
            self._metrics = [
                (shape_and_dtype(dataset), dataset.attrs["path"], read(dataset))
                for dataset in backup.datasets["metrics"]
            ]

    def _check(self, kind, variables, datasets):
        expected = [shape_and_dtype(variable) for variable in variables]
        found = [shape_and_dtype(dataset) for dataset in datasets]
        if found == expected:
            return
        pairs = zip(expected, found, strict=False)
        first = next((f"{a}, for {b}" for a, b in pairs if a != b), "the same at first")
        raise ValueError(
            f"The backup in '{self.path}' is of another {kind}. Remove it to start "
            f"from the beginning. Received: {len(expected)} variables, for "
            f"{len(found)}, of which the first that differ are {first}."
        )

    def _check_frozen(self, variables, datasets):
        # The state of the optimizer would belong to other variables.
        for variable, dataset in zip(variables, datasets, strict=True):
            # Older files do not have it.
            was_trained = dataset.attrs.get("trainable", variable.trainable)
            if was_trained != variable.trainable:
                raise ValueError(
                    f"The backup in '{self.path}' is of a training in which other "
                    "parts of the model were frozen. Freeze the same ones before "
                    "`compile`, or remove it to start from the beginning. Received: "
                    f"trainable={variable.trainable} for {variable.path!r}."
                )

    def _restore_metrics(self):
        model, metrics = self.model, self._metrics
        variables = model.metrics_variables
        now = [(shape_and_dtype(variable), variable.path) for variable in variables]
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
    if not count or not hasattr(iterator, "__next__"):
        return None
    first = next(iterator)
    for _ in range(count - 1):
        # With `steps_per_execution` the last batches of an epoch may be fewer.
        next(iterator, None)
    return first
