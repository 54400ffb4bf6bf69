"""Program that trains and looks at tiny models on eight virtual devices of a CPU.

Run by the fixture `found`; the tests judge what it writes. Arguments: directory for the
results, directory to which XLA writes the text of compiled steps, and which of the
checks to make (all, if none is named).
"""

import json
import math
import pathlib
import re
import sys
import warnings
from typing import NamedTuple

import keras
import numpy as np

from keras_softmoe import distribution, models, training
from tests.support import tiny_distributed as tiny

PLACEMENTS = {
    "one device": lambda: None,
    "data parallel": distribution.data_parallel,
    "one axis": distribution.expert_parallel,
    "2 x 4": lambda: distribution.expert_parallel((2, 4)),
}
# Compiling takes nearly all of the time, so each check has as few programs as it needs.
# Between replicas nothing but gradients is sent, whatever the router; `adapters` and
# `dense_part` train soft routers on two axes.
TRAINED = {"soft": ("one device", "one axis"), "token choice": tuple(PLACEMENTS)}
STEPS_PER_EPOCH, EPOCHS = 10, 2


_OPERATION = re.compile(
    r"= (?P<result>.*?) (?P<name>all-to-all|all-gather|all-reduce|reduce-scatter"
    r"|collective-permute|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
_SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
        name: str, for example `"all-to-all"`.
        shapes: list of tuple, of the tensors that come out of it.
        bytes: int, size of all that comes out of it on one device.
        source: str, the operation in the model that it stems from.
    """

    name: str
    shapes: list
    bytes: int
    source: str


def collectives(text):
    """The collective operations in the text of a compiled module, in order."""
    found = []
    for line in text.splitlines():
        match = _OPERATION.search(line)
        if match is None:
            continue
        source = re.search(r'op_name="([^"]*)"', line)
        results = _SHAPE.findall(match["result"])
        shapes = [tuple(map(int, filter(None, dims.split(",")))) for _, dims in results]
        sizes = [
            math.prod(shape) * _bytes(dtype)
            for (dtype, _), shape in zip(results, shapes, strict=True)
        ]
        name = source[1] if source else ""
        found.append(Collective(match["name"], shapes, sum(sizes), name))
    return found


def _bytes(dtype):
    return 1 if dtype == "pred" else int(_BITS.search(dtype)[0]) // 8


class Program:
    """The checks. Each public method returns what the tests are told under its name."""

    def __init__(self, results, compiled):
        self.results = pathlib.Path(results)
        self.compiled = pathlib.Path(compiled)
        self.texts_seen = set()

    def run(self, *names):
        told = {}
        checks = [n for n in vars(Program) if not n.startswith("_") and n != "run"]
        for name in names or checks:
            told[name] = getattr(self, name)()
            keras.distribution.set_distribution(None)
        path = self.results / "results.json"
        path.write_text(json.dumps(told), encoding="utf-8")

    def training(self):
        """Losses, predictions and collectives of each router on each placement."""
        return {
            kind: {name: self._train(kind, name) for name in names}
            for kind, names in TRAINED.items()
        }

    def _fit(self, model, steps, epochs=1):
        """Train a model; return the losses of the steps, and what a step sends."""
        losses, data = tiny.StepLosses(), tiny.batches(steps * tiny.BATCH)
        self._new_texts()
        model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=[losses])
        (text,) = self._new_texts()
        return {"losses": losses.values, "collectives": _sent(text)}

    def _train(self, kind, placement):
        keras.distribution.set_distribution(PLACEMENTS[placement]())
        model = tiny.classifier(kind)
        told = self._fit(model, STEPS_PER_EPOCH, EPOCHS)
        # Batches that the devices do not divide: the last one of four images here, ...
        images = tiny.images(tiny.BATCH + 4 * (kind == "soft"))
        predictions = model.predict(images, batch_size=tiny.BATCH, verbose=0)
        told["predictions"] = predictions.tolist()
        if kind in tiny.GROUPS:
            # ... and one whose groups they do not divide either.
            rest = tiny.batches(tiny.REST)
            history = model.fit(rest, verbose=0, shuffle=False).history
            told["rest"] = [*history["loss"], *model.evaluate(rest, verbose=0)]
        if placement == "one axis":
            told["moments"] = [
                [v.path, _shapes(v)]
                for v in model.optimizer.variables
                if "experts" in v.path or "router_mu" in v.path
            ]
            if kind == "soft":
                told["audit"] = str(distribution.audit(model))
        return told

    def compiled_steps(self):
        """Collectives of the other routers, and of several layers."""
        keras.distribution.set_distribution(distribution.expert_parallel())
        kinds = [kind for kind in tiny.ROUTERS if kind not in TRAINED]
        told = {kind: self._step(tiny.classifier(kind)) for kind in kinds}
        two = tiny.classifier("soft", num_layers=2, moe_layers=(0, 1))
        return told | {"two layers": self._step(two)}

    def states(self):
        """Bias and threshold after a few steps."""
        told = {}
        for kind, name in (("balanced", "bias"), ("race", "threshold")):
            for placement in ("one device", "2 x 4"):
                keras.distribution.set_distribution(PLACEMENTS[placement]())
                model = tiny.classifier(kind, group_images=2)
                model.fit(tiny.batches(4 * tiny.BATCH), verbose=0, shuffle=False)
                (router,) = model.backbone.routers.values()
                state = np.asarray(getattr(router, name))
                told.setdefault(kind, []).append(state.tolist())
            distribution.audit(model)
        return told

    def pairs(self):
        """Collectives of learning from images and captions."""
        keras.distribution.set_distribution(PLACEMENTS["2 x 4"]())
        model = models.LIMoEContrastive(tiny.limoe())
        captions = np.arange(3 * tiny.BATCH).reshape(-1, 3) % 10 + 1
        self._new_texts()
        model.fit(tiny.images(tiny.BATCH), captions, batch_size=tiny.BATCH, verbose=0)
        (text,) = self._new_texts()
        return _sent(text)

    def adafactor(self):
        """Losses with means of squares along two axes, and what one device holds."""
        told = {}
        for placement in ("one device", "one axis"):
            keras.distribution.set_distribution(PLACEMENTS[placement]())
            model = tiny.classifier("soft")
            model.compile(training.Adafactor(3e-3, min_dim_size_to_factor=16))
            told[placement] = self._fit(model, 3)["losses"]
        distribution.audit(model)
        told["shards"] = {
            v.path.partition("experts_")[2]: _shapes(v)
            for v in model.optimizer.variables
            if "experts" in v.path
        }
        return told

    def adapters(self):
        """LoRA of sharded experts: losses, what is sent, and what one device holds."""
        told = {}
        for placement in ("one device", "2 x 4"):
            keras.distribution.set_distribution(PLACEMENTS[placement]())
            model = tiny.classifier("soft")
            # Drawn one after the other, on any placement
            model.backbone.enable_lora(2)
            model.compile(training.Adam(3e-3))
            told[placement] = self._fit(model, 4)
            told[placement]["shards"] = self._expert_shards(model)
            images = tiny.images(tiny.BATCH)
            told[placement]["predictions"] = model.predict(images, verbose=0).tolist()
            models.merge_lora(model)
            model.compile(training.Adam(3e-3))
            told[placement]["merged"] = model.predict(images, verbose=0).tolist()
            with warnings.catch_warnings(action="ignore"):
                # Of the layers that it leaves as they are
                model.backbone.quantize("int8")
            told[placement]["int8"] = model.predict(images, verbose=0).tolist()
            told[placement]["shards of int8"] = self._expert_shards(model)
        return told

    def _expert_shards(self, model):
        if keras.distribution.distribution() is None:
            return None
        rows = distribution.audit(model).rows
        return {
            row.path.partition("experts/")[2]: row.shard_shape
            for row in rows
            if "experts/" in row.path
        }

    def _step(self, model):
        self._new_texts()
        model.train_on_batch(tiny.images(tiny.BATCH), tiny.labels(tiny.BATCH))
        (text,) = self._new_texts()
        return _sent(text)

    def dense_part(self):
        """Losses, collectives and shards where dense kernels are cut too."""
        told = {}
        placed = {
            "one device": None,
            "one axis": distribution.expert_parallel(shard_dense=True),
            "2 x 4": distribution.expert_parallel((2, 4), shard_dense=True),
        }
        for placement, chosen in placed.items():
            keras.distribution.set_distribution(chosen)
            model = tiny.classifier("soft", num_layers=2, moe_layers=(1,))
            told[placement] = self._fit(model, 3)
            if chosen is not None:
                rows = distribution.audit(model).rows
                told[placement]["shards"] = {row.path: row.shard_shape for row in rows}
        return told

    def expert_bytes(self):
        """Bytes of expert weights on the first device, by the number of devices."""
        told = {}
        for count in (1, 2, 4, 8):
            devices = keras.distribution.list_devices()[:count]
            placed = distribution.expert_parallel(devices=devices)
            with placed.scope():
                model = tiny.backbone()
                audit = distribution.audit(model)
            of_experts = [v for v in model.variables if "experts" in v.path]
            live = sum(v.value.addressable_shards[0].data.nbytes for v in of_experts)
            of_mu = model.get_layer("block_0").moe.router.mu.value
            live += of_mu.addressable_shards[0].data.nbytes
            of_experts = [row.bytes_per_device for row in audit.rows if row.is_expert]
            told[count] = [live, sum(of_experts)]
        return told

    def presets(self):
        """Whether what is saved on one placement is the same on the others."""
        preset = str(self.results / "preset")
        saved = self._on("one axis", lambda: self._saved(preset))
        told = {}
        for name in PLACEMENTS:
            model = self._on(name, lambda: models.ViTMoEBackbone.from_preset(preset))
            arrays = [np.asarray(v) for v in model.weights]
            told[name] = all(map(np.array_equal, arrays, saved))
        # In several files
        split = str(self.results / "split")
        model = self._on("2 x 4", lambda: models.ViTMoEBackbone.from_preset(preset))
        model.save_to_preset(split, max_shard_size=1.2e-5)
        files = sorted(path.name for path in pathlib.Path(split).glob("*.h5"))
        model = self._on("one axis", lambda: models.ViTMoEBackbone.from_preset(split))
        arrays = [np.asarray(v) for v in model.weights]
        told["several files"] = [len(files), all(map(np.array_equal, arrays, saved))]
        told["half precision"] = self._in_half_precision()
        return told

    def _saved(self, preset):
        model = tiny.backbone()
        model.save_to_preset(preset)
        return [np.asarray(v) for v in model.weights]

    def _in_half_precision(self):
        preset = str(self.results / "half")

        def made():
            model = tiny.backbone(dtype="bfloat16")
            model.save_to_preset(preset)
            again = models.ViTMoEBackbone.from_preset(preset, dtype="bfloat16")
            pairs = zip(model.weights, again.weights, strict=True)
            return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)

        return self._on("one axis", made)

    def _on(self, placement, make):
        keras.distribution.set_distribution(PLACEMENTS[placement]())
        return make()

    def own_model(self):
        """A user's model around the layer: shards of its expert variables."""
        with distribution.expert_parallel().scope():
            rows = distribution.audit(tiny.in_own_model()).rows
        return {row.path: row.shard_shape for row in rows if row.is_expert}

    def experts_of_any_layer(self):
        """Losses of two layers on each placement, and shards of their weights.

        One of templates, one of gated MLPs, both with a shared expert.
        """
        told = {}
        for placement in ("one device", "one axis", "2 x 4"):
            keras.distribution.set_distribution(PLACEMENTS[placement]())
            model = tiny.with_any_experts()
            x = tiny.images(16).reshape(16, -1, 8)[:, :4]
            history = model.fit(x, x, 16, epochs=3, shuffle=False, verbose=0)
            told[placement] = {"losses": history.history["loss"]}
            if placement != "one device":
                rows = distribution.audit(model).rows
                told[placement]["shards"] = {
                    row.path.rpartition("experts/")[2]: row.shard_shape
                    for row in rows
                    if row.is_expert and not row.path.startswith("sgd")
                }
        return told

    def built_by_data(self):
        """Losses of a model that its first batch builds, and shards of its experts."""
        told = {}
        for placement in ("one device", "one axis"):
            keras.distribution.set_distribution(PLACEMENTS[placement]())
            model = tiny.in_own_model(built=False)
            model.compile("sgd", "sparse_categorical_crossentropy")
            x = tiny.images(16).reshape(16, -1, 8)[:, :4]
            history = model.fit(x, tiny.labels(16), verbose=0, shuffle=False, epochs=2)
            told[placement] = history.history["loss"]
        rows = distribution.audit(model).rows
        told["shards"] = [row.shard_shape[0] for row in rows if "experts/" in row.path]
        return told

    def outside(self):
        """Warnings of a model that is used outside of its distribution."""
        with distribution.expert_parallel().scope():
            model = tiny.backbone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.predict(tiny.images(8), verbose=0)
        return [str(w.message) for w in caught if "active" in str(w.message)]

    def accepted(self):
        """What is raised by rules for outputs, and by layers with names like ours."""
        rules = {".*block_0/attention/output": ("batch", None, None)}
        with distribution.expert_parallel(layouts=rules).scope():
            model = tiny.classifier()
            told = {"output": _error(lambda: model.predict(tiny.images(8), verbose=0))}
        with distribution.expert_parallel().scope():
            layer = tiny.layers.MLP(20, name="experts_mlp")
            told["stranger"] = _error(lambda: layer(tiny.images(8)))
        return told

    def refused(self):
        """The messages of what must not be built, and what was made before."""
        told = {}
        made = []

        def count(variable, layout=distribution.parallel.ExpertParallel):
            made.append(variable.path)
            return layout.get_variable_layout(placed, variable)

        placed = distribution.expert_parallel()
        placed.get_variable_layout = count
        with placed.scope():
            told["indivisible"] = _error(lambda: tiny.backbone(router=_soft(12)))
            told["made before"] = [path for path in made if "seed" not in path]
        with distribution.expert_parallel((4, 2)).scope():
            told["divisible"] = _error(lambda: tiny.backbone(router=_soft(12)))
        own_rules = {
            "misspelt": {".*/expert/output_dense/kernel": ("batch", None, None)},
            "duplicate": {".*/experts/output_dense/kernel": ("batch", None, None)},
            "uncut": {_RULE: (None, None, None)},
        }
        for name, layouts in own_rules.items():
            with distribution.expert_parallel(layouts=layouts).scope():
                told[name] = _error(
                    lambda: tiny.backbone().predict(tiny.images(8), verbose=0)
                )
        with distribution.expert_parallel(layouts=own_rules["misspelt"]).scope():
            told["task"] = _error(tiny.classifier)
        # Built before the distribution is active
        model = tiny.backbone()
        with distribution.expert_parallel().scope():
            told["built outside"] = _error(lambda: distribution.audit(model))
        with distribution.expert_parallel(shard_dense=True).scope():
            told["narrow"] = _error(lambda: tiny.backbone(hidden_dim=12))
        return told

    def split_groups(self):
        """The warning where groups do not divide among devices."""
        with (
            distribution.expert_parallel().scope(),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            tiny.backbone(group_images=4).predict(tiny.images(16), verbose=0)
        return [str(w.message) for w in caught if "groups" in str(w.message)]

    def _new_texts(self):
        paths = sorted(self.compiled.glob("*train_step*after_optimizations.txt"))
        new = [path for path in paths if path not in self.texts_seen]
        self.texts_seen.update(paths)
        return [path.read_text(encoding="utf-8") for path in new]


_RULE = next(iter(distribution.layouts.EXPERT_RULES))


def _soft(num_experts):
    return tiny.routers.SoftRouter(num_experts)


def _sent(text):
    return [collective._asdict() for collective in collectives(text)]


def _shapes(variable):
    return [list(variable.shape), list(variable.value.addressable_shards[0].data.shape)]


def _error(make):
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    Program(*sys.argv[1:3]).run(*sys.argv[3:])
