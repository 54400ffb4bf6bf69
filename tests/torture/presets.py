"""Presets and `.keras` files that are damaged, or made to do harm.

Whatever is done to them, they load, with weights that are numbers, or are refused by
name. Nothing in them is executed, and no file outside is opened.
"""

import pathlib
import shutil
import tempfile
import warnings
import zipfile

import keras
import numpy as np

from keras_softmoe import models
from tests.models import tiny, tiny_limoe
from tests.references import to_numpy
from tests.torture.damage import (
    Canary,
    damage,
    damage_parts,
    flip_bits,
    overwrite,
    truncate,
)


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
