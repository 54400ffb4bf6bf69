"""Presets are loaded as they were saved, with the arguments that may be changed.

Covers `models/loading.py`.
"""

import json
import re

import keras
import keras_hub
import numpy as np
import pytest

from keras_softmoe import files, models, routers
from keras_softmoe.catalogue import lookup
from keras_softmoe.ops.position import resample_position_grid
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.layer_checks import assert_same_weights, randomize
from tests.support.references import to_numpy

pytestmark = tiny.FITTING
FILES = {
    "config.json",
    "image_converter.json",
    "metadata.json",
    "model.weights.h5",
    "preprocessor.json",
    "task.json",
    "task.weights.h5",
}


def save(model, tmp_path, name="preset"):
    path = tmp_path / name
    model.save_to_preset(str(path))
    return str(path)


@pytest.mark.parametrize("kind", ["soft", "sparse", "dense"])
def test_predictions_survive(tmp_path, kind):
    overrides = {
        "soft": {"pooling": "map", "use_qk_norm": True, "representation_dim": 5},
        "sparse": {"router": tiny.SPARSE, "group_images": 2, "pooling": "gap"},
        "dense": {**tiny.DENSE, "position_embedding": "sincos2d"},
    }[kind]
    model = tiny.classifier(**overrides)
    path = save(model, tmp_path)
    assert {file.name for file in (tmp_path / "preset").iterdir()} == FILES
    x = tiny.pixels(3)
    expected = tiny.predict(model, x)
    for cls in (models.ViTMoEImageClassifier, keras_hub.models.ImageClassifier):
        revived = cls.from_preset(path)
        assert type(revived) is models.ViTMoEImageClassifier
        assert_near(tiny.predict(revived, x), expected, rtol=1e-6, atol=1e-6)
    for cls in (models.ViTMoEBackbone, keras_hub.models.Backbone):
        revived = cls.from_preset(path)
        assert type(revived) is models.ViTMoEBackbone
        assert revived.get_config() == model.backbone.get_config()
        assert_same_weights(revived, model.backbone)


def test_metadata(tmp_path):
    save(tiny.classifier(), tmp_path)
    metadata = json.loads((tmp_path / "preset" / "metadata.json").read_text())
    assert metadata["parameter_count"] == tiny.backbone().count_params()
    assert metadata["tasks"] == ["ImageClassifier", "ImageSegmenter"]


@pytest.mark.parametrize(
    "name",
    [
        "limoe_tiny_patch8_8e_32_icons",
        "soft_moe_micro_patch4_25e_20_letters",
        "vmoe_tiny_patch8_8e_32_icons",
    ],
)
def test_presets_take_pictures_of_any_size(name):
    """Pictures of one grey each: their size says nothing."""
    is_limoe = name.startswith("limoe")
    kind = models.LIMoEContrastive if is_limoe else models.ViTMoEImageClassifier
    model = kind.from_preset(name)
    predict = model.encode_image if is_limoe else model.predict
    own = model.backbone.image_shape[:2]
    converter = models.ViTMoEImageConverter.from_preset(name)
    found = []
    for size in (own, (7, 5), (33, 20), (48, 64)):
        grey = np.broadcast_to(np.array([50, 200])[:, None, None, None], (2, *size, 3))
        assert converter(grey.astype("uint8")).shape == (2, *own, 3)
        found.append(predict(grey.astype("uint8"), verbose=0))
    assert np.ptp(found[0], axis=0).max() > 0.01
    for outputs in found[1:]:
        assert_near(outputs, found[0], rtol=1e-4, atol=1e-4)


def test_an_image_converter_without_a_size_gets_that_of_the_model(tmp_path):
    """And presets that were saved with such a one."""
    preprocessor = models.ViTMoEImageClassifierPreprocessor(
        models.ViTMoEImageConverter()
    )
    model = tiny.classifier({"preprocessor": preprocessor})
    path = save(model, tmp_path)
    for file in ("task.json", "preprocessor.json", "image_converter.json"):
        file = tmp_path / "preset" / file
        text = file.read_text()
        older = re.sub(r'"image_size": \[\s*8,\s*8\s*\]', '"image_size": null', text)
        assert older != text
        file.write_text(older)
    x = tiny.pixels(2, (12, 10, 3))
    expected = tiny.predict(model, x)
    revived = models.ViTMoEImageClassifier.from_preset(path)
    np.testing.assert_array_equal(tiny.predict(revived, x), expected)


def test_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(lookup, "ROOT", tmp_path)
    model = tiny.classifier()
    save(model, tmp_path, "tiny_preset")
    revived = models.ViTMoEImageClassifier.from_preset("tiny_preset")
    assert_same_weights(revived, model)
    preprocessor = models.ViTMoEImageClassifierPreprocessor.from_preset("tiny_preset")
    converter = models.ViTMoEImageConverter.from_preset("tiny_preset")
    for each in (preprocessor.image_converter, converter):
        assert (each.image_size, each.offset) == ((8, 8), -1.0)
        np.testing.assert_allclose(each.scale, 2 / 255)


def test_without_weights(tmp_path):
    saved = tiny.classifier()
    path = save(saved, tmp_path)
    model = models.ViTMoEImageClassifier.from_preset(path, load_weights=False)
    assert model.get_config() == saved.get_config()
    # The head starts from zeros, the patch embedding from other numbers than saved.
    assert not to_numpy(model.output_dense.kernel).any()
    backbone = models.ViTMoEBackbone.from_preset(path, load_weights=False)
    kernels = [
        to_numpy(m.get_layer("patch_embedding").projection.kernel)
        for m in (backbone, saved.backbone)
    ]
    assert not np.allclose(*kernels)


def test_other_dtype(tmp_path):
    model = tiny.classifier()
    path = save(model, tmp_path)
    for dtype in ("bfloat16", "mixed_bfloat16"):
        revived = models.ViTMoEImageClassifier.from_preset(path, dtype=dtype)
        assert revived.dtype_policy.name == revived.backbone.dtype_policy.name == dtype
        assert revived.output_dense.compute_dtype == "bfloat16"
        assert revived.backbone.router.dtype_policy.name == "float32"
    actual = tiny.predict(revived, tiny.pixels(4)).astype("float32")
    expected = tiny.predict(model, tiny.pixels(4))
    assert np.median(np.abs(actual - expected)) < 0.05 * expected.std()


def test_what_will_be_loaded_is_not_drawn(tmp_path, monkeypatch):
    model = tiny.classifier(router=tiny.SPARSE)
    path, dense = save(model, tmp_path), keras.layers.Dense(3, "relu")

    def draw(self, *args, **kwargs):
        raise ValueError("A random initializer was called.")

    for cls in (keras.initializers.VarianceScaling, keras.initializers.RandomNormal):
        monkeypatch.setattr(cls, "__call__", draw)
    assert_same_weights(models.ViTMoEImageClassifier.from_preset(path), model)
    for build in (
        lambda: models.ViTMoEImageClassifier.from_preset(path, load_weights=False),
        lambda: dense.build((None, 2)),
    ):
        with pytest.raises(ValueError, match="random initializer"):
            build()


def test_other_number_of_classes(tmp_path):
    model = tiny.classifier()
    revived = models.ViTMoEImageClassifier.from_preset(
        save(model, tmp_path), num_classes=7
    )
    assert tiny.predict(revived, tiny.pixels(2)).shape == (2, 7)
    assert_same_weights(revived.backbone, model.backbone)


@pytest.mark.parametrize("pooling", ["token", "gap"])
@pytest.mark.parametrize("image_shape", [(12, 16, 3), (4, 8, 3)])
def test_other_resolution(tmp_path, pooling, image_shape):
    model = tiny.classifier(pooling=pooling)
    path = save(model, tmp_path)
    table = to_numpy(model.backbone.get_layer("position_embedding").embedding)[0]
    patches = table[-4:].reshape(2, 2, 8)
    rows, columns = image_shape[0] // 4, image_shape[1] // 4
    patches = to_numpy(resample_position_grid(patches, rows, columns))
    expected = np.concatenate([table[:-4], patches.reshape(-1, 8)])[None]
    for cls in (models.ViTMoEImageClassifier, keras_hub.models.ImageClassifier):
        revived = cls.from_preset(path, image_shape=image_shape)
        embedding = revived.backbone.get_layer("position_embedding").embedding
        assert_near(to_numpy(embedding), expected, rtol=1e-5, atol=1e-6)
        assert revived.backbone.image_shape == image_shape
        # The converter follows: images of the old size still go in.
        assert revived.preprocessor.image_size == image_shape[:2]
        assert tiny.predict(revived, tiny.pixels(2)).shape == (2, 3)
    # And from there: the grid that was saved last counts.
    other = models.ViTMoEBackbone.from_preset(save(revived, tmp_path, "again"))
    np.testing.assert_allclose(
        to_numpy(other.get_layer("position_embedding").embedding), expected, rtol=1e-6
    )


def test_fine_tuning_at_another_resolution(tmp_path):
    path = save(tiny.classifier(router=tiny.SPARSE, pooling="gap"), tmp_path)
    model = models.ViTMoEImageClassifier.from_preset(
        path, num_classes=2, image_shape=(12, 12, 3)
    )
    weights = [
        model.backbone.get_layer("position_embedding").embedding,
        model.output_dense.kernel,
    ]
    before = [to_numpy(weight) for weight in weights]
    # Two steps: the new head starts from zeros and passes nothing on in the first.
    model.fit(tiny.pixels(4), tiny.labels(4) % 2, batch_size=4, epochs=2, verbose=0)
    for weight, old in zip(weights, before, strict=True):
        change = np.abs(to_numpy(weight) - old).max()
        assert np.isfinite(change) and change > 0


def test_other_resolution_without_learned_positions(tmp_path):
    model = tiny.backbone(position_embedding="sincos2d")
    path = save(model, tmp_path)
    larger = models.ViTMoEBackbone.from_preset(path, image_shape=(12, 12, 3))
    assert_same_weights(larger, model)
    assert larger(tiny.images(2, (12, 12, 3)))["sequence_output"].shape == (2, 10, 8)


def test_other_routing(tmp_path):
    # The number of choices and the capacity may change at inference (V-MoE, 4.2).
    path = save(tiny.backbone(router=tiny.SPARSE), tmp_path)
    config = {**tiny.SPARSE.get_config(), "num_selected_experts": 2}
    router = routers.SoftmaxTokenChoiceRouter.from_config(config)
    model = models.ViTMoEBackbone.from_preset(path, router=router, group_images=2)
    assert model.router.num_selected_experts == 2
    assert model.group_images == 2
    load = to_numpy(model.route(tiny.images(2))[1].summary["load"])
    # 10 tokens x 2 choices x 0.75 / 4 experts, rounded up: 4 slots each
    assert load.shape == (1, 4) and load.max() <= 4


def test_classifier_on_a_saved_backbone(tmp_path):
    model = tiny.backbone()
    path = save(model, tmp_path)
    with pytest.raises(ValueError, match="without a head.*task.json.*num_classes="):
        models.ViTMoEImageClassifier.from_preset(path)
    classifier = models.ViTMoEImageClassifier.from_preset(
        path, num_classes=4, preprocessor=None
    )
    assert_same_weights(classifier.backbone, model)


def test_fine_tuning_and_saving_over(tmp_path):
    path = save(tiny.classifier(), tmp_path)
    (tmp_path / "preset" / "README.md").write_text("the card")
    model = keras_hub.models.ImageClassifier.from_preset(path, num_classes=4)
    model.fit(tiny.pixels(8), np.arange(8) % 4, batch_size=4, verbose=0)
    save(model, tmp_path)
    assert_same_weights(models.ViTMoEImageClassifier.from_preset(path), model)
    # What others put there stays, and nothing is left of the writing.
    assert (tmp_path / "preset" / "README.md").read_text() == "the card"
    assert [entry.name for entry in tmp_path.iterdir()] == ["preset"]


def test_all_files_are_written_at_once(tmp_path, monkeypatch):
    """KerasHub saves the parts of a task by their own methods."""
    found, aside = [], files._aside
    monkeypatch.setattr(files, "_aside", lambda *x: found.append(x) or aside(*x))
    for _ in range(2):
        save(tiny.classifier(), tmp_path)
    assert len(found) == 2


def test_several_files_of_weights(tmp_path):
    path = tmp_path / "preset"
    # Over a preset whose weights are in one file, and back.
    tiny.backbone().save_to_preset(str(path))
    for seed, max_shard_size in ((1, 6e-6), (2, 10)):
        model = tiny.backbone()
        randomize(model, seed)
        # In GB: some 6 kB a file
        model.save_to_preset(str(path), max_shard_size=max_shard_size)
        several = len(list(path.glob("model*.weights.h5"))) > 1
        assert several == (max_shard_size < 1)
        assert_same_weights(models.ViTMoEBackbone.from_preset(str(path)), model)


def test_global_policy_at_loading(tmp_path):
    path = save(tiny.backbone(), tmp_path)
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = models.ViTMoEBackbone.from_preset(path, dtype="float32")
    assert model.dtype_policy.name == "float32"
    assert model.blocks[1].moe.experts.compute_dtype == "float32"


def test_a_classifier_of_a_backbone_without_preprocessing(tmp_path):
    """Its files are whole: they say nothing of the scale of pixels."""
    folder = str(tmp_path / "preset")
    tiny.backbone().save_to_preset(folder)
    read = models.ViTMoEImageClassifier.from_preset
    with pytest.raises(ValueError, match="backbone only.*`preprocessor="):
        read(folder, num_classes=3)
    model = read(folder, num_classes=3, preprocessor=None)
    assert model.predict(tiny.images(2), verbose=0).shape == (2, 3)
