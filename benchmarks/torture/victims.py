"""Programs that write files, and are killed while they do.

Arguments: what to do, the directory to do it in, and when to be killed: `event N`, when
Python is about to touch the directory for the N-th time; `time S`, after S seconds,
which may be in the middle of what HDF5 writes; or `never`. In that case the program
leaves the number of events and the seconds in the file `whole` beside the directory.
"""

import json
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np

from keras_softmoe import models, presets, routers
from keras_softmoe.distribution import Backup
from tests.support import releases, tiny
from tests.support.references import to_numpy

NAME = "vmoe_nano_patch4_8_shapes"
BATCHES, EPOCHS = 4, 2


def save(directory):
    """Save the second version of a preset over the first."""
    model = version(2)
    return lambda: model.save_to_preset(str(directory / "preset"))


def save_over(directory):
    """Save a preset where a checkpoint may just be converted to, or may be read."""
    model, preset = version(2), directory / "keras_softmoe" / NAME
    return lambda: [model.save_to_preset(str(preset)) for _ in range(5)]


def load(directory):
    """Load a preset that others convert and save, always all of one version."""
    _own_catalogue(directory)

    def run():
        for _ in range(5):
            model = models.ViTMoEImageClassifier.from_preset(NAME)
            check_one_version(model)

    return run


def check_one_version(model):
    """Raise if some weights are of the second version of a preset, and some are not."""
    is_second = [bool((to_numpy(w) == 2).all()) for w in model.weights]
    assert all(is_second) or not any(is_second), is_second


def released_model():
    """The model of the checkpoint of `add_release`."""
    router = routers.SoftmaxTokenChoiceRouter(4, num_selected_experts=2)
    return tiny.classifier(router=router)


def add_release(folder):
    """Add the preset of a checkpoint in a directory to the catalogue."""
    releases.add(NAME, released_model(), f"file://{folder}/bucket/vmoe_nano")


def _own_catalogue(directory):
    add_release(directory.parent)
    os.environ["KERAS_HOME"] = str(directory)


def convert(directory):
    """Convert a released checkpoint for the first time."""
    _own_catalogue(directory)
    prefix = directory.parent / "bucket" / "vmoe_nano"
    return lambda: presets.convert(NAME, prefix, verbose=0)


def backup(directory):
    """Train with a backup after every batch."""
    model = trained_model()

    def run():
        fit(model, Backup(directory / "backup", every=1))
        weights = {str(i): to_numpy(w) for i, w in enumerate(model.weights)}
        np.savez(directory.parent / "trained.npz", **weights)

    return run


def version(number):
    """A classifier all of whose weights are one number, which its name tells too."""
    model = tiny.classifier({"name": f"version_{number}"})
    for weight in model.weights:
        weight.assign(np.full(weight.shape, number, weight.dtype))
    return model


def trained_model():
    """A model that draws from all generators there are, the same each time."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dropout(0.2, seed=3),
            keras.layers.Dense(3),
        ]
    )
    jit = keras.backend.backend() == "jax"
    model.compile("adam", "mse", jit_compile=jit)
    return model


def fit(model, *callbacks, epochs=EPOCHS):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4 * BATCHES, 6)).astype("float32")
    settings = {"batch_size": 4, "shuffle": False, "verbose": 0}
    model.fit(x, x[:, :3], epochs=epochs, callbacks=list(callbacks), **settings)


def _kill_at_event(number, directory):
    count = 0

    def hear(event, arguments):
        nonlocal count
        if event.startswith("object.") or not any(
            isinstance(a, (str, bytes, os.PathLike)) and str(directory) in str(a)
            for a in arguments
        ):
            return
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    return lambda: count


RUNS = {
    "save": save,
    "convert": convert,
    "backup": backup,
    "save over": save_over,
    "load": load,
}


def main(what, directory, when, number=0):
    directory = pathlib.Path(directory)
    run = RUNS[what](directory)
    count = _kill_at_event(int(number) if when == "event" else 0, directory)
    if when == "time":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, float(number))
    start = time.monotonic()
    run()
    if when == "never":
        whole = {"events": count(), "seconds": time.monotonic() - start}
        (directory.parent / "whole").write_text(json.dumps(whole))


if __name__ == "__main__":
    main(*sys.argv[1:])
