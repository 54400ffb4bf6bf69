"""Dense models of KerasHub, as models of this library: KerasHub is the judge.

Covers `converters/keras_hub_params.py`.
"""

import json

import keras
import keras_hub
import numpy as np
import pytest

from keras_softmoe import converters, evaluation, models, routers
from keras_softmoe.converters.dense_model import find_file
from tests.skips import needs
from tests.support import hub, safetensors_file, tiny, torch_twin, twins
from tests.support.close import assert_near
from tests.support.layer_checks import from_preset
from tests.support.references import to_numpy

BACKBONES = [name for name in hub.MODELS if "Classifier" not in name]
CLASSIFIERS = [name for name in hub.MODELS if "Classifier" in name]
LARGER = (20, 20, 3)
# On the quickest backend all of them; elsewhere those that have all parts together.
UPCYCLED = ["DINOV2Backbone, registers", "SigLIPVisionEncoder"]
if keras.backend.backend() == "torch":
    UPCYCLED = BACKBONES


def features(model, images):
    """What a backbone computes: tokens, or the vector of SigLIP."""
    inputs = images
    if isinstance(model.input, dict):
        inputs = {"images": images}
    outputs = model(inputs, training=False)
    return to_numpy(outputs)


def assert_same_features(ours, theirs, images):
    expected = features(theirs, images)
    outputs = ours(images, training=False)
    name = "sequence_output" if expected.ndim == 3 else "pooled_output"
    assert_near(to_numpy(outputs[name]), expected, atol=2e-5)


@pytest.mark.parametrize("name", BACKBONES)
def test_features(name):
    theirs = hub.make(name)
    ours = converters.dense_model(theirs)
    assert type(ours) is models.ViTMoEBackbone
    assert_same_features(ours, theirs, tiny.images(3, ours.image_shape))
    # All of it is counted.
    assert evaluation.cost(ours).parameters == ours.count_params()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits(name):
    theirs = hub.make(name)
    ours = converters.dense_model(theirs)
    assert type(ours) is models.ViTMoEImageClassifier
    images = tiny.images(3, hub.SHAPE)
    expected = to_numpy(theirs(images))
    assert_near(to_numpy(ours(images)), expected, atol=2e-5)
    if "gap" in name:
        np.testing.assert_allclose(expected.sum(-1), 1.0, rtol=1e-5)
    backbone = converters.dense_model(theirs, head=False)
    assert type(backbone) is models.ViTMoEBackbone


@pytest.mark.parametrize("name", ["ViTBackbone", "DeiTBackbone", "SigLIPVisionEncoder"])
def test_another_resolution(name):
    """KerasHub leaves the resampling to the user: done here, as `transformers` does."""
    small, large = hub.make(name), hub.make(name, image_shape=LARGER)
    first = {"ViTBackbone": 1, "DeiTBackbone": 2}.get(name, 0)
    for weight, source in zip(large.weights, small.weights, strict=True):
        if weight.shape == source.shape:
            weight.assign(to_numpy(source))
        elif "position_ids" not in weight.path:
            table = to_numpy(source).reshape(-1, 8)
            grid = table[first:].reshape(3, 3, 8)
            patches = twins.bicubic(grid, 5, 5, antialias=False)
            table = np.concatenate([table[:first], patches.reshape(-1, 8)])
            weight.assign(table.reshape(weight.shape))
    ours = converters.dense_model(small, image_shape=LARGER)
    assert_same_features(ours, large, tiny.images(2, LARGER))


@pytest.mark.parametrize("name", ["DINOV2Backbone", "DINOV2Backbone, registers"])
def test_another_resolution_of_dinov2(tmp_path, name):
    """KerasHub resamples when it loads a preset."""
    small = hub.make(name)
    large = from_preset(small, tmp_path, image_shape=LARGER)
    images = tiny.images(2, LARGER)
    assert_same_features(converters.dense_model(large), large, images)
    # On PyTorch its bicubic resampling has another kernel than elsewhere.
    if keras.backend.backend() == "torch" or "registers" in name:
        saved = type(small).from_preset(str(tmp_path), image_shape=hub.SHAPE)
        ours = converters.dense_model(saved, image_shape=LARGER)
        assert_same_features(ours, large, images)


@pytest.mark.parametrize("name", ["ViTImageClassifier", "DINOV2Backbone, registers"])
def test_presets(tmp_path, name):
    """Through a directory of KerasHub, and one of ours, at either resolution."""
    theirs = hub.make(name)
    theirs.save_to_preset(str(tmp_path / "hub"))
    ours = converters.dense_model(tmp_path / "hub")
    direct = converters.dense_model(theirs)
    assert type(ours) is type(direct)
    images = tiny.images(2, hub.SHAPE)
    outputs = pooled(direct, images)
    if "registers" not in name:
        # KerasHub makes positions anew when it loads.
        assert_near(pooled(ours, images), outputs, atol=2e-5)
    direct.save_to_preset(str(tmp_path / "ours"))
    loaded = converters.dense_model(str(tmp_path / "ours"))
    assert_near(pooled(loaded, images), outputs, atol=1e-6)
    large = tiny.images(2, LARGER)
    again = type(ours).from_preset(str(tmp_path / "ours"), image_shape=LARGER)
    expected = pooled(converters.dense_model(direct, image_shape=LARGER), large)
    assert_near(pooled(again, large), expected, atol=1e-6)


@pytest.mark.parametrize("content", ["{}", "[]", "null"])
def test_damaged_task(tmp_path, content):
    """It is refused: without it the head would be left out."""
    backbone = tiny.backbone(**tiny.DENSE)
    models.ViTMoEImageClassifier(backbone, 3).save_to_preset(str(tmp_path))
    assert isinstance(converters.dense_model(tmp_path), models.ViTMoEImageClassifier)
    (tmp_path / "task.json").write_text(content)
    with pytest.raises(ValueError, match="cannot be read.*Error"):
        converters.dense_model(tmp_path)


def pooled(model, images):
    outputs = model(images)
    return to_numpy(outputs["pooled_output"] if isinstance(outputs, dict) else outputs)


def test_images_of_a_classifier(tmp_path):
    """Its pixels are prepared as KerasHub prepares them."""
    theirs = keras_hub.models.ViTImageClassifier(
        hub.make("ViTBackbone"),
        3,
        preprocessor=keras_hub.models.ViTImageClassifierPreprocessor(
            keras_hub.layers.ViTImageConverter(
                image_size=(12, 12), scale=[0.01, 0.02, 0.03], offset=[-1.0, 0.0, 1.0]
            )
        ),
    )
    ours = converters.dense_model(theirs)
    pixels = tiny.pixels(2, (9, 9, 3))
    assert_near(tiny.predict(ours, pixels), tiny.predict(theirs, pixels), atol=1e-5)


@pytest.mark.parametrize("name", UPCYCLED)
def test_upcycled(name):
    router = routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, capacity_factor=2.0, normalize_gates=True
    )
    theirs = hub.make(name)
    sparse = converters.upcycle(theirs, moe_layers=(1,), router=router)
    assert sparse.moe_layers == (1,)
    assert_same_features(sparse, theirs, tiny.images(3, sparse.image_shape))
    assert evaluation.cost(sparse).parameters == sparse.count_params()


def test_two_towers():
    """The one for images."""
    vision = hub.make("SigLIPVisionEncoder")
    text = keras_hub.models.SigLIPTextEncoder(
        vocabulary_size=9,
        embedding_dim=8,
        hidden_dim=8,
        num_layers=1,
        num_heads=2,
        intermediate_dim=8,
        max_sequence_length=4,
        projection_dim=8,
    )
    ours = converters.dense_model(keras_hub.models.SigLIPBackbone(vision, text))
    assert_same_features(ours, vision, tiny.images(3, hub.SHAPE))


def test_own_models():
    model = tiny.classifier(**tiny.DENSE)
    assert converters.dense_model(model) is model
    assert converters.dense_model(model, head=False) is model.backbone
    name = "vit_tiny_patch8_32_icons"
    assert type(converters.dense_model(name)) is models.ViTMoEImageClassifier
    converter = converters.image_preprocessor(name, (8, 8)).image_converter
    assert (converter.scale, converter.offset) == (1 / 127.5, -1.0)
    with pytest.raises(ValueError, match="no conversion.*Received: activation"):
        converters.dense_model(model, activation="gelu")


def test_handle_of_hugging_face(tmp_path, monkeypatch):
    """Of a repository that is no preset the file is fetched, and read here."""
    hub_package = needs("huggingface_hub")
    arrays = torch_twin.state("vit", pre_logits=True)
    safetensors_file.save(tmp_path / "model.safetensors", arrays)
    about = {"num_attention_heads": torch_twin.HEADS, "hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(about))
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, tuple(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr(hub_package, "snapshot_download", snapshot_download)
    model = converters.dense_model("hf://google/vit")
    tokens, _ = torch_twin.forward("vit", arrays, tiny.images(2, hub.SHAPE))
    outputs = model(tiny.images(2, hub.SHAPE))["sequence_output"]
    assert_near(to_numpy(outputs), tokens, atol=1e-4)
    texts = ("*.json",)
    assert asked == [
        ("google/vit", texts),
        ("google/vit", (*texts, "model.safetensors")),
    ]

    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(hub_package, "snapshot_download", fail)
    with pytest.raises(ValueError, match="model.safetensors and the .json.*no network"):
        converters.dense_model("hf://google/vit")


def test_what_has_gates():
    model = hub.make("DINOV2Backbone", use_swiglu_ffn=True)
    with pytest.raises(ValueError, match="MLPs with gates .SwiGLU."):
        converters.dense_model(model)


def test_clip_and_dinov3():
    sizes = {"patch_size": 4, "hidden_dim": 8, "num_layers": 1, "num_heads": 2}
    clip = keras_hub.models.CLIPVisionEncoder(
        intermediate_dim=12, image_shape=hub.SHAPE, **sizes
    )
    with pytest.raises(ValueError, match="QuickGELU"):
        converters.dense_model(clip)
    dino = keras_hub.models.DINOV3Backbone(
        intermediate_dim=12, image_shape=hub.SHAPE, **sizes
    )
    with pytest.raises(ValueError, match="RoPE"):
        converters.dense_model(dino)


def test_other_models():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="ViTBackbone.*Received: Sequential"):
        converters.dense_model(model)
    for wrong in (3, None, [model]):
        with pytest.raises(ValueError, match="a model, a name or a path"):
            converters.dense_model(wrong)
    with pytest.raises(ValueError, match="Did you mean.*vit_base_patch16_224_imagenet"):
        converters.dense_model("vit_base_patch16_224_imagenet22k")
    with pytest.raises(ValueError, match="of 'keras_softmoe>LIMoEBackbone'"):
        converters.dense_model("limoe_tiny_patch8_8e_32_icons")
    with pytest.raises(TypeError, match="`num_heads`"):
        converters.dense_model("vit_tiny_patch8_32_icons", num_head=3)


def test_adapted_models():
    model = hub.make("ViTBackbone")
    model.enable_lora(2)
    with pytest.raises(ValueError, match="lora_kernel_a"):
        converters.dense_model(model)


def test_pooling_of_a_class_token():
    model = hub.MODELS["ViTImageClassifier"](pooling="gap")
    with pytest.raises(ValueError, match="pooling='gap'.*led by a class token"):
        converters.dense_model(model)


def test_epsilons_that_differ():
    # Its last one is always that of 1e-6.
    model = hub.make("SigLIPVisionEncoder", layer_norm_epsilon=1e-3)
    with pytest.raises(ValueError, match="different epsilon"):
        converters.dense_model(model)


def test_preset_that_cannot_be_fetched(monkeypatch):
    def fail(*_, **__):
        raise OSError("no network")

    for cls in (keras_hub.models.ImageClassifier, keras_hub.models.Backbone):
        monkeypatch.setattr(cls, "from_preset", fail)
    with pytest.raises(ValueError, match="save_to_preset.*no network"):
        converters.dense_model("vit_base_patch16_224_imagenet21k")
    assert find_file("vit_base_patch16_224_imagenet21k") is None
