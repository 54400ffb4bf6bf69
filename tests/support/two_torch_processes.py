"""Program of one of several processes of PyTorch that share the experts of models.

Arguments: directory for the results, port of the first process, how many processes
there are, and which one this is.
"""

import contextlib
import json
import pathlib
import sys

import keras
import numpy as np
import torch

from keras_softmoe import distribution, models, training
from tests.support import tiny_distributed as tiny

# Three batches, and one whose rows the processes do not divide.
TRAINED, REST = 3 * tiny.BATCH, tiny.REST + 1


def classifier(kind="token choice", seed=3):
    """As `tiny.classifier`, without dropout: PyTorch draws it in each process."""
    keras.utils.set_random_seed(seed)
    model = models.ViTMoEImageClassifier(tiny.backbone(kind), tiny.NUM_CLASSES)
    model.compile(training.Adam(3e-3))
    return model


class Program:
    """The checks. Each public method returns what the tests are told under its name."""

    def __init__(self, results, count, index):
        self.results, self.count, self.index = results, count, index

    def run(self):
        checks = [n for n in vars(Program) if not n.startswith("_") and n != "run"]
        told = {name: getattr(self, name)() for name in checks}
        path = self.results / f"results_{self.index}_of_{self.count}.json"
        path.write_text(json.dumps(told), encoding="utf-8")

    def training(self):
        """Losses and predictions of each router, with a batch that is not divided."""
        told = {}
        for kind in tiny.ROUTERS:
            model, losses = classifier(kind), tiny.StepLosses()
            for rows in (TRAINED, REST):
                data = tiny.batches(rows)
                model.fit(data, verbose=0, shuffle=False, callbacks=[losses])
            told[kind] = {
                "losses": losses.values,
                "evaluated": model.evaluate(tiny.batches(REST), verbose=0),
                "predictions": model.predict(tiny.images(REST), verbose=0).tolist(),
            }
        return told

    def arrays(self):
        """Losses of arrays, and of the rows that are a process' own."""
        model, losses = classifier(), tiny.StepLosses()
        x, y = tiny.images(2 * tiny.BATCH), tiny.labels(2 * tiny.BATCH)
        known = {"verbose": 0, "shuffle": False, "callbacks": [losses]}
        model.fit(x, y, batch_size=tiny.BATCH, **known)
        active = keras.distribution.distribution()
        if active is not None:
            active.auto_shard_dataset = False
        own = tiny.BATCH // self.count
        mine = slice(self.index * own, (self.index + 1) * own)
        model.fit(x[: tiny.BATCH][mine], y[: tiny.BATCH][mine], batch_size=own, **known)
        if active is not None:
            active.auto_shard_dataset = True
        return losses.values

    def files(self):
        """What is read from a preset, and that training goes on from a backup."""
        data, rest = tiny.batches(TRAINED), tiny.batches(tiny.REST)
        folder = self.results / f"of_{self.count}"
        known = {"verbose": 0, "shuffle": False}
        expected = classifier().fit(data, epochs=2, **known).history["loss"]
        with contextlib.suppress(KeyboardInterrupt):
            classifier().fit(data, epochs=2, callbacks=self._backup(True), **known)
        model = classifier(seed=4)
        history = model.fit(data, epochs=2, callbacks=self._backup(False), **known)
        model.save_to_preset(str(folder / "preset"))
        loaded = models.ViTMoEImageClassifier.from_preset(str(folder / "preset"))
        given, found = (m.predict(rest, verbose=0) for m in (model, loaded))
        return {
            "expected": expected,
            "resumed": history.history["loss"],
            "loaded": float(np.abs(given - found).max()),
        }

    def _backup(self, is_interrupted):
        backup = distribution.Backup(
            self.results / f"backup_of_{self.count}", every=1, delete=False
        )
        return [backup, *([Interruption()] if is_interrupted else [])]

    def placement(self):
        """Shards of this process, and the errors of what is not supported."""
        if self.count == 1:
            return {}
        model = classifier()
        model.optimizer.build(model.trainable_variables)
        held = {
            row.path: [row.shape, row.shard_shape, row.is_expert]
            for row in distribution.audit(model).rows
        }
        attempts = {
            "mesh": lambda: distribution.expert_parallel((1, 2)),
            "devices": lambda: distribution.expert_parallel(devices=["cpu:0"]),
            "experts": lambda: tiny.routers.SoftRouter(3),
            "seeds": lambda: classifier(seed=self.index),
            "replicas": distribution.data_parallel,
            "generator": lambda: classifier().predict(x for x in [tiny.images(2)]),
            "own model": lambda: tiny.in_own_model().predict(tiny.images(2)),
        }
        errors = {}
        for name, attempt in attempts.items():
            try:
                attempt()
            except (NotImplementedError, ValueError) as error:
                errors[name] = str(error)
        return {"held": held, "errors": errors}

    def other_layers(self):
        """Outputs and gradients of experts of any layer, and of gated ones."""
        model = tiny.with_any_experts()
        x = np.random.default_rng(0).normal(size=(8, 4, 8)).astype("f4")
        losses = [model.train_on_batch(*self._share(x)) for _ in range(2)]
        return [float(loss) for loss in losses]

    def _share(self, x):
        own = len(x) // self.count
        mine = x[self.index * own : (self.index + 1) * own]
        return mine, 2 * mine


class Interruption(keras.callbacks.Callback):
    """Interrupts `fit` in its second epoch, as a user would."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations >= 5:
            raise KeyboardInterrupt


def main(results, port, count, index):
    torch.set_num_threads(1)
    count, index = int(count), int(index)
    if count > 1:
        try:
            distribution.expert_parallel()
        except ValueError as error:
            assert "keras.distribution.initialize" in str(error), error
        else:
            raise AssertionError("processes that have not found each other")
        keras.distribution.initialize(f"127.0.0.1:{port}", count, index)
        keras.distribution.set_distribution(distribution.expert_parallel())
    Program(pathlib.Path(results), count, index).run()
    if count > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
