"""Program of one of several processes that train one model together.

Arguments: directory for the results, port of the first process, how many processes
there are, which one this is, and the step after which it kills itself (0: never).
"""

import json
import os
import pathlib
import signal
import sys
import time

import jax
import keras

from keras_softmoe import distribution
from tests.support import tiny_distributed as tiny

# Batches of 16 images and one of 12, which processes divide and devices do not.
TRAINING = 3 * tiny.BATCH + tiny.REST
EPOCHS = 3
# The last batch has 13 images, which the processes do not divide either.
PREDICTED = tiny.BATCH + 13


class Killer(keras.callbacks.Callback):
    """Kills all processes after a number of steps, as lost machines would.

    None before the others have done the step too: a process that waits for the sums of
    a dead one never ends its step.
    """

    def __init__(self, results, steps):
        super().__init__()
        self.results, self.steps = results, steps

    def on_train_batch_end(self, batch, logs=None):
        self.steps -= 1
        if self.steps == 0:
            (self.results / f"arrived_{jax.process_index()}").touch()
            while len(list(self.results.glob("arrived_*"))) < jax.process_count():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def train(results, kill_after=0, report=print):
    """Train, keeping a backup, and save.

    Args:
        results: `pathlib.Path`, the directory to save to.
        kill_after: int, the step after which to end without a word, 0 for never.
        report: callable that is given the losses of each step, as JSON.

    Returns:
        dict with the losses of the steps, of the epochs, and what `evaluate` and
        `predict` say.
    """
    model = tiny.classifier("token choice")
    model.save_to_preset(str(results / "untrained"))
    losses = tiny.StepLosses()
    history = model.fit(
        tiny.batches(TRAINING),
        epochs=EPOCHS,
        verbose=0,
        shuffle=False,
        callbacks=[
            losses,
            Reporter(losses, report),
            distribution.Backup(results / "backup", every=2, delete=False),
            Killer(results, kill_after),
        ],
    )
    model.save_to_preset(str(results / "trained"))
    return {
        "steps": losses.values,
        "epochs": history.history["loss"],
        # Of the last batch alone: each size of a batch is a program to compile.
        "evaluated": model.evaluate(tiny.batches(PREDICTED).skip(1), verbose=0),
        "predictions": model.predict(tiny.batches(PREDICTED), verbose=0).tolist(),
    }


class Reporter(keras.callbacks.Callback):
    """Tells the losses after each step, because there may be no end."""

    def __init__(self, losses, report):
        super().__init__()
        self.losses, self.report = losses, report

    def on_train_batch_end(self, batch, logs=None):
        self.report(json.dumps(self.losses.values))


def main(results, port, count, index, kill_after):
    if int(count) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        keras.distribution.initialize(f"127.0.0.1:{port}", int(count), int(index))
    results = pathlib.Path(results)
    keras.distribution.set_distribution(distribution.expert_parallel())
    steps = results / f"steps_{index}_killed_after_{kill_after}.json"
    told = train(results, int(kill_after), steps.write_text)
    path = results / f"results_{index}.json"
    path.write_text(json.dumps(told), encoding="utf-8")
    if int(count) > 1:
        # The processes wait for each other. A forked one would not do so by itself.
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
