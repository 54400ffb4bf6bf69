"""Presets that are downloaded and converted when they are first loaded.

Covers `models/conversion.py` and `catalogue/released.py`.
"""

import json
import shutil
import threading
from pathlib import Path

import pytest

from keras_softmoe import catalogue, converters, evaluation, models, presets, routers
from keras_softmoe.models.loading import open_preset
from tests.checkpoints.test_npz import save
from tests.support import checkpoint_writer as writer, releases, server, tiny
from tests.support.layer_checks import assert_same_weights

NAME = "vmoe_nano_patch4_8_shapes"
REAL = catalogue.names_of_kind("convertible")


@pytest.fixture(scope="module")
def classifier():
    return tiny.classifier(
        router=routers.SoftmaxTokenChoiceRouter(4, num_selected_experts=2)
    )


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A catalogue and a directory of Keras that a test may change."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    before = dict(catalogue.rows())
    yield
    catalogue.rows().clear()
    catalogue.rows().update(before)


@pytest.fixture
def released(classifier, tmp_path, own_cache):
    """A checkpoint in a "bucket", and a row for it."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    writer.write_checkpoint(
        bucket / "vmoe_nano", converters.to_vmoe_params(classifier), num_shards=2
    )
    releases.add(
        NAME,
        classifier,
        # A URL that TensorFlow reads without a network
        f"file://{bucket}/vmoe_nano",
        {"ImageNet, validation images": 0.731},
        router=routers.SoftmaxTokenChoiceRouter(
            4, num_selected_experts=2, capacity_factor=0.5, eval_capacity_factor=2.0
        ),
        group_images=3,
        dispatch_dtype=None,
        # Not that of the file, which decides
        representation_dim=5,
    )
    return bucket


def test_describe(released):
    preset = presets.describe(NAME)
    assert preset.kind == "convertible"
    assert preset.checkpoint == f"file://{released}/vmoe_nano"
    assert preset.accuracy["ImageNet, validation images"] == 0.731


def test_converted_at_first_use(released, classifier, tmp_path, capsys):
    model = models.ViTMoEImageClassifier.from_preset(NAME)
    assert_same_weights(model, classifier)
    backbone = model.backbone
    assert backbone.router.capacity_factor == 0.5
    assert backbone.router.eval_capacity_factor == 2.0
    assert (backbone.group_images, backbone.dispatch_dtype) == (3, None)
    assert backbone.representation_dim is None
    assert not model.preprocessor.image_converter.resizing.crop_to_aspect_ratio
    assert "data-00001-of-00002" in capsys.readouterr().out
    # Nothing but the preset is kept, and it needs no file of the checkpoint.
    assert [path.name for path in (tmp_path / "keras").rglob("*vmoe*")] == [NAME]
    assert len(list((tmp_path / "keras" / "keras_softmoe").iterdir())) == 1
    shutil.rmtree(released)
    backbone = models.ViTMoEBackbone.from_preset(NAME, image_shape=(16, 16, 3))
    assert backbone.image_shape == (16, 16, 3)
    assert not capsys.readouterr().out
    with open_preset(NAME) as directory:
        assert directory == presets.convert(NAME)
    metadata = json.loads((Path(directory) / "metadata.json").read_text())
    assert metadata["kind"] == "converted"
    assert metadata["checkpoint"] == f"file://{released}/vmoe_nano"


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
    assert_same_weights(models.ViTMoEImageClassifier.from_preset(NAME), classifier)


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vit_base_patch16_224", "architecture"),
        ("vit_tiny_patch8_32_icons", "trained"),
    ],
)
def test_preset_of_another_kind(released, name, kind):
    with pytest.raises(ValueError, match=f"Only these.*{NAME}.*of kind '{kind}'"):
        presets.convert(name)


def test_written_directory_is_converted(released, classifier, tmp_path):
    directory = presets.write(NAME, tmp_path / NAME)
    assert_same_weights(models.ViTMoEImageClassifier.from_preset(directory), classifier)


def test_cache_below_the_home_directory(released, tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = presets.convert(NAME, prefix=released / "vmoe_nano", verbose=0)
    assert directory == str(tmp_path / ".keras" / "keras_softmoe" / NAME)


DENSE_NAME = "vit_nano_patch4_8_shapes"


@pytest.fixture
def on_the_web(tmp_path, own_cache):
    """A dense model in an original checkpoint on a server, and a row for it."""
    model = tiny.classifier(**tiny.DENSE)
    folder = tmp_path / "web"
    folder.mkdir()
    save(folder / "vit_nano.npz", converters.to_vmoe_params(model))
    with server.serve(folder) as (url, handler):
        releases.add(DENSE_NAME, model, f"{url}/vit_nano.npz")
        yield model, url, handler


def test_downloaded_once(on_the_web, tmp_path):
    model, _, handler = on_the_web
    cache = tmp_path / "keras" / "keras_softmoe"
    # What a process has left that was killed.
    left = cache / f".{DENSE_NAME}.download.old"
    left.mkdir(parents=True)
    (left / "vit_nano.npz").write_bytes(b"half")
    assert_same_weights(models.ViTMoEImageClassifier.from_preset(DENSE_NAME), model)
    assert [path.name for path in cache.iterdir()] == [DENSE_NAME]
    count = len(handler.asked)
    assert_same_weights(converters.dense_model(DENSE_NAME), model)
    router = routers.IdentityRouter(5)
    sparse = converters.upcycle(DENSE_NAME, moe_layers=(1,), router=router)
    assert sparse.backbone.moe_layers == (1,)
    assert len(handler.asked) == count


def test_two_processes_download_once(on_the_web, tmp_path):
    _, _, handler = on_the_web
    threads = [
        threading.Thread(
            target=presets.convert, args=(DENSE_NAME,), kwargs={"verbose": 0}
        )
        for _ in range(2)
    ]
    # The lock is one of the file: two openings of it exclude each other in one process.
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [method for method, *_ in handler.asked].count("GET") == 1
    assert (tmp_path / "keras" / "keras_softmoe" / DENSE_NAME).is_dir()


def test_what_to_do_off_line(on_the_web, tmp_path):
    model, url, _ = on_the_web
    web = tmp_path / "web"
    web.rename(tmp_path / "FOLDER")
    with pytest.raises(ValueError) as error:
        models.ViTMoEImageClassifier.from_preset(DENSE_NAME)
    message = str(error.value)
    assert f"this file to FOLDER: {url}/vit_nano.npz" in message
    call = (
        f'keras_softmoe.presets.convert("{DENSE_NAME}", prefix="FOLDER/vit_nano.npz")'
    )
    assert call in message
    prefix = tmp_path / "FOLDER" / "vit_nano.npz"
    presets.convert(DENSE_NAME, prefix=prefix, verbose=0)
    assert_same_weights(models.ViTMoEImageClassifier.from_preset(DENSE_NAME), model)


def test_eleven_checkpoints_were_released():
    assert REAL == [
        "vit_base_patch16_224_augreg_imagenet21k",
        "vit_base_patch32_224_augreg_imagenet21k",
        "vit_large_patch16_224_augreg_imagenet21k",
        "vit_small_patch16_224_augreg_imagenet21k",
        "vit_small_patch32_224_augreg_imagenet21k",
        "vit_tiny_patch16_224_augreg_imagenet21k",
        "vmoe_base_patch16_every2_8e_224_imagenet21k",
        "vmoe_base_patch16_every2_8e_384_imagenet",
        "vmoe_small_patch32_last2_8e_224_imagenet_light",
        "vmoe_small_patch32_last2_8e_224_imagenet_medium",
        "vmoe_small_patch32_last2_8e_384_imagenet_light",
    ]
    urls = {presets.describe(name).checkpoint for name in REAL}
    assert len(urls) == 11
    starts = ("gs://vmoe_checkpoints/vmoe_", "gs://vit_models/augreg/")
    assert all(url.startswith(starts) for url in urls)


@pytest.mark.parametrize("name", REAL)
def test_written_directory_is_complete(name, tmp_path):
    preset = presets.describe(name)
    path = Path(presets.write(name, tmp_path / name))
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "image_converter.json",
        "metadata.json",
        "preprocessor.json",
        "task.json",
    }
    saved = {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in path.glob("*.json")
    }
    task, image_size = saved["task"]["config"], saved["config"]["config"]["image_shape"]
    assert saved["image_converter"]["config"]["image_size"] == image_size[:2]
    assert saved["metadata"].get("accuracy", {}) == preset.accuracy
    with_head = evaluation.cost(name, task["num_classes"]).parameters
    assert with_head == saved["metadata"]["parameter_count_with_head"]


def test_written_files_are_those_that_the_classes_write(tmp_path):
    name = "vit_tiny_patch16_224_augreg_imagenet21k"
    directory = Path(presets.write(name, tmp_path / "written"))
    model = models.ViTMoEImageClassifier.from_preset(
        name, load_weights=False, num_classes=3, num_layers=1
    )
    model.save_to_preset(str(tmp_path / "saved"))
    written, saved = (
        json.loads((folder / "task.json").read_text())
        for folder in (directory, tmp_path / "saved")
    )
    for key in ("module", "class_name", "registered_name"):
        assert written[key] == saved[key]
    assert written["config"].keys() == saved["config"].keys()
    assert written["config"]["preprocessor"] == saved["config"]["preprocessor"]
