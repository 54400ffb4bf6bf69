"""The entries of the catalogue, with temporary directories for the real ones.

Covers `catalogue/row.py`.
"""

import json

import keras
import pytest

from keras_softmoe import models, presets
from keras_softmoe.catalogue import lookup
from keras_softmoe.models import moe_blocks
from keras_softmoe.models.loading import WEIGHTS_FILES, open_preset

ARCHITECTURE = "vit_base_patch16_224"
METADATA = {
    "parameter_count": 1234,
    "kind": "trained",
    "description": "A tiny one.",
    "source": "train.py",
    "licence": "Apache-2.0",
}
OURS = {"registered_name": "keras_softmoe>ViTMoEBackbone", "config": {"num_layers": 2}}


def write(directory, config=OURS, weights=True, **metadata):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "metadata.json").write_text(json.dumps({**METADATA, **metadata}))
    if weights:
        (directory / "model.weights.h5").write_bytes(b"weights")
    return directory


@pytest.fixture
def catalogue(tmp_path, monkeypatch):
    root = tmp_path / "presets"
    root.mkdir()
    write(root / "soft_moe_tiny")
    write(root / "vit_tiny")
    # No presets: a script, a directory with something else
    (root / "train.py").write_text("")
    (root / "figures").mkdir()
    monkeypatch.setattr(lookup, "ROOT", root)
    return root


def test_names(catalogue):
    names = presets.names()
    assert names == sorted(["soft_moe_tiny", "vit_tiny", *lookup.rows()])
    assert len(names) == 137


def test_names_of_some_presets():
    every = presets.names()
    assert presets.names("soft_moe", weights=True) == [
        "soft_moe_micro_patch4_25e_20_letters",
        "soft_moe_tiny_patch8_16e_32_icons",
    ]
    of_kind = lookup.names_of_kind
    assert presets.names(weights=True) == sorted(
        of_kind("trained") + of_kind("convertible")
    )
    assert presets.names(weights=False) == of_kind("architecture")
    assert presets.names("", None, None) == every
    for size in (20, 32, 224, 384):
        found = presets.names(image_size=size)
        assert found == [n for n in every if str(size) in n.split("_")]
        assert presets.describe(found[0]).image_size == (size, size)
    assert presets.names("no such part") == []
    for arguments in ({"containing": 1}, {"weights": "yes"}, {"image_size": "224"}):
        with pytest.raises(ValueError, match=f"Received: {next(iter(arguments))}="):
            presets.names(**arguments)


def test_describe(catalogue):
    assert presets.describe("soft_moe_tiny") == presets.Preset(
        name="soft_moe_tiny",
        kind="trained",
        description="A tiny one.",
        source="train.py",
        licence="Apache-2.0",
        parameters=1234,
        path=catalogue / "soft_moe_tiny",
    )
    assert presets.describe(ARCHITECTURE) == presets.Preset(
        name=ARCHITECTURE,
        kind="architecture",
        description="ViT-B/16 of Soft MoE: 768 wide, 12 blocks, patch 16 at 224 x 224.",
        source="Soft MoE, sections 3.3 and 3.4, tables 9 and 10",
        licence="Apache-2.0",
        parameters=85_648_128,
        path=None,
        image_size=(224, 224),
    )


@pytest.mark.parametrize("content", ['{"kind": "tra', '{"kind": "trained"}'])
def test_describe_with_damaged_metadata(catalogue, content):
    (catalogue / "vit_tiny" / "metadata.json").write_text(content)
    with pytest.raises(ValueError, match="vit_tiny.*cannot be read"):
        presets.describe("vit_tiny")


def test_accuracy(catalogue):
    found = {"ImageNet": 0.8}
    write(catalogue / "measured", accuracy=found)
    write(catalogue / "silent")
    assert presets.describe("measured").accuracy == found
    assert presets.describe("silent").accuracy == {}


def test_real_catalogue():
    kinds = ("trained", "convertible", "architecture")
    names = [lookup.names_of_kind(kind) for kind in kinds]
    assert [len(of_kind) for of_kind in names] == [9, 11, 124]
    for name in presets.names():
        preset = presets.describe(name)
        assert all(0 < accuracy <= 1 for accuracy in preset.accuracy.values())
        assert preset.accuracy or preset.kind != "trained"
        assert preset.parameters > 0
        assert preset.description and preset.source and preset.licence
        assert (preset.path is None) == (preset.kind != "trained")
        if preset.path:
            assert any((preset.path / file).is_file() for file in WEIGHTS_FILES)


def opened(preset, load_weights=True):
    with open_preset(preset, load_weights) as directory:
        return directory


def test_open_preset(catalogue, tmp_path, monkeypatch):
    own = write(tmp_path / "vit_tiny")
    assert opened("vit_tiny") == str(catalogue / "vit_tiny")
    assert opened(own) == opened(str(own)) == str(own)
    # A directory that lies here goes before a name.
    monkeypatch.chdir(tmp_path)
    assert opened("vit_tiny") == "vit_tiny"
    assert presets.describe("vit_tiny").path == catalogue / "vit_tiny"


@pytest.mark.parametrize("handle", ["hf://me/model", "kaggle://me/model/keras/a"])
def test_handles_are_left_to_kerashub(handle):
    assert opened(handle) == handle
    with pytest.raises(ValueError, match="by name or from a directory"):
        lookup.read_config(handle)


@pytest.mark.parametrize("function", [opened, presets.describe, lookup.read_config])
def test_unknown_name(catalogue, function):
    with pytest.raises(ValueError) as error:
        function("soft_moe_tni")
    message = str(error.value)
    assert "Unknown preset 'soft_moe_tni'" in message
    # The nearest one first
    assert "Did you mean 'soft_moe_tiny'" in message
    assert "preset='soft_moe_tni'" in message


@pytest.mark.parametrize("name", ["../presets/vit_tiny", "vit_tiny/", "*", "train.py"])
@pytest.mark.parametrize("function", [opened, presets.describe])
def test_name_stays_in_the_catalogue(catalogue, name, function):
    with pytest.raises(ValueError, match="Unknown preset"):
        function(name)


def test_weights_that_were_never_released(catalogue, tmp_path):
    directory = presets.write(ARCHITECTURE, tmp_path / ARCHITECTURE)
    for preset in (ARCHITECTURE, directory):
        with pytest.raises(ValueError) as error:
            opened(preset)
        message = str(error.value)
        assert f"'{ARCHITECTURE}'" in message and "never released" in message
        assert "load_weights=False" in message
        assert "soft_moe_tiny, vit_tiny" in message


def test_weights_that_are_missing(catalogue):
    (catalogue / "vit_tiny" / "model.weights.h5").unlink()
    with pytest.raises(ValueError, match="has no weights.*model.weights.h5"):
        opened("vit_tiny")
    (catalogue / "vit_tiny" / "model.weights.json").write_text("{}")
    assert opened("vit_tiny")


def test_directory_that_is_no_preset(catalogue):
    for function in (opened, lookup.read_config):
        with pytest.raises(ValueError, match="not a preset: it has no config.json"):
            function(catalogue / "figures")


def test_preset_of_another_library(tmp_path):
    path = write(tmp_path / "bert", {"registered_name": "keras_hub>BertBackbone"})
    for function in (opened, lookup.read_config):
        with pytest.raises(ValueError, match="keras_hub>BertBackbone"):
            function(path)


def test_read_config(catalogue):
    assert lookup.read_config("vit_tiny") == (OURS["registered_name"], OURS["config"])
    name, config = lookup.read_config(ARCHITECTURE)
    assert name == OURS["registered_name"]
    assert config["image_shape"] == (224, 224, 3) and config["pooling"] == "gap"


def test_an_architecture_becomes_a_directory_on_demand(catalogue):
    with open_preset(ARCHITECTURE, load_weights=False) as directory:
        assert presets.describe(ARCHITECTURE).path is None
        name, config = lookup.read_config(directory)
        assert json.dumps(config) == json.dumps(lookup.read_config(ARCHITECTURE)[1])
        assert name == OURS["registered_name"]
    # It is gone again.
    with pytest.raises(ValueError, match="Unknown preset"):
        opened(directory, load_weights=False)
    # What goes wrong is told of the name, not of a directory that is gone.
    with pytest.raises(ValueError) as error:
        with open_preset(ARCHITECTURE, load_weights=False):
            raise ValueError("wrong")
    assert f"while the preset '{ARCHITECTURE}' was read" in error.value.__notes__[0]


@pytest.mark.parametrize("name", [ARCHITECTURE, "limoe_small_patch32_32e_224"])
def test_write(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.txt").write_text("kept")
    presets.write(name, tmp_path / name)
    files = {file.name for file in (tmp_path / name).iterdir()}
    expected = {"config.json", "image_converter.json", "metadata.json"}
    if not name.startswith("limoe"):
        # That of captions needs a vocabulary, which the user brings.
        expected.add("preprocessor.json")
    assert files == expected | {"mine.txt"}


@pytest.mark.parametrize(
    ("name", "backbone", "part"),
    [
        (ARCHITECTURE, models.ViTMoEBackbone, models.ViTMoEImageClassifierPreprocessor),
        (
            "limoe_huge_patch14_32e_294",
            models.LIMoEBackbone,
            models.ViTMoEImageConverter,
        ),
    ],
)
def test_written_files_are_those_that_the_classes_write(tmp_path, name, backbone, part):
    directory = tmp_path / "written"
    assert presets.write(name, str(directory)) == str(directory)
    part.from_preset(name).save_to_preset(str(tmp_path / "saved"))
    for file in (tmp_path / "saved").iterdir():
        written = json.loads((directory / file.name).read_text())
        assert written == json.loads(file.read_text())
    config = json.loads((directory / "config.json").read_text())
    assert config["registered_name"] == keras.saving.get_registered_name(backbone)
    assert (config["module"], config["class_name"]) == (
        backbone.__module__,
        backbone.__name__,
    )


def test_what_is_a_directory_already_is_not_written(tmp_path, catalogue):
    with pytest.raises(ValueError, match="a directory already: copy"):
        presets.write("vit_tiny", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


# === Which blocks are mixtures of experts ===


def test_every_second_block():
    assert moe_blocks(8, 2) == moe_blocks(8, every=2) == (1, 3, 5, 7)
    assert moe_blocks(8, every=3) == (2, 5)
    assert moe_blocks(3) == moe_blocks(3, every=1) == (0, 1, 2)
    assert moe_blocks(5, every=5) == (4,)


def test_the_last_of_every_second_block():
    # V-MoE, appendix E.1: "the last two layers, 21 and 23"
    assert moe_blocks(24, every=2, last=2) == (21, 23)
    # "Last 5" of the 32 blocks of V-MoE-H/14
    assert moe_blocks(32, every=2, last=5) == (23, 25, 27, 29, 31)
    # With an odd number of blocks the last one stays dense, as in Every-2.
    assert moe_blocks(5, every=2, last=1) == (3,)
    assert moe_blocks(12, every=2, last=6) == moe_blocks(12, every=2)


def test_the_second_half():
    assert moe_blocks(12, last=6) == (6, 7, 8, 9, 10, 11)
    assert moe_blocks(3, last=2) == (1, 2)
    assert moe_blocks(1, last=1) == (0,)


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        ({"num_layers": 8, "every": 0}, "every=0, num_layers=8"),
        ({"num_layers": 8, "every": 9}, "every=9, num_layers=8"),
        ({"num_layers": 8, "every": 2.0}, "every=2.0, num_layers=8"),
        # `[-0:]` would be all of them.
        ({"num_layers": 8, "every": 2, "last": 0}, "last=0, num_layers=8"),
        ({"num_layers": 8, "every": 2, "last": 5}, "last=5, num_layers=8"),
        ({"num_layers": 8, "last": 9}, "last=9, num_layers=8"),
        ({"num_layers": 0}, "num_layers=0"),
    ],
)
def test_impossible_placements(arguments, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        moe_blocks(**arguments)
