"""The catalogue of presets, with a temporary one in its place."""

import json

import pytest

from keras_softmoe import presets

METADATA = {
    "parameter_count": 1234,
    "kind": "trained",
    "description": "A tiny one.",
    "source": "train.py",
    "licence": "Apache-2.0",
}
OURS = {"registered_name": "keras_softmoe>ViTMoEBackbone"}


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
    write(root / "soft_moe_huge", weights=False, kind="architecture")
    # No presets: a script, a directory with something else
    (root / "train.py").write_text("")
    (root / "figures").mkdir()
    monkeypatch.setattr(presets, "_root", lambda: root)
    return root


def test_names(catalogue):
    assert presets.names() == ["soft_moe_huge", "soft_moe_tiny", "vit_tiny"]


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
    assert presets.describe("soft_moe_huge").kind == "architecture"


@pytest.mark.parametrize("content", ['{"kind": "tra', '{"kind": "trained"}'])
def test_describe_with_damaged_metadata(catalogue, content):
    (catalogue / "vit_tiny" / "metadata.json").write_text(content)
    with pytest.raises(ValueError, match="vit_tiny.*cannot be read"):
        presets.describe("vit_tiny")


def test_real_catalogue():
    for name in presets.names():
        preset = presets.describe(name)
        assert preset.kind in ("trained", "convertible", "architecture")
        assert preset.parameters > 0
        assert preset.description and preset.source and preset.licence
        has_weights = any((preset.path / f).is_file() for f in presets.WEIGHTS_FILES)
        assert has_weights == (preset.kind == "trained")


def test_resolve(catalogue, tmp_path, monkeypatch):
    own = write(tmp_path / "vit_tiny")
    assert presets.resolve("vit_tiny") == str(catalogue / "vit_tiny")
    assert presets.resolve(own) == presets.resolve(str(own)) == str(own)
    assert presets.resolve("soft_moe_huge", load_weights=False) == str(
        catalogue / "soft_moe_huge"
    )
    # A directory that lies here goes before a name.
    monkeypatch.chdir(tmp_path)
    assert presets.resolve("vit_tiny") == "vit_tiny"


@pytest.mark.parametrize("handle", ["hf://me/model", "kaggle://me/model/keras/a"])
def test_handles_are_left_to_kerashub(handle):
    assert presets.resolve(handle) == handle
    presets.check_task(handle)


@pytest.mark.parametrize("function", [presets.resolve, presets.describe])
def test_unknown_name(catalogue, function):
    with pytest.raises(ValueError) as error:
        function("soft_moe_tni")
    message = str(error.value)
    assert "Unknown preset 'soft_moe_tni'" in message
    # The nearest one first
    assert "Did you mean 'soft_moe_tiny'" in message
    assert "preset='soft_moe_tni'" in message


@pytest.mark.parametrize("name", ["../presets/vit_tiny", "vit_tiny/", "*", "train.py"])
def test_name_stays_in_the_catalogue(catalogue, name):
    with pytest.raises(ValueError, match="Unknown preset"):
        presets.resolve(name)
    with pytest.raises(ValueError, match="Unknown preset"):
        presets.describe(name)


def test_weights_that_were_never_released(catalogue):
    with pytest.raises(ValueError) as error:
        presets.resolve("soft_moe_huge")
    message = str(error.value)
    assert "'soft_moe_huge'" in message and "never released" in message
    assert "load_weights=False" in message
    assert "soft_moe_tiny, vit_tiny" in message


def test_weights_that_are_missing(catalogue):
    (catalogue / "vit_tiny" / "model.weights.h5").unlink()
    with pytest.raises(ValueError, match="has no weights.*model.weights.h5"):
        presets.resolve("vit_tiny")
    (catalogue / "vit_tiny" / "model.weights.json").write_text("{}")
    assert presets.resolve("vit_tiny")


def test_directory_that_is_no_preset(catalogue):
    with pytest.raises(ValueError, match="not a preset: it has no config.json"):
        presets.resolve(catalogue / "figures")


def test_preset_of_another_library(tmp_path):
    path = write(tmp_path / "bert", {"registered_name": "keras_hub>BertBackbone"})
    with pytest.raises(ValueError, match="keras_hub>BertBackbone"):
        presets.resolve(path)


# === Writing ===


def files(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_replaced_directory(tmp_path):
    target = tmp_path / "deep" / "preset"
    for content in ("first", "second"):
        with presets.replaced_directory(target) as aside:
            with open(f"{aside}/config.json", "w") as file:
                file.write(content)
            # Not there before all is written
            assert content not in files(tmp_path / "deep" / "preset").values()
        assert files(target)["config.json"] == content
        (target / "assets").mkdir(exist_ok=True)
        (target / "assets" / "card").write_text("kept")
    assert files(target) == {"config.json": "second", "assets/card": "kept"}
    assert [path.name for path in target.parent.iterdir()] == ["preset"]


def test_replaced_directory_after_a_failure(tmp_path):
    target = tmp_path / "preset"
    write(target)
    before = files(tmp_path)
    for path in (target, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            with presets.replaced_directory(path) as aside:
                with open(f"{aside}/config.json", "w") as file:
                    file.write("half")
                raise KeyboardInterrupt
        assert files(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == ["preset"]


def test_older_weights_of_the_other_kind_are_dropped(tmp_path):
    target = tmp_path / "preset"
    write(target)
    with presets.replaced_directory(target) as aside:
        for name in ("model.weights.json", "model_00000.weights.h5"):
            with open(f"{aside}/{name}", "w") as file:
                file.write("new")
    assert set(files(target)) == {
        "config.json",
        "metadata.json",
        "model.weights.json",
        "model_00000.weights.h5",
    }
