"""How every experiment trains and measures a model, and keeps what is finished."""

import dataclasses
import gc
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np

import keras_softmoe as ksm
from benchmarks.accelerator import accelerator
from keras_softmoe.checks import quote
from keras_softmoe.files import atomic_file, wrap_os_errors

# What the file of a finished run holds.
RESULTS = ("results", "times")


@dataclasses.dataclass(frozen=True)
class Run:
    """A model to train and to measure.

    All that is random follows from the seed, so a run is the same whatever ran before
    it, and if it was interrupted.

    Attributes:
        name: str, names the files of the run.
        seed: int.
        build: callable that returns the compiled task to train, a model with
            `preprocess_samples`.
        draw: callable from the number of an epoch to an iterator over its batches,
            `(images, labels)` or `(images, captions)`; see `batches_of`.
        epochs: int. A backup is written after each of them.
        steps_per_epoch: int, batches that are taken of each iterator.
        measure: callable from the trained model to a dict that JSON can hold.
        watch: optional callable from the model after each epoch to a dict that JSON
            can hold. It must leave the model as it is.
        settings: optional dict that JSON can hold, what the run is trained with. What
            was trained with others under the same name is refused.
    """

    name: str
    seed: int
    build: Callable
    draw: Callable
    epochs: int
    steps_per_epoch: int
    measure: Callable
    watch: Callable | None = None
    settings: dict | None = None


def result_file(directory, name):
    """Path of the results of a run, which is there once the run is finished."""
    return Path(directory, "cells", f"{name}.json")


def backup_directory(directory, name):
    """Path of what an interrupted run goes on from."""
    return Path(directory, "backup", name)


def finish(run, directory, on_step=None, verbose=0):
    """Train and measure a model, unless that is done.

    The results are written to a file of their own. Called again after an interruption,
    training goes on after the last finished epoch, with the results that it would have
    had (on the same machine and backend: nothing is promised of the last digits
    elsewhere).

    Args:
        run: `Run`.
        directory: path, where results and backups are kept.
        on_step: optional callable without arguments, called after each step.
        verbose: as in `fit`.

    Returns:
        dict that can be written as JSON: `"results"`, what `run.measure` returned, and
        with `run.watch` `"curve"`, a list of the mean training loss and what it
        returned for each epoch; `"times"`: `"training_seconds"`, of all epochs (of
        computing, without an accelerator), and `"seconds"`, of the process that
        finished the run.

    Raises:
        ValueError: if the run, finished or not, was begun with other settings or with
            another backend.
    """
    file = result_file(directory, run.name)
    if run.settings is not None:
        _check_settings(run, directory)
    backup = backup_directory(directory, run.name)
    if not file.exists():
        started = time.perf_counter()
        keras.utils.set_random_seed(run.seed)
        model = run.build()
        diary = _train(run, model, backup, on_step, verbose)
        times = {"training_seconds": diary.seconds}
        results = run.measure(model)
        if run.watch:
            results["curve"] = diary.curve
        times["seconds"] = time.perf_counter() - started
        write_json(file, {"results": results, "times": times})
        # Models refer to themselves: they would pile up over hundreds of runs.
        del model
        gc.collect()
    # It may have been left by a process that was stopped when its file was written.
    shutil.rmtree(backup, ignore_errors=True)
    return read_json(file, RESULTS)


def keep(file, settings):
    """Keep settings in a file, or compare them with those that it keeps.

    Args:
        file: path of the JSON file, written if there is none.
        settings: dict that JSON can hold.

    Returns:
        `None` if they are equal, otherwise the sorted names of those that differ.
    """
    if not file.exists():
        write_json(file, settings)
    kept = read_json(file, ())
    # As a file would hold them, with lists for tuples.
    settings = json.loads(json.dumps(settings))
    if kept == settings:
        return None
    names = kept.keys() | settings.keys()
    return sorted(name for name in names if kept.get(name) != settings.get(name))


def router_config(router):
    """The configuration of a router for `Run.settings`, `None` if there is none."""
    # Keras counts up names that were not given.
    return router and {**router.get_config(), "name": None}


def batches_of(x, y, batch_size):
    """Iterator over batches of arrays. A last, smaller batch is left out."""
    starts = range(0, len(x) - batch_size + 1, batch_size)
    return ((x[i : i + batch_size], y[i : i + batch_size]) for i in starts)


def fit(model, data, epochs, callbacks=(), verbose=0):
    """Train a task on `EpochData`.

    KerasHub's tasks fit arrays and `tf.data` pipelines, which they prepare. Keras' own
    `fit` takes data that are prepared.

    Args:
        model: compiled task.
        data: `EpochData`.
        epochs: int.
        callbacks: sequence of callbacks, called after the data of an epoch are drawn.
        verbose: as in `keras.Model.fit`.
    """
    keras.Model.fit(
        model,
        data,
        epochs=epochs,
        shuffle=False,
        verbose=verbose,
        callbacks=[data.callback(), *callbacks],
    )


class EpochData(keras.utils.PyDataset):
    """Batches that are others in each epoch: those that a function gives for it.

    Args:
        draw: callable from the number of an epoch to an iterator over its batches.
        length: int, batches that are taken of each iterator.
        prepare: callable from the parts of a batch to what the model is fed.
    """

    def __init__(self, draw, length, prepare):
        super().__init__()
        self.draw, self.length, self.prepare = draw, length, prepare
        self.batches = None

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.batches is None:
            # Keras looks at the form of a batch before the first epoch.
            self.start(0)
        return self.prepare(*next(self.batches))

    def start(self, epoch):
        """Take the batches of an epoch."""
        self.batches = self.draw(epoch)

    def callback(self):
        """What takes the right batches at the beginning of each epoch."""
        return keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self.start(epoch)
        )


def one_thread():
    """Compute in one thread, on PyTorch, where others cost more than they bring."""
    if keras.config.backend() == "torch":
        import torch

        torch.set_num_threads(1)


def dropped(model, images, batch_size, training=False):
    """The share of tokens that each block with a sparse router drops, a list."""
    blocks = {id(router): block for block, router in model.routers.items()}
    found = {}
    for start in range(0, len(images), batch_size):
        batch = model.preprocessor(images[start : start + batch_size])
        with ksm.routers.record(lambda router: blocks.get(id(router))) as decisions:
            model(keras.ops.convert_to_tensor(batch), training=training)
        for block, decision in decisions.items():
            if "dropped" in decision.summary:
                lost = keras.ops.convert_to_numpy(decision.summary["dropped"])
                found.setdefault(block, []).append(lost.mean())
    return [float(np.mean(shares)) for shares in found.values()]


def adamw(learning_rate, steps, warmup_steps, weight_decay, clip_norm=None):
    """AdamW whose learning rate rises from 0 and then falls to 0 along a cosine.

    Args:
        learning_rate: float, the peak.
        steps: int, steps of the whole training, warmup included.
        warmup_steps: int, steps over which the learning rate rises.
        weight_decay: float.
        clip_norm: float or `None`, largest norm of the gradient of all parameters.

    Returns:
        `keras.optimizers.AdamW`.
    """
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        decay_steps=max(steps - warmup_steps, 1),
        warmup_target=learning_rate,
        warmup_steps=warmup_steps,
    )
    return keras.optimizers.AdamW(
        schedule, weight_decay=weight_decay, global_clipnorm=clip_norm
    )


# === Files ===


def write_json(path, content):
    """Write a file of one line that is there whole or not at all.

    Args:
        path: path of the file. Its directory is made.
        content: what JSON can hold.
    """
    with atomic_file(path) as new, open(new, "w", encoding="utf-8") as file:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
        file.write(text + "\n")
        file.flush()
        # Or a machine that loses power may keep the name and lose the content.
        os.fsync(file.fileno())


def read_json(path, names=None):
    """What a file holds.

    Args:
        path: path.
        names: sequence of str, if it holds a dict: keys that it has to have.

    Raises:
        ValueError: if it is damaged.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if names is not None and not isinstance(found, dict):
            raise ValueError(f"it holds {quote(found)}")
        missing = [name for name in names or () if name not in found]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"'{path}' is damaged ({error}). Delete it: what it held is made again."
        ) from error
    return found


def check_before(directories, seeds, known):
    """Raise unless an experiment can be run to its end, before hours are spent on it.

    Args:
        directories: sequence of paths that it will write to. They are made.
        seeds: sequence of ints that it is to be run with.
        known: sequence of ints, the seeds that there are.

    Raises:
        ValueError: if there are no seeds, or unknown ones, or a directory cannot be
            written to.
    """
    if not seeds or not set(seeds) <= set(known):
        raise ValueError(
            f"There are the seeds {tuple(known)}. Name some of them, or change the "
            "scale with `dataclasses.replace`. Received: seeds="
            f"{quote(tuple(seeds))}."
        )
    for directory in directories:
        with wrap_os_errors(directory):
            Path(directory).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass


def processor():
    """What this machine computes with, a str."""
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    device = accelerator(keras.config.backend())
    return f"{device}, {cores}" if device else cores


# === Parts ===


def _check_settings(run, directory):
    settings = {**run.settings, "backend": keras.config.backend()}
    file = Path(directory, "settings", f"{run.name}.json")
    if differ := keep(file, settings):
        raise ValueError(
            "What is kept of a training goes on with the settings that it began with. "
            f"Received: '{run.name}', which differs in {differ} from '{file}'. Set "
            f"them back, or delete '{file}', '{result_file(directory, run.name)}' and "
            f"'{backup_directory(directory, run.name)}' to train it anew."
        )


def _train(run, model, backup, on_step, verbose):
    """Train to the end of the last epoch; returns the `_Diary` of all epochs."""
    data = EpochData(run.draw, run.steps_per_epoch, model.preprocess_samples)
    diary = _Diary(backup / "diary.json", run.watch)
    callbacks = [
        keras.callbacks.TerminateOnNaN(),
        diary,
        ksm.distribution.Backup(backup / "model", delete=False),
    ]
    if on_step:
        callbacks.append(
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: on_step()
            )
        )
    fit(model, data, run.epochs, callbacks, verbose)
    return diary


class _Diary(keras.callbacks.Callback):
    """What finished epochs took and brought, those before an interruption among them.

    Attributes:
        seconds: float, the time spent in all epochs: on a processor alone the time that
            it computed for this process, which other processes hardly change.
        curve: list of dicts, one for each epoch.
    """

    def __init__(self, file, watch):
        super().__init__()
        self.file, self.watch = file, watch
        kept = {"seconds": 0.0, "curve": []}
        if file.exists():
            kept = read_json(file, kept)
        self.seconds, self.curve = kept["seconds"], kept["curve"]
        has_device = accelerator(keras.config.backend()) is not None
        self.clock = time.perf_counter if has_device else time.process_time

    def on_epoch_begin(self, epoch, logs=None):
        self.started = self.clock()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds += self.clock() - self.started
        # A training that diverged is stopped after this epoch.
        if self.watch and math.isfinite(logs["loss"]):
            # An epoch that ended without a backup is there already.
            del self.curve[epoch:]
            self.curve.append({"loss": logs["loss"], **self.watch(self.model)})
        write_json(self.file, {"seconds": self.seconds, "curve": self.curve})
