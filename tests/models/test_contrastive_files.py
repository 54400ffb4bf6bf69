"""Contrastive tasks in files: presets with their tokenizer, `.keras` files."""

import pathlib

import keras
import keras_hub
import numpy as np
import pytest

from keras_softmoe import models
from tests.support import tiny, tiny_limoe
from tests.support.layer_checks import assert_same_weights, from_preset, reloaded
from tests.support.references import assert_each_near, to_numpy
from tests.support.tiny_limoe import AMPLE, BATCH, as_numpy, captions, pairs


def assert_same(actual, expected, tolerance=1e-6):
    found, value = (as_numpy(model(pairs())) for model in (actual, expected))
    assert sorted(found) == sorted(value)
    assert_each_near(found, value, tolerance, tolerance)


def test_preset_brings_its_tokenizer(tmp_path):
    model = tiny_limoe.task(router=AMPLE)
    path = str(tmp_path / "preset")
    revived = from_preset(model, path)
    texts = model.encode_text(captions())
    np.testing.assert_allclose(revived.encode_text(captions()), texts, rtol=1e-6)
    assert_same(revived, model)
    assert type(revived.preprocessor) is models.LIMoEPreprocessor
    assert revived.preprocessor.tokenizer.proto == tiny_limoe.vocabulary()
    assert revived.backbone.get_config() == model.backbone.get_config()
    # Every part can be had alone, and by KerasHub's own classes.
    assert type(keras_hub.models.Backbone.from_preset(path)) is models.LIMoEBackbone
    preprocessor = models.LIMoEPreprocessor.from_preset(path)
    assert preprocessor.sequence_length == tiny_limoe.LENGTH
    for tokenizer in (
        preprocessor.tokenizer,
        models.LIMoETokenizer.from_preset(path),
        keras_hub.tokenizers.Tokenizer.from_preset(path),
    ):
        assert type(tokenizer) is models.LIMoETokenizer
        assert tokenizer.proto == tiny_limoe.vocabulary()
    converter = models.ViTMoEImageConverter.from_preset(path)
    assert tuple(converter.image_size) == tiny.IMAGE_SHAPE[:2]


def test_preset_for_other_images_and_settings(tmp_path):
    model = tiny_limoe.task()
    path = str(tmp_path / "preset")
    model.save_to_preset(path)
    larger = models.LIMoEContrastive.from_preset(
        path,
        image_shape=(16, 16, 3),
        priority="text_first",
        capacity_factor=2.0,
        single_modality_capacity_factor=3.0,
    )
    assert tuple(larger.preprocessor.image_converter.image_size) == (16, 16)
    assert larger.backbone.patch_grid == (4, 4)
    for router in larger.routers.values():
        assert (router.priority, router.capacity_factor) == ("text_first", 2.0)
        assert router.single_modality_capacity_factor == 3.0
    # What it has been set to is saved with it.
    changed = from_preset(larger, tmp_path / "changed", models.LIMoEBackbone)
    assert changed.get_config() == larger.backbone.get_config()
    random = models.LIMoEContrastive.from_preset(path, load_weights=False)
    kernel, other = (
        to_numpy(m.backbone.get_layer("text_projection").kernel)
        for m in (random, model)
    )
    assert np.abs(kernel - other).max() > 1e-3


def test_preset_without_tokenizer(tmp_path):
    model = models.LIMoEContrastive(tiny_limoe.backbone())
    path = str(tmp_path / "preset")
    model.save_to_preset(path)
    with pytest.raises(ValueError, match="(?s)no tokenizer.*`preprocessor=None`"):
        models.LIMoEContrastive.from_preset(path)
    revived = models.LIMoEContrastive.from_preset(path, preprocessor=None)
    assert_same(revived, model)
    assert revived.preprocessor is None


def test_preset_with_another_preprocessor(tmp_path):
    bare = models.LIMoEContrastive(tiny_limoe.backbone())
    own = tiny_limoe.preprocessor(truncate=True)
    own.image_converter.image_size = (4, 4)
    for name, model in (("bare", bare), ("whole", tiny_limoe.task())):
        path = str(tmp_path / name)
        model.save_to_preset(path)
        revived = models.LIMoEContrastive.from_preset(path, preprocessor=own)
        assert revived.preprocessor is own
        assert own.tokenizer.proto == tiny_limoe.vocabulary()
        assert tuple(own.image_converter.image_size) == tiny.IMAGE_SHAPE[:2]
        assert_same(revived, model)


def test_a_preset_whose_vocabulary_is_lost(tmp_path):
    path = tmp_path / "preset"
    tiny_limoe.task(**tiny_limoe.DENSE).save_to_preset(str(path))
    (vocabulary,) = pathlib.Path(path).rglob("vocabulary.spm")
    vocabulary.unlink()
    with pytest.raises((ValueError, OSError), match="vocabulary.spm"):
        models.LIMoEContrastive.from_preset(str(path))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_keras_file(tmp_path, loss):
    model = tiny_limoe.task(router=AMPLE, logit_bias=-1.0)
    model.compile(keras.optimizers.Adam(0.01), loss=loss, metrics=None)
    model.optimizer.build(model.trainable_variables)
    for moment in model.optimizer.variables[2:]:
        moment.assign(np.random.default_rng(0).normal(size=moment.shape))
    revived = reloaded(model, tmp_path)
    assert type(revived) is models.LIMoEContrastive
    assert type(revived.backbone) is models.LIMoEBackbone
    assert_same(revived, model)
    # The loss is the one that was chosen, not the one that a bias asks for.
    config = revived.get_compile_config()
    assert (config["loss"], config["metrics"]) == (loss, None)
    assert isinstance(revived.optimizer, keras.optimizers.Adam)
    for one, other in zip(
        revived.optimizer.variables, model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    np.testing.assert_array_equal(
        revived.preprocessor.tokenize(captions()),
        model.preprocessor.tokenize(captions()),
    )


def test_keras_file_of_a_task_that_has_taken_no_step(tmp_path):
    model = tiny_limoe.task(router=AMPLE)
    revived = reloaded(model, tmp_path)
    assert revived.compiled and not revived.optimizer.built
    assert_same(revived, model)


def test_files_of_a_task_that_was_never_compiled(tmp_path):
    model = models.LIMoEContrastive(tiny_limoe.backbone(router=AMPLE), compile=False)
    revived = reloaded(model, tmp_path)
    assert not revived.compiled
    assert_same(revived, model)
    model.save_to_preset(str(tmp_path / "preset"))
    for arguments, compiled in (({}, False), ({"compile": True}, True)):
        revived = models.LIMoEContrastive.from_preset(
            str(tmp_path / "preset"), preprocessor=None, **arguments
        )
        assert revived.compiled == compiled


def test_keras_file_of_a_backbone(tmp_path):
    model = tiny_limoe.backbone(dtype="mixed_bfloat16", text_pooling="map")
    revived = reloaded(model, tmp_path)
    assert revived.get_config() == model.get_config()
    assert_same_weights(revived, model)


def test_weights_file(tmp_path):
    model, other = tiny_limoe.task(), tiny_limoe.task()
    other.set_weights([0.5 * w for w in model.get_weights()])
    path = tmp_path / "model.weights.h5"
    # The encoders share the weights, and are not saved beside them.
    before = [w.path for w in model.weights]
    assert model.backbone.text_encoder.weights
    assert [w.path for w in model.weights] == before
    model.save_weights(path)
    other.load_weights(path)
    assert_same_weights(other, model)


def test_summary_and_configuration():
    model = tiny_limoe.task()
    revived = models.LIMoEContrastive.from_config(model.get_config())
    assert revived.backbone.get_config() == model.backbone.get_config()
    lines = []
    model.summary(print_fn=lambda line, line_break=None: lines.append(line))
    assert f"{model.count_params():,}" in "\n".join(lines)
    assert model.count_params() == sum(
        w.size for w in map(np.array, model.get_weights())
    )
    assert BATCH == len(to_numpy(model(pairs())["logit_scale"]))
