"""Training that is interrupted at any point and goes on from there."""

import contextlib
import numbers
import shutil
import tempfile
import warnings
from pathlib import Path

import h5py
import keras

from keras_softmoe.converters.spread import (
    agree,
    assign_pieces,
    is_spread,
    num_processes,
    process_index,
    save_by_one,
)
from keras_softmoe.distribution.backup_file import (
    FILE,
    PREFIX,
    of_dataset,
    of_variable,
    opened,
    optimizer_name,
    read,
    replaced_file,
    variables_of,
    write,
)


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
        one_stream: bool, see above. Not on PyTorch, where Keras draws the batches
            itself.
        delete: bool, whether the backup is removed when training has ended.

    Raises:
        ValueError: if `every` is not a positive integer, or `one_stream` is asked for
            where it cannot be; when training starts, if the directory cannot be written
            to, the backup cannot be read, is of another model or optimizer (nothing is
            changed then), or some processes cannot see it.

    Other callbacks keep nothing: one that waits for an improvement counts anew. They
    are called for batches that are passed over as well, with the metrics as they were
    when the backup was made. Metrics may be others than before: they start anew within
    the epoch, with a warning.

    Example:

    >>> backup = ksm.distribution.Backup("runs/1/backup", every=500)
    >>> model.fit(dataset, epochs=30, callbacks=[backup])
    """

    def __init__(self, directory, every=None, one_stream=False, delete=True):
        super().__init__()
        is_count = isinstance(every, numbers.Integral) and not isinstance(every, bool)
        if every is not None and (not is_count or every < 1):
            raise ValueError(
                "`every` is a positive integer, the number of batches between backups, "
                f"or `None` for the end of each epoch. Received: every={every!r}."
            )
        if one_stream and keras.backend.backend() == "torch":
            raise ValueError(
                "On PyTorch a callback cannot draw batches from the data, so what "
                "earlier epochs took from one stream cannot be passed over. Received: "
                f"one_stream={one_stream!r}. Leave `steps_per_epoch` out, so that each "
                "epoch begins the data again, and with it `one_stream`."
            )
        self.path = Path(directory, FILE)
        self.every = every
        self.one_stream = one_stream
        self.delete = delete
        self._start()

    def _start(self, epoch=0, batches=0):
        self._epoch, self._batches, self._unsaved = epoch, batches, 0
        # Batches of earlier epochs that are to be drawn, and whether this one was begun
        self._earlier, self._is_resumed = 0, False
        self._metrics, self._logs = None, {}

    def on_train_begin(self, logs=None):
        model = self.model
        self._start()
        self._check_directory()
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
        with opened(self.path) as kept:
            self._start(*kept.done)
            self._restore(kept)
        if self.one_stream:
            self._earlier = self._epoch * self._steps()
        # As Keras' own `BackupAndRestore` does it: `fit` looks here after this.
        model._initial_epoch = _FirstEpoch(self._epoch, model)
        self._is_resumed = self._batches > 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._forget_first_epoch()
        if not self._is_resumed:
            self._batches = 0
        elif _has_metrics(self.model):
            # Only now, because Keras resets them when an epoch begins.
            self._take_up_metrics()
        self._is_resumed = False

    def on_train_batch_begin(self, batch, logs=None):
        if batch < self._batches or self._earlier:
            self.model.train_function = _PassOver(self, batch < self._batches)

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
        self._forget_first_epoch()
        if self.delete and process_index() == 0:
            self.path.unlink(missing_ok=True)

    def _forget_first_epoch(self):
        # It would hold for the next `fit` as well.
        if isinstance(self.model._initial_epoch, _FirstEpoch):
            self.model._initial_epoch = None

    def _steps(self):
        if self.params["steps"] is None:
            raise ValueError(
                "How many batches an epoch draws from one stream has to be known. "
                "Received: one_stream=True, steps_per_epoch=None. Pass "
                "`steps_per_epoch` to `fit`, or leave `one_stream` out."
            )
        return self.params["steps"]

    def _check_directory(self):
        """Refuse one that cannot be written to, and clear away what was left in it."""
        failure = None
        if process_index() == 0:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                for left in self.path.parent.glob(f"{PREFIX}*"):
                    shutil.rmtree(left)
                if self.path.is_dir():
                    raise IsADirectoryError(f"'{self.path}' is a directory")
                with tempfile.TemporaryDirectory(
                    dir=self.path.parent, prefix=PREFIX
                ) as directory:
                    Path(directory, FILE).touch()
            except OSError as error:
                failure = error
        if agree(failure is None):
            raise ValueError(
                "No backup can be written. Pass a directory that does not exist yet or "
                "that this program may write to. Received: "
                f"directory='{self.path.parent}'"
                + (f" ({failure})." if failure else ", which process 0 cannot use.")
            ) from failure

    def _save(self, epoch, batches):
        self._unsaved = 0
        model = self.model

        def save(directory):
            with h5py.File(Path(directory, FILE), "w") as file:
                write(file, (epoch, batches), model)

        save_by_one(save, lambda: replaced_file(self.path))

    def _restore(self, kept):
        """All that is checked comes before all that is changed."""
        model = self.model
        if not model.built:
            raise ValueError(
                f"A model has to be built before the backup in '{self.path}' can be "
                f"read into it. Received: the model {model.name!r} without variables. "
                "Call it on a batch before `fit`."
            )
        name = optimizer_name(model.optimizer)
        if kept.optimizer != name:
            raise ValueError(
                f"The backup in '{self.path}' is of another optimizer. Compile with "
                "that one, or remove the file to start from the beginning. Received: "
                f"{name}, for {kept.optimizer}."
            )
        variables = variables_of(model)
        for kind in ("model", "optimizer"):
            self._check(kind, variables[kind], kept.datasets[kind])
        for kind in ("model", "optimizer"):
            for variable, dataset in zip(
                variables[kind], kept.datasets[kind], strict=True
            ):
                if is_spread(variable):
                    assign_pieces(variable, dataset)
                else:
                    variable.assign(read(dataset))
        # At the end of an epoch they have said what they had to say.
        if self._batches:
            self._metrics = [
                (of_dataset(dataset), dataset.attrs["path"], read(dataset))
                for dataset in kept.datasets["metrics"]
            ]

    def _check(self, kind, variables, datasets):
        expected = [of_variable(variable) for variable in variables]
        found = [of_dataset(dataset) for dataset in datasets]
        if found == expected:
            return
        pairs = zip(expected, found, strict=False)
        first = next((f"{a}, for {b}" for a, b in pairs if a != b), "the same at first")
        raise ValueError(
            f"The backup in '{self.path}' is of another {kind}. Remove it to start "
            f"from the beginning. Received: {len(expected)} variables, for "
            f"{len(found)}, of which the first that differ are {first}."
        )

    def _take_up_metrics(self):
        model, metrics = self.model, self._metrics
        variables = model.metrics_variables
        now = [(of_variable(variable), variable.path) for variable in variables]
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


class _FirstEpoch(int):
    """The epoch to begin with: true in the `fit` that it was found for, and no other.

    `fit` tells nobody when it is interrupted, so it has to be harmless to the next one.
    """

    def __new__(cls, epoch, model):
        self = super().__new__(cls, epoch)
        self._model, self._fit = model, model.history
        return self

    def __bool__(self):
        return int(self) > 0 and self._model.history is self._fit


class _PassOver:
    """Takes the place of a train function for one step.

    Args:
        backup: `Backup`, of a model that trains.
        skips: bool, whether the step is passed over. Otherwise it is done after the
            batches of earlier epochs are drawn.
    """

    def __init__(self, backup, skips):
        train = backup.model.train_function
        # One may have been left by an interruption just before its step.
        self.train = train.train if isinstance(train, _PassOver) else train
        self.backup, self.skips = backup, skips
        self.model, self.fit = backup.model, backup.model.history

    def __call__(self, *arguments):
        model, backup = self.model, self.backup
        # First of all, whatever happens next
        model.train_function = self.train
        if model.history is not self.fit:
            return self.train(*arguments)
        iterator = arguments[-1]
        _draw(iterator, backup._earlier)
        backup._earlier = 0
        if not self.skips:
            return self.train(*arguments)
        batch = _draw(iterator, model.steps_per_execution)
        if backup._metrics is not None:
            # TensorFlow makes metrics when it trains. What cannot be traced has others.
            with contextlib.suppress(RuntimeError, ValueError):
                model._symbolic_build(data_batch=batch)
            backup._take_up_metrics()
        logs = dict(backup._logs)
        # On JAX a step takes and gives back the state of the model.
        return (logs, arguments[0]) if len(arguments) > 1 else logs


def _has_metrics(model):
    compiled = model._compile_metrics
    return compiled is None or compiled.built


def _draw(iterator, count):
    """Draw batches, and return the first of them."""
    # PyTorch is handed the batch itself.
    if not count or not hasattr(iterator, "__next__"):
        return None
    first = next(iterator)
    for _ in range(count - 1):
        # Several steps in one may find fewer batches at the end of an epoch.
        next(iterator, None)
    return first
