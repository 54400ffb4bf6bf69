"""Long runs: trainings that are killed, memory that must not grow, threads."""

import contextlib
import ctypes
import gc
import os
import pathlib
import signal
import sys
import tempfile
import threading

import keras
import numpy as np

from benchmarks.torture.campaign import resident_megabytes
from keras_softmoe import models, routers
from keras_softmoe.distribution import Backup
from tests.support import tiny
from tests.support.close import assert_near, difference
from tests.support.processes import Program
from tests.support.references import to_numpy

STEPS_PER_EPOCH = 50


def killed_trainings(tally, cases, seed):
    killed_training(tally, 250 * cases, min(350, 130 * cases))


def killed_training(tally, steps, every):
    """Train with dropout, expert dropout and noise, killed every so many steps.

    What comes out is what the same training gives that nothing interrupts. It is
    repeated by other processes, so nothing of a process can have been left out.

    Args:
        tally: `Tally`.
        steps: int, a multiple of 50.
        every: int, steps between kills.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        whole, parts = folder / "whole.npz", folder / "parts.npz"
        with tally.case(f"{steps} steps without a kill", seconds=3000):
            assert _train(steps, 0, folder / "none", whole) == 0
        for kill_at in (*range(every, steps, every), 0):
            with tally.case(f"killed at step {kill_at}", seconds=3000):
                code = _train(steps, kill_at, folder / "backup", parts)
                assert code == (-signal.SIGKILL if kill_at else 0)
        with tally.case("equal to the one without a kill"):
            with np.load(whole) as expected, np.load(parts) as found:
                assert sorted(expected) == sorted(found)
                for name, value in expected.items():
                    # To the bit, but for what threads of TensorFlow add up.
                    tolerance = 0 if keras.backend.backend() != "tensorflow" else 1e-6
                    assert_near(found[name], value, rtol=tolerance, atol=tolerance)


def _train(steps, kill_at, directory, result):
    program = Program("benchmarks.torture.long_runs", steps, kill_at, directory, result)
    code, output = program.wait()
    assert code in (0, -signal.SIGKILL), output[-2000:]
    return code


def noisy_classifier():
    """A classifier that draws random numbers wherever one can."""
    keras.utils.set_random_seed(11)
    model = models.ViTMoEImageClassifier(
        models.ViTMoEBackbone(
            tiny.IMAGE_SHAPE,
            patch_size=4,
            num_layers=2,
            num_heads=2,
            hidden_dim=8,
            mlp_dim=12,
            moe_layers=(1,),
            router=routers.SoftmaxTokenChoiceRouter(
                4, num_selected_experts=2, noise_std=1.0, priority="random"
            ),
            group_images=2,
            dropout_rate=0.1,
            expert_dropout_rate=0.2,
        ),
        tiny.NUM_CLASSES,
        dropout=0.1,
        compile=False,
    )
    jit = keras.backend.backend() == "jax"
    model.compile(keras.optimizers.Adam(1e-3), metrics=[], jit_compile=jit)
    return model


class _Batches(keras.utils.PyDataset):
    """Images of an epoch, the same whenever it is begun."""

    def __len__(self):
        return STEPS_PER_EPOCH

    def __getitem__(self, index):
        return tiny.images(4, seed=index), tiny.labels(4)


class _Killer(keras.callbacks.Callback):
    """Kills this process after a step, counted from the beginning of the training."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_epoch_begin(self, epoch, logs=None):
        self.before = epoch * STEPS_PER_EPOCH

    def on_train_batch_end(self, batch, logs=None):
        if self.before + batch + 1 == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(steps, kill_at, directory, result):
    model = noisy_classifier()
    callbacks = [Backup(directory, every=40), _Killer(int(kill_at))]
    epochs = int(steps) // STEPS_PER_EPOCH
    model.fit(_Batches(), epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    np.savez(result, **{str(i): to_numpy(v) for i, v in enumerate(model.variables)})


# === Memory ===


def flat_memory(tally, repetitions, seed, megabytes=40):
    """Memory of the last third of many calls is that of the third before.

    Until then it may grow: what TensorFlow's heap takes for 1,000 loads levels off.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.classifier(router=tiny.SPARSE)
        model.save_to_preset(folder)
        x, y = tiny.pixels(4), tiny.labels(4)
        batch = tiny.images(4)
        calls = {
            "predict": lambda: model.predict(x, verbose=0),
            "train_on_batch": lambda: model.train_on_batch(batch, y),
            "from_preset": lambda: models.ViTMoEImageClassifier.from_preset(folder),
        }
        for name, call in calls.items():
            with tally.case(f"{repetitions} times {name}", seconds=3000):
                third = max(1, repetitions // 3)
                after = []
                for _ in range(3):
                    for _ in range(third):
                        call()
                    after.append(_resident())
                grown = after[2] - after[1]
                assert grown < megabytes, f"{grown:.0f} MB more"


def _resident():
    """What this process needs, in MB, once nobody uses a model any more.

    Models refer to themselves, and Keras keeps names. TensorFlow keeps the program that
    made each variable, some 35 kB, until the session is cleared. What is freed then,
    the C library keeps for later, unless it is told to give it back.
    """
    keras.backend.clear_session(free_memory=False)
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return resident_megabytes()


# === Threads ===


FACTORS = (0.5, 2.0)


def two_threads(tally, cases, seed):
    """Two models in two threads, each with settings of its own; then one in both."""
    pair = [tiny.classifier(router=tiny.SPARSE) for _ in FACTORS]
    for model in pair[1:]:
        model.set_weights(pair[0].get_weights())
    x, expected = tiny.pixels(6), {}
    for factor in FACTORS:
        pair[0].set_routing(capacity_factor=factor)
        expected[factor] = pair[0].predict(x, verbose=0)
    assert not np.allclose(*expected.values())

    def followed(model):
        """The capacity factors with which a model predicts what it does."""
        found = model.predict(x, verbose=0)
        return [f for f in FACTORS if difference(found, expected[f]) < 1e-4]

    def own(index):
        # As others would, back and forth
        for factor in (FACTORS[1 - index], FACTORS[index]):
            pair[index].set_routing(capacity_factor=factor)
            assert followed(pair[index]) == [factor]

    def shared(index):
        for factor in (FACTORS[1 - index], FACTORS[index]):
            pair[0].set_routing(capacity_factor=factor)
            # The other thread may have changed it.
            assert len(followed(pair[0])) == 1

    for number in range(-(-cases // 2)):
        with tally.case(f"two models in two threads, round {number}", seconds=600):
            _in_two_threads(own)
        with tally.case(f"one model in two threads, round {number}", seconds=600):
            _in_two_threads(shared)
            # No step is left that somebody else's settings are built into.
            for factor in (*FACTORS, FACTORS[0]):
                pair[0].set_routing(capacity_factor=factor)
                assert followed(pair[0]) == [factor]


def _in_two_threads(run):
    wrong = []

    def explain(index):
        try:
            run(index)
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}"[:300])

    threads = [threading.Thread(target=explain, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


if __name__ == "__main__":
    main(*sys.argv[1:])
