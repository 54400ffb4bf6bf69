"""From a checkpoint to a preset directory: configuration, weights, and failures."""

import json
import os
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_softmoe import converters, models, routers
from keras_softmoe.checkpoints import read_vit_settings
from keras_softmoe.models import conversion
from tests.support import checkpoint_writer as writer, tiny
from tests.support.layer_checks import assert_same_weights

ROUTER = routers.SoftmaxTokenChoiceRouter(
    4, num_selected_experts=3, priority="max", capacity_factor=0.5
)
# What a checkpoint alone says: arguments of the backbone.
FOUND = {
    "token choice": {"router": ROUTER, "image_shape": (12, 12, 3)},
    "soft, attention pooling": {
        "pooling": "map",
        "use_qk_norm": True,
        "representation_dim": 5,
        "router": routers.SoftRouter(4, slots_per_expert=2),
        # A square of patches, not of pixels
        "patch_size": (2, 4),
        "image_shape": (4, 8, 3),
    },
    "dense": tiny.DENSE,
}
# What it does not say: arguments of the backbone, and of the conversion.
GIVEN = {
    "rectangle": ({"image_shape": (4, 8, 1)}, ("image_shape",)),
    "no positions": (
        {"position_embedding": "none", "pooling": "gap"},
        ("image_shape", "position_embedding"),
    ),
    "first token": (
        {"position_embedding": "sincos2d", "pooling": "first"},
        ("image_shape", "pooling"),
    ),
}
SHAPE_KEYS = (
    *("image_shape", "patch_size", "num_layers", "num_heads", "hidden_dim"),
    *("mlp_dim", "moe_layers", "pooling", "position_embedding", "use_qk_norm"),
    "representation_dim",
)


def write(prefix, model):
    """Write a model as a checkpoint in the released format."""
    prefix.parent.mkdir(exist_ok=True)
    params = converters.to_vmoe_params(model)
    cuts = {
        name: (range(1, len(array)),) + ((),) * (array.ndim - 1)
        for name, array in params.items()
        if "/Moe/Mlp/" in name
    }
    writer.write_checkpoint(prefix, params, num_shards=2, cuts=cuts)


def convert(model, tmp_path, **arguments):
    write(tmp_path / "ckpt", model)
    target = tmp_path / "preset"
    arguments = {"verbose": 0, **arguments}
    converters.convert_vmoe_checkpoint(tmp_path / "ckpt", target, **arguments)
    return target


@pytest.mark.parametrize("case", FOUND)
def test_configuration_comes_from_the_checkpoint(tmp_path, case):
    model = tiny.classifier(**FOUND[case])
    target = convert(model, tmp_path)
    loaded = models.ViTMoEImageClassifier.from_preset(str(target))
    for key in SHAPE_KEYS:
        assert getattr(loaded.backbone, key) == getattr(model.backbone, key), key
    assert loaded.num_classes == tiny.NUM_CLASSES
    assert_same_weights(loaded, model)
    size = loaded.preprocessor.image_converter.image_size
    assert size == model.backbone.image_shape[:2]
    # The directory is whole, and nothing else is left.
    assert set(os.listdir(tmp_path)) == {
        "preset",
        "ckpt.index",
        *(f"ckpt.data-0000{i}-of-00002" for i in "01"),
    }
    metadata = json.loads((target / "metadata.json").read_text())
    assert metadata["kind"] == "converted"
    assert metadata["checkpoint"] == str(tmp_path / "ckpt")
    assert metadata["parameter_count"] == model.backbone.count_params()


@pytest.mark.parametrize("case", GIVEN)
def test_configuration_that_is_given(tmp_path, case):
    changes, needed = GIVEN[case]
    model = tiny.backbone(**changes)
    given = {key: getattr(model, key) for key in needed}
    target = convert(model, tmp_path, **given)
    loaded = models.ViTMoEBackbone.from_preset(str(target))
    for key in SHAPE_KEYS:
        assert getattr(loaded, key) == getattr(model, key), key
    assert_same_weights(loaded, model)
    # A backbone brings its preprocessing along, too.
    preprocessor = models.ViTMoEImageClassifierPreprocessor.from_preset(str(target))
    assert preprocessor.image_converter.image_size == model.image_shape[:2]


def test_settings_of_the_released_models(tmp_path):
    target = convert(tiny.backbone(router=ROUTER), tmp_path)
    loaded = models.ViTMoEBackbone.from_preset(str(target))
    router = loaded.router
    assert isinstance(router, routers.SoftmaxTokenChoiceRouter)
    assert (router.num_experts, router.num_selected_experts) == (4, 2)
    assert (router.capacity_factor, router.priority) == (1.05, "position")
    assert (router.rounding, router.multiple_of) == ("ceil", 4)
    assert (loaded.group_images, loaded.dispatch_dtype) == (8, "bfloat16")
    target = convert(tiny.backbone(), tmp_path / "soft", dispatch_dtype=None)
    loaded = models.ViTMoEBackbone.from_preset(str(target))
    assert isinstance(loaded.router, routers.SoftRouter)
    assert (loaded.group_images, loaded.dispatch_dtype) == (1, None)


def test_other_settings(tmp_path):
    preprocessor = models.ViTMoEImageClassifierPreprocessor(
        models.ViTMoEImageConverter(image_size=(8, 8), crop_to_aspect_ratio=False)
    )
    target = convert(
        tiny.classifier(router=ROUTER),
        tmp_path,
        router=ROUTER,
        group_images=2,
        dispatch_dtype=None,
        preprocessor=preprocessor,
    )
    loaded = models.ViTMoEImageClassifier.from_preset(str(target))
    router = loaded.backbone.router
    assert (router.num_selected_experts, router.capacity_factor) == (3, 0.5)
    assert (router.priority, router.multiple_of) == ("max", None)
    assert loaded.backbone.group_images == 2
    assert loaded.backbone.dispatch_dtype is None
    assert not loaded.preprocessor.image_converter.resizing.crop_to_aspect_ratio


def test_weights_are_stored_in_float32(tmp_path):
    keras.config.set_dtype_policy("bfloat16")
    target = convert(tiny.backbone(dtype="float32"), tmp_path)
    loaded = models.ViTMoEBackbone.from_preset(str(target), dtype="float32")
    assert_same_weights(loaded, tiny.backbone(dtype="float32"))


def test_state_of_a_training(tmp_path):
    model = tiny.backbone()
    params = {
        f"params/{name}": array
        for name, array in converters.to_vmoe_params(model).items()
    }
    state = {"step": np.array(3), "opt_state/0/count": np.array(3), **params}
    writer.write_checkpoint(tmp_path / "ckpt", state)
    target = tmp_path / "preset"
    converters.convert_vmoe_checkpoint(tmp_path / "ckpt", target, verbose=0)
    assert_same_weights(models.ViTMoEBackbone.from_preset(str(target)), model)


def test_progress_is_shown(tmp_path, capsys):
    convert(tiny.backbone(), tmp_path, verbose=1)
    assert "array" in capsys.readouterr().out


def listing(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def assert_refused(tmp_path, message, error=converters.CheckpointError, **arguments):
    """Converting fails, says so, and leaves no trace."""
    before = listing(tmp_path)
    with pytest.raises(error, match=message):
        converters.convert_vmoe_checkpoint(
            tmp_path / "ckpt", tmp_path / "preset", verbose=0, **arguments
        )
    assert listing(tmp_path) == before


@pytest.fixture(scope="module")
def params():
    return converters.to_vmoe_params(tiny.classifier(router=tiny.SPARSE))


MISSING = "The parameters of a Vision Transformer include"
SPOILED = {
    "embedding/kernel": ((4, 4, 24), MISSING),
    "Encoder/encoderblock_0/SelfAttention/query/kernel": ((8, 8), MISSING),
    "Encoder/encoderblock_0/Mlp/Dense_0/kernel": ((9, 12), MISSING),
    "Encoder/encoderblock_1/Moe/Mlp/Dense_0/kernel": ((4, 8, 13), "equally wide"),
    "Encoder/posembed_input/pos_embedding": ((1, 5, 9), MISSING),
    "head/kernel": ((9, 3), MISSING),
    "cls": ((1, 1, 0), "Parameters without values: cls"),
    # Found when they are loaded
    "head/bias": ((4,), "shape: head/bias"),
    "Encoder/encoder_norm/scale": ((9,), "shape: Encoder/encoder_norm/scale"),
    "strange": ((2,), "unused: strange"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_other_shapes(tmp_path, params, name):
    shape, message = SPOILED[name]
    arrays = params | {name: np.zeros(shape, "f4")}
    writer.write_checkpoint(tmp_path / "ckpt", arrays)
    assert_refused(tmp_path, message, ValueError)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("embedding/", "'embedding/kernel'.*none of that name"),
        ("Encoder/encoderblock_", r"blocks Encoder/encoderblock_0.*\(none\)"),
        ("Encoder/encoderblock_0/", "Received: the blocks 1"),
        ("Encoder/encoder_norm/bias", "missing: Encoder/encoder_norm/bias"),
    ],
)
def test_missing_parameters(tmp_path, params, gone, message):
    arrays = {name: a for name, a in params.items() if not name.startswith(gone)}
    writer.write_checkpoint(tmp_path / "ckpt", arrays)
    assert_refused(tmp_path, message, ValueError)


def test_blocks_that_differ():
    shapes = {
        name: array.shape
        for name, array in converters.to_vmoe_params(tiny.backbone()).items()
    }
    # A thousand blocks of which all but one are a name only: no model of that size.
    shapes |= {f"Encoder/encoderblock_{i}/a": (1,) for i in range(2, 1000)}
    with pytest.raises(converters.CheckpointError, match="the same parameters"):
        read_vit_settings(shapes)


CONTRADICTIONS = {
    "image_shape": ((8, 16, 3), "saved for 4 patches"),
    "router": (routers.SoftmaxTokenChoiceRouter(8), "4 experts.*num_experts=8"),
    "pooling": ("gap", "those of pooling='token'. Received: pooling='gap'"),
    "position_embedding": ("none", "those of position_embedding='learned'"),
}


@pytest.mark.parametrize("argument", CONTRADICTIONS)
def test_arguments_that_contradict_the_checkpoint(tmp_path, params, argument):
    value, message = CONTRADICTIONS[argument]
    writer.write_checkpoint(tmp_path / "ckpt", params)
    assert_refused(tmp_path, message, ValueError, **{argument: value})


def test_size_of_images_that_is_not_given(tmp_path):
    write(tmp_path / "ckpt", tiny.backbone(**GIVEN["rectangle"][0]))
    assert_refused(tmp_path, r"`image_shape=\(height, width", ValueError)


def test_damaged_data(tmp_path, params):
    writer.write_checkpoint(tmp_path / "ckpt", params)
    data = tmp_path / "ckpt.data-00000-of-00001"
    os.truncate(data, data.stat().st_size - 1)
    assert_refused(tmp_path, "fetch it again")


def test_failure_while_writing(tmp_path, params, monkeypatch):
    writer.write_checkpoint(tmp_path / "ckpt", params)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "json", SimpleNamespace(loads=fail))
    assert_refused(tmp_path, None, KeyboardInterrupt)


def test_directory_that_is_not_empty(tmp_path, params):
    writer.write_checkpoint(tmp_path / "ckpt", params)
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "mine.txt").write_text("precious")
    assert_refused(tmp_path, "a new or an empty directory.*preset_dir=", ValueError)
    (tmp_path / "preset" / "mine.txt").unlink()
    converters.convert_vmoe_checkpoint(
        tmp_path / "ckpt", tmp_path / "preset", verbose=0
    )
    assert (tmp_path / "preset" / "config.json").is_file()
