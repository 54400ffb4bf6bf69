"""Errors of presets that cannot be loaded; a failed save leaves the old one alone."""

import json
import os
import shutil

import keras
import numpy as np
import pytest

from keras_softmoe import models, routers
from keras_softmoe.catalogue import lookup
from keras_softmoe.models.loading import check_keys
from tests.support import tiny

pytestmark = tiny.LOADING_WRONG_WEIGHTS


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("presets") / "good"
    tiny.classifier().save_to_preset(str(path))
    return path


@pytest.fixture
def preset(good, tmp_path):
    """A preset directory to damage."""
    return shutil.copytree(good, tmp_path / "preset")


def load_backbone(path, **kwargs):
    return models.ViTMoEBackbone.from_preset(str(path), **kwargs)


def load_classifier(path, **kwargs):
    return models.ViTMoEImageClassifier.from_preset(str(path), **kwargs)


BOTH = pytest.mark.parametrize("load", [load_backbone, load_classifier])


def explanation(error):
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


@BOTH
def test_missing_configuration(preset, load):
    (preset / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json. Save one with `model.save"):
        load(preset)


@BOTH
@pytest.mark.parametrize("content", ["", '{"registered_name": "keras_soft', "[1, 2]"])
def test_damaged_configuration(preset, load, content):
    (preset / "config.json").write_text(content)
    with pytest.raises(ValueError, match="cannot be read|not one of keras_softmoe"):
        load(preset)


@BOTH
@pytest.mark.parametrize(
    "config",
    [
        # A model of KerasHub, one of the Transformers library
        {"registered_name": "keras_hub>ViTBackbone", "config": {}},
        {"model_type": "vit", "architectures": ["ViTModel"]},
    ],
)
def test_configuration_of_another_library(preset, load, config):
    (preset / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="not one of keras_softmoe.*made for"):
        load(preset)


@BOTH
def test_missing_weights(preset, load):
    (preset / "model.weights.h5").unlink()
    with pytest.raises(ValueError, match="no weights: expected.*model.weights.h5"):
        load(preset)
    assert load(preset, load_weights=False)


@pytest.mark.parametrize(
    "load, damage",
    [
        (load_backbone, "truncated"),
        (load_backbone, "empty"),
        (load_backbone, "random"),
        (load_classifier, "truncated"),
    ],
)
def test_damaged_weights(preset, load, damage):
    file = preset / "model.weights.h5"
    content = {
        "truncated": file.read_bytes()[:5000],
        "empty": b"",
        "random": np.random.default_rng(0).bytes(5000),
    }[damage]
    file.write_bytes(content)
    with pytest.raises(ValueError, match="(?s)preset.*be read.*damaged.*Restore"):
        load(preset)


@pytest.mark.parametrize("seed", range(12))
def test_flipped_bits(preset, seed):
    """They load (most are in a number) or are refused by name; nothing else."""
    file = preset / "model.weights.h5"
    content = bytearray(file.read_bytes())
    rng = np.random.default_rng(seed)
    # In what HDF5 keeps of itself, mostly at the beginning.
    place = rng.integers(len(content) if seed % 2 else 4000)
    content[place] ^= 1 << rng.integers(8)
    file.write_bytes(bytes(content))
    try:
        load_backbone(preset)
    except ValueError as error:
        assert str(preset) in "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_weights_that_are_no_numbers(preset):
    model = load_classifier(preset)
    kernel = model.backbone.get_layer("patch_embedding").trainable_variables[0]
    value = np.array(keras.ops.convert_to_numpy(kernel))
    value.flat[3] = np.nan
    kernel.assign(value)
    model.save_to_preset(str(preset))
    with pytest.raises(ValueError, match="not all finite.*patch_embedding.*Restore"):
        load_classifier(preset)


@pytest.mark.parametrize(
    "load, kind",
    [
        (load_backbone, "wider"),
        (load_backbone, "sparse"),
        (load_backbone, "dense"),
        (load_backbone, "foreign"),
        (load_classifier, "wider"),
    ],
)
def test_weights_of_another_model(preset, load, kind):
    other = {
        "wider": lambda: tiny.backbone(hidden_dim=16),
        "sparse": lambda: tiny.backbone(router=routers.SoftmaxExpertChoiceRouter(4)),
        "dense": lambda: tiny.backbone(**tiny.DENSE),
        "foreign": lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]),
    }[kind]()
    (preset / "model.weights.h5").unlink()
    other.save_weights(preset / "model.weights.h5")
    with pytest.raises(ValueError) as error:
        load(preset)
    message = explanation(error)
    assert "could not be loaded" in message
    assert f"while the preset in '{preset}' was read" in message


def test_missing_shard(tmp_path):
    path = tmp_path / "sharded"
    tiny.backbone().save_to_preset(str(path), max_shard_size=6e-6)
    next(path.glob("model_*.weights.h5")).unlink()
    with pytest.raises(ValueError, match="(?s)cannot be read.*weights.h5"):
        load_backbone(path)


def test_missing_head(preset):
    (preset / "task.weights.h5").unlink()
    with pytest.raises(
        ValueError, match="(?s)head: task.weights.h5 is missing.*Restore"
    ):
        load_classifier(preset)
    assert load_classifier(preset, num_classes=5).num_classes == 5
    (preset / "task.json").unlink()
    with pytest.raises(ValueError, match="(?s)without a head.*num_classes="):
        load_classifier(preset)


@pytest.mark.parametrize("file", ["task.weights.h5", "task.json"])
def test_truncated_head(preset, file):
    content = (preset / file).read_bytes()
    (preset / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="(?s)preset.*cannot be read.*truncated"):
        load_classifier(preset)
    assert load_backbone(preset)


def test_head_of_another_model(preset):
    other = models.ViTMoEImageClassifier(tiny.backbone(), 5)
    (preset / "task.weights.h5").unlink()
    other.save_task_weights(preset / "task.weights.h5")
    with pytest.raises(ValueError, match="could not be loaded|must match") as error:
        load_classifier(preset)
    assert f"while the preset in '{preset}' was read" in explanation(error)


@pytest.mark.parametrize(
    "cls", [models.ViTMoEImageClassifierPreprocessor, models.ViTMoEImageConverter]
)
def test_preprocessing(preset, cls):
    for file in ("preprocessor.json", "image_converter.json"):
        (preset / file).write_text('{"module": "ker')
    with pytest.raises(ValueError, match="(?s)preset.*cannot be read.*truncated"):
        cls.from_preset(str(preset))


@pytest.mark.parametrize(
    "file, place, key, meant",
    [
        ("config.json", ["config"], "num_layer", "num_layers"),
        ("config.json", ["config", "router", "config"], "num_expert", "num_experts"),
        ("config.json", ["config", "router"], "regitered_name", "registered_name"),
        ("task.json", ["config"], "num_class", "num_classes"),
        ("task.json", ["config", "backbone", "config"], "patchsize", "patch_size"),
        ("task.json", ["config", "preprocessor"], "modul", "module"),
        ("preprocessor.json", [], "image_convertr", None),
        ("preprocessor.json", ["config"], "image_convertr", "image_converter"),
        ("preprocessor.json", ["config", "image_converter"], "confg", "config"),
        ("image_converter.json", [], "interpolation", None),
        ("image_converter.json", ["config"], "interpolatoin", "interpolation"),
    ],
)
def test_keys_that_nothing_reads(preset, file, place, key, meant):
    """Keras passes over some of them, and KerasHub over whole files."""
    content = json.loads((preset / file).read_text())
    part = content
    for name in place:
        part = part[name]
    part[key] = "bicubic"
    (preset / file).write_text(json.dumps(content))
    hint = f"Did you mean `{meant}`. Accepted: .*" if meant else "Accepted: .*"
    for load in (
        load_backbone,
        load_classifier,
        models.ViTMoEImageClassifierPreprocessor.from_preset,
        models.ViTMoEImageConverter.from_preset,
    ):
        with pytest.raises(ValueError, match=f"'{file}' has a key that .*{hint}") as e:
            load(str(preset))
        assert f"Received: {key!r}." in str(e.value)
        assert f"while the preset in '{preset}' was read" in explanation(e)
    # What else is in a directory belongs to the user.
    (preset / file).write_text(json.dumps({**content, "config": {}})[:40])
    (preset / "notes.json").write_text('{"class_name": "a", "config": {}, "b": 1}')
    check_keys(preset)


def test_wrong_override(preset):
    with pytest.raises(ValueError, match="divide height and width") as error:
        load_backbone(preset, image_shape=(9, 8, 3))
    assert f"while the preset in '{preset}' was read" in explanation(error)
    for load in (load_backbone, load_classifier):
        with pytest.raises(TypeError, match="num_blocks"):
            load(preset, num_blocks=3)


def edit(file, **changes):
    """Change arguments of the backbone in a file of a preset."""
    saved = json.loads(file.read_text())
    config = saved["config"]
    config.get("backbone", {"config": config})["config"].update(changes)
    file.write_text(json.dumps(saved))


@pytest.mark.parametrize("file", ["config.json", "task.json", "preprocessor.json"])
def test_files_of_text_without_end(preset, file):
    with open(preset / file, "a") as long:
        long.truncate(1 << 30)
    with pytest.raises(ValueError, match=f"'{file}' has 1,073,741,824 bytes"):
        load_classifier(preset)
    (preset / file).unlink()
    os.mkfifo(preset / file)
    with pytest.raises(ValueError, match=f"'{file}' is no file|has no config.json"):
        load_classifier(preset)


@BOTH
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_layers": 10**5}, "num_layers=100000"),
        ({"mlp_dim": 10**9}, "mlp_dim=1000000000"),
        # What each of them may be, but not all together
        ({"mlp_dim": 2**20, "hidden_dim": 2**16}, "too many for its files"),
        ({"moe_layers": list(range(10**5))}, r"moe_layers=\[0, 1, 2, .*\.\.\.\]"),
        ({"image_shape": [4096, 4096, 3]}, "65,536 patches"),
    ],
)
def test_configurations_that_no_machine_holds(preset, load, changes, message):
    for file in ("config.json", "task.json"):
        edit(preset / file, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(preset)
    assert len(explanation(error)) < 3000
    assert str(preset) in explanation(error)


@BOTH
def test_fewer_blocks_than_the_weights_have(preset, load):
    dense = {"num_layers": 1, "moe_layers": (), "router": None}
    with pytest.raises(ValueError, match="a model with more blocks.*num_layers=1"):
        load(preset, **dense)
    assert load(preset, load_weights=False, **dense)
    for file in ("config.json", "task.json"):
        edit(preset / file, **dense)
    with pytest.raises(ValueError, match="a model with more blocks"):
        load(preset)


@pytest.mark.parametrize("preset", [None, 3, b"name", ["name"]], ids=repr)
def test_what_is_no_name(preset):
    for cls in (models.ViTMoEBackbone, models.ViTMoEImageConverter):
        with pytest.raises(ValueError, match="`preset` must be a name.*preset="):
            cls.from_preset(preset)


@BOTH
def test_unknown_name(load, monkeypatch, good):
    monkeypatch.setattr(lookup, "ROOT", good.parent)
    with pytest.raises(ValueError, match="Unknown preset 'goof'.*'good'.*names"):
        load("goof")
    # A name does not lead out of the catalogue.
    with pytest.raises(ValueError, match=r"Unknown preset '\.\./presets/good'"):
        load("../presets/good")


@BOTH
def test_architecture_without_weights(load, preset, monkeypatch):
    monkeypatch.setattr(lookup, "ROOT", preset.parent)
    (preset / "model.weights.h5").unlink()
    (preset / "metadata.json").write_text('{"kind": "architecture"}')
    with pytest.raises(ValueError, match="never released.*load_weights=False"):
        load("preset")
    assert load("preset", load_weights=False)


def contents(directory):
    return {
        path.relative_to(directory): path.is_file() and path.read_bytes()
        for path in directory.rglob("*")
    }


@pytest.mark.parametrize("step", ["save_weights", "save_task_weights", "preprocessor"])
def test_failed_save(preset, monkeypatch, step):
    before = contents(preset.parent)
    model = tiny.classifier(num_layers=3)

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    if step == "preprocessor":
        monkeypatch.setattr(type(model.preprocessor), "save_to_preset", fail)
    else:
        owner = type(model.backbone) if step == "save_weights" else type(model)
        monkeypatch.setattr(owner, step, fail)
    with pytest.raises(OSError, match="No space left"):
        model.save_to_preset(str(preset))
    assert contents(preset.parent) == before
    with pytest.raises(OSError, match="No space left"):
        model.save_to_preset(str(preset.parent / "new"))
    assert contents(preset.parent) == before
    monkeypatch.undo()
    model.save_to_preset(str(preset))
    assert load_classifier(preset).backbone.num_layers == 3
