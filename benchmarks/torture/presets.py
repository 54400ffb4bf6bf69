"""Presets and `.keras` files that are damaged, or made to do harm.

Whatever is done to them, they load, with weights that are numbers, or are refused by
name. Nothing in them is executed, and no file outside is opened.
"""

import json
import pathlib
import shutil
import tempfile
import warnings
import zipfile

import keras
import numpy as np

from benchmarks.torture.damage import (
    HOSTILE,
    Canary,
    damage,
    damage_parts,
    edit_json,
    flip_bits,
    overwrite,
    places,
    truncate,
)
from keras_softmoe import models, ops, routers
from keras_softmoe.checks import quote
from tests.support import tiny, tiny_limoe
from tests.support.references import to_numpy


def damaged_presets(tally, num_presets, seed):
    """Load damaged presets: classifiers, their backbones, sharded weights, LIMoEs."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        canary = Canary(folder)
        good = {
            "classifier": (models.ViTMoEImageClassifier, tiny.classifier(), 10),
            "backbone": (models.ViTMoEBackbone, tiny.classifier(), 10),
            "sharded": (models.ViTMoEBackbone, tiny.backbone(), 6e-6),
            "pairs": (models.LIMoEContrastive, tiny_limoe.task(), 10),
        }
        for name, (_, model, size) in good.items():
            model.save_to_preset(str(folder / "good" / name), max_shard_size=size)
        kinds = ["classifier"] * 3 + ["backbone", "sharded", "pairs"]
        for number in range(num_presets):
            rng = np.random.default_rng((seed, number))
            kind = kinds[number % len(kinds)]
            # A name that is in no message by chance
            preset = folder / f"preset_{number}"
            shutil.copytree(folder / "good" / kind, preset)
            what = f"{kind}, seed {seed}, number {number}"
            what += f": {damage(preset, rng, canary)}"
            with tally.case(what, mentions=[preset.name]), canary, _no_warnings():
                _check_loaded(good[kind][0].from_preset(str(preset)))
            shutil.rmtree(preset)


def _check_loaded(model):
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            assert np.isfinite(to_numpy(weight)).all(), weight.path


# One of each kind, and of each with most that it may have.
ROUTERS = {
    "soft": tiny.SOFT,
    "identity": routers.IdentityRouter(5),
    "token": routers.SoftmaxTokenChoiceRouter(
        4,
        losses=(
            routers.RoutingLoss(ops.importance_loss, weight=0.1),
            routers.RoutingLoss(ops.load_loss),
            routers.RoutingLoss(ops.z_loss),
        ),
    ),
    "sinkhorn": routers.SinkhornTokenChoiceRouter(4, combine="plan"),
    "expert": routers.SoftmaxExpertChoiceRouter(4),
    "sinkhorn_expert": routers.SinkhornExpertChoiceRouter(4),
    "transport": routers.SparseTransportExpertChoiceRouter(4, num_iterations=3),
    "limoe": None,
}
_SETTINGS = [2, 4, 1e-9, 1e9, "soft", "ceil", "max", "entmax", [4], [None] * 3]


def damaged_routers(tally, num_presets, seed):
    """Load presets with something else somewhere in the configuration of a router.

    The same in `config.json` and in `task.json`. What loads predicts numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        canary, changes = Canary(folder), []
        for name, router in ROUTERS.items():
            model = tiny_limoe.task()
            if router is not None:
                model = tiny.classifier(router=router)
            model.save_to_preset(str(folder / name))
            saved = _router_of(json.loads((folder / name / "config.json").read_text()))
            values = [*HOSTILE, *canary.values(), *_SETTINGS]
            changes += [
                (name, place, value)
                for place in range(len(list(places(saved))))
                for value in values
            ]
        order = np.random.default_rng(seed).permutation(len(changes))
        for number, chosen in enumerate(order[:num_presets]):
            name, place, value = changes[chosen]
            preset = folder / f"preset_{number}"
            shutil.copytree(folder / name, preset)
            for file in (preset / "config.json", preset / "task.json"):
                saved = json.loads(file.read_text())
                parent, key = list(places(_router_of(saved)))[place]
                parent[key] = value
                file.write_text(json.dumps(saved))
            what = f"{name}: {key}={quote(value)}"
            with tally.case(what, mentions=[preset.name], seconds=60), _no_warnings():
                with canary:
                    model = _class_of(name).from_preset(str(preset))
                _check_loaded(model)
                if name != "limoe":
                    found = model.predict(tiny.pixels(2), verbose=0)
                    assert np.isfinite(found).all()
            shutil.rmtree(preset)


def _class_of(name):
    return models.LIMoEContrastive if name == "limoe" else models.ViTMoEImageClassifier


def _router_of(saved):
    """The configuration of the router in that of a backbone or a task."""
    return saved["config"].get("backbone", saved)["config"]["router"]


def damaged_preprocessors(tally, num_presets, seed):
    """Load preprocessing alone, from presets whose files for it are damaged."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        canary = Canary(folder)
        kinds = {
            "classifier": (models.ViTMoEImageClassifierPreprocessor, tiny.classifier()),
            "limoe": (models.LIMoEPreprocessor, tiny_limoe.task()),
        }
        for name, (_, model) in kinds.items():
            model.save_to_preset(str(folder / name))
        for number in range(num_presets):
            rng = np.random.default_rng((seed, number, 2))
            name = list(kinds)[number % len(kinds)]
            preset = folder / f"preset_{number}"
            shutil.copytree(folder / name, preset)
            names = ("preprocessor", "image_converter", "tokenizer")
            files = [preset / f"{n}.json" for n in (*names[:1] * 3, *names)]
            files = [file for file in files if file.exists()]
            file = files[rng.integers(len(files))]
            what = f"{name}, number {number}: {file.name}"
            changes = (*[edit_json] * 12, flip_bits, truncate, overwrite)
            changes[rng.integers(len(changes))](file, rng, canary)
            with tally.case(what, mentions=[preset.name]), canary, _no_warnings():
                preprocessor = kinds[name][0].from_preset(str(preset))
                if name == "classifier":
                    found = to_numpy(preprocessor(tiny.pixels(2)))
                    assert found.dtype.kind == "f" and len(found) == 2
            shutil.rmtree(preset)


def damaged_keras_files(tally, num_files, seed):
    """Load damaged `.keras` files, by Keras' own function and with its own errors."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        canary = Canary(folder)
        tiny.classifier().save(folder / "good.keras")
        for number in range(num_files):
            rng = np.random.default_rng((seed, number, 1))
            file, parts = folder / f"file_{number}.keras", folder / f"parts_{number}"
            if rng.random() < 0.4:
                shutil.copyfile(folder / "good.keras", file)
                change = (flip_bits, truncate, overwrite)[rng.integers(3)]
                change(file, rng, canary)
                done = change.__name__
            else:
                with zipfile.ZipFile(folder / "good.keras") as archive:
                    archive.extractall(parts)
                done = damage_parts(parts, rng, canary)
                with zipfile.ZipFile(file, "w") as archive:
                    for part in sorted(p for p in parts.rglob("*") if p.is_file()):
                        archive.write(part, part.relative_to(parts))
                shutil.rmtree(parts)
            what = f"seed {seed}, number {number}: {done}"
            with tally.case(what, any_error=True), canary, _no_warnings():
                keras.saving.load_model(file)
            file.unlink()


def _no_warnings():
    """Scope without warnings: Keras warns of much that comes before an error."""
    return warnings.catch_warnings(action="ignore")
