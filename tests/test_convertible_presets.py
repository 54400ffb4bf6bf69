"""Presets that are downloaded and converted when they are first loaded."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from keras_softmoe import converters, evaluation, models, presets, routers
from tests.converters import writer
from tests.models import tiny
from tests.references import to_numpy

ROOT = Path(__file__).resolve().parent.parent
NAME = "vmoe_nano_patch4_8_shapes"
REAL = [n for n in presets.names() if presets.describe(n).kind == "convertible"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "write_convertible", ROOT / "presets" / "write_convertible.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def classifier():
    return tiny.classifier(
        router=routers.SoftmaxTokenChoiceRouter(4, num_selected_experts=2)
    )


@pytest.fixture
def released(script, classifier, tmp_path, monkeypatch):
    """A checkpoint in a "bucket", a catalogue with its preset, and an own cache."""
    backbone = classifier.backbone
    keys = (
        *("image_shape", "patch_size", "num_layers", "num_heads", "hidden_dim"),
        *("mlp_dim", "moe_layers"),
    )
    config = {key: getattr(backbone, key) for key in keys}
    config["router"] = routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, capacity_factor=0.5, eval_capacity_factor=2.0
    )
    # Not what is in the file, which is asked
    config |= {"group_images": 3, "dispatch_dtype": None, "representation_dim": 5}
    entry = script.RELEASED[0]._replace(
        name=NAME,
        checkpoint="vmoe_nano",
        config=config,
        num_classes=classifier.num_classes,
        squeezed=True,
    )
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    writer.write_checkpoint(
        bucket / "vmoe_nano", converters.to_vmoe_params(classifier), num_shards=2
    )
    root = tmp_path / "presets"
    root.mkdir()
    # What TensorFlow reads without a network
    monkeypatch.setattr(script, "BUCKET", f"file://{bucket}")
    script.write(root / NAME, entry)
    monkeypatch.setattr(presets, "_root", lambda: root)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    return bucket


def assert_loaded(model, classifier):
    for one, weight in zip(model.weights, classifier.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(weight), one.path)


def test_describe(released):
    preset = presets.describe(NAME)
    assert preset.kind == "convertible"
    assert preset.checkpoint == f"file://{released}/vmoe_nano"
    assert preset.accuracy["ImageNet, validation images"] == 0.731


def test_converted_at_first_use(released, classifier, tmp_path, capsys):
    model = models.ViTMoEImageClassifier.from_preset(NAME)
    assert_loaded(model, classifier)
    backbone = model.backbone
    assert backbone.router.capacity_factor == 0.5
    assert backbone.router.eval_capacity_factor == 2.0
    assert (backbone.group_images, backbone.dispatch_dtype) == (3, None)
    assert backbone.representation_dim is None
    converter = model.preprocessor.image_converter
    assert not converter.resizing.crop_to_aspect_ratio
    assert "data-00001-of-00002" in capsys.readouterr().out
    # Nothing but the preset is kept, and it needs no file of the checkpoint.
    assert [path.name for path in (tmp_path / "keras").rglob("*vmoe*")] == [NAME]
    assert len(list((tmp_path / "keras" / "keras_softmoe").iterdir())) == 1
    shutil.rmtree(released)
    backbone = models.ViTMoEBackbone.from_preset(NAME, image_shape=(16, 16, 3))
    assert backbone.image_shape == (16, 16, 3)
    assert not capsys.readouterr().out
    assert presets.resolve(NAME) == presets.convert(NAME)


def test_without_weights_nothing_is_fetched(released, tmp_path):
    shutil.rmtree(released)
    model = models.ViTMoEImageClassifier.from_preset(NAME, load_weights=False)
    assert model.num_classes == tiny.NUM_CLASSES
    assert not (tmp_path / "keras").exists()


def test_what_to_do_without_a_network(released, classifier, tmp_path):
    copies = tmp_path / "copies"
    released.rename(copies)
    with pytest.raises(ValueError) as error:
        models.ViTMoEImageClassifier.from_preset(NAME)
    message = str(error.value)
    url = f"file://{released}/vmoe_nano"
    assert f"{url}.index and all of {url}.data-00000-of-..." in message
    assert f'gcloud storage cp "{url}.index" "{url}.data-*" FOLDER' in message
    call = f'keras_softmoe.presets.convert("{NAME}", prefix="FOLDER/vmoe_nano")'
    assert call in message
    assert not list((tmp_path / "keras" / "keras_softmoe").iterdir())
    # Done as it says
    directory = presets.convert(NAME, prefix=copies / "vmoe_nano", verbose=0)
    assert Path(directory).parent == tmp_path / "keras" / "keras_softmoe"
    assert_loaded(models.ViTMoEImageClassifier.from_preset(NAME), classifier)


@pytest.mark.parametrize("part", [".index", ".data-00001-of-00002"])
def test_damaged_download(released, tmp_path, part):
    path = released / f"vmoe_nano{part}"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(converters.CheckpointError, match="damaged, truncated") as error:
        presets.convert(NAME, prefix=released / "vmoe_nano")
    assert f"vmoe_nano{part}" in str(error.value)
    with pytest.raises(ValueError, match="damaged, truncated"):
        presets.convert(NAME, verbose=0)
    cache = tmp_path / "keras" / "keras_softmoe"
    assert not cache.exists() or not list(cache.iterdir())


def test_checkpoint_of_another_model(released, tmp_path):
    other = tiny.classifier(router=tiny.SPARSE, mlp_dim=16)
    writer.write_checkpoint(tmp_path / "other", converters.to_vmoe_params(other))
    message = "another model: mlp_dim is 16, not 12"
    with pytest.raises(ValueError, match=message) as error:
        presets.convert(NAME, prefix=tmp_path / "other")
    assert f"file://{released}/vmoe_nano" in error.value.__notes__[0]


def test_preset_of_another_kind(released):
    about = json.loads((presets.describe(NAME).path / "metadata.json").read_text())
    own = presets._root() / "own"
    shutil.copytree(presets.describe(NAME).path, own)
    (own / "metadata.json").write_text(json.dumps({**about, "kind": "architecture"}))
    with pytest.raises(ValueError, match=f"'architecture'. Convertible are: {NAME}"):
        presets.convert("own")


def test_cache_below_the_home_directory(released, tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = presets.convert(NAME, prefix=released / "vmoe_nano", verbose=0)
    assert directory == str(tmp_path / ".keras" / "keras_softmoe" / NAME)


# === The real ones ===


def test_five_checkpoints_were_released(script):
    assert sorted(REAL) == sorted(released.name for released in script.RELEASED)
    urls = {presets.describe(name).checkpoint for name in REAL}
    assert len(urls) == 5
    assert all(url.startswith("gs://vmoe_checkpoints/vmoe_") for url in urls)


@pytest.mark.parametrize("name", REAL)
def test_files_are_what_the_script_writes(script, name, tmp_path):
    (released,) = (r for r in script.RELEASED if r.name == name)
    script.write(tmp_path / name, released)
    path = presets.describe(name).path
    assert {f.name for f in path.iterdir()} == {
        f.name for f in (tmp_path / name).iterdir()
    }
    for file in path.iterdir():
        if file.suffix == ".json":
            written = json.loads((tmp_path / name / file.name).read_text())
            assert json.loads(file.read_text(encoding="utf-8")) == written
    card = (path / "README.md").read_text(encoding="utf-8")
    assert card == (tmp_path / name / "README.md").read_text(encoding="utf-8")
    accuracies = presets.describe(name).accuracy.values()
    assert all(f"{100 * accuracy:.1f} %" in card for accuracy in accuracies)
    assert evaluation.cost(name).parameters == presets.describe(name).parameters
