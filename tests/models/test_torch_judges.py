"""Models of `timm` and `transformers`, saved by themselves: they are the judges.

Without these packages the tests are skipped; the twin that they are compared with here
is the judge then, in `test_torch_files.py`.
"""

import numpy as np
import pytest
import torch

from keras_softmoe import converters
from tests.skips import needs
from tests.support import tiny, torch_twin
from tests.support.close import assert_near

SHAPE, LARGER = (12, 12, 3), (20, 20, 3)
SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "mlp_ratio": 2,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 3,
}
# Class of the model, of its configuration, and settings of that.
TRANSFORMERS = {
    "ViTModel": ("ViTConfig", {}),
    "ViTForImageClassification": ("ViTConfig", {"hidden_act": "gelu_pytorch_tanh"}),
    "DeiTModel": ("DeiTConfig", {"layer_norm_eps": 1e-3}),
    "Dinov2Model": ("Dinov2Config", {}),
    "Dinov2WithRegistersModel": (
        "Dinov2WithRegistersConfig",
        {"num_register_tokens": 2},
    ),
    "SiglipVisionModel": ("SiglipVisionConfig", {}),
}
TIMM = {
    "ViT": {"num_classes": 3},
    "ViT, no head": {"num_classes": 0},
    "DINOv2 with registers": {
        "num_classes": 0,
        "init_values": 1e-5,
        "reg_tokens": 4,
        "no_embed_class": True,
    },
    "registers with positions": {"num_classes": 0, "reg_tokens": 2},
    "SigLIP": {"num_classes": 0, "class_token": False, "global_pool": "map"},
    "gap": {
        "num_classes": 3,
        "class_token": False,
        "global_pool": "avg",
        "fc_norm": False,
    },
}


def randomize(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            is_scale |= "lambda" in name or "gamma" in name
            values = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values + is_scale)
    return model.eval()


def channels_first(images):
    return torch.from_numpy(np.moveaxis(images, -1, 1).copy())


def assert_close(ours, expected):
    ours, expected = (x.detach().cpu().numpy() for x in (ours, expected))
    assert_near(ours, expected, atol=1e-4)


@pytest.fixture
def hugging_face(tmp_path):
    transformers = needs("transformers")

    def make(name):
        config, settings = TRANSFORMERS[name]
        sizes = {**SIZES, **settings}
        model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
        randomize(model).save_pretrained(tmp_path / "model")
        return model, tmp_path / "model"

    return make


@pytest.mark.parametrize("shape", [SHAPE, LARGER], ids=["native", "larger"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(hugging_face, name, shape):
    theirs, folder = hugging_face(name)
    images = tiny.images(2, shape)
    if shape == SHAPE or name.startswith("Dinov2"):
        expected = theirs(channels_first(images))
    else:
        expected = theirs(channels_first(images), interpolate_pos_encoding=True)
    ours = converters.dense_model(folder, image_shape=shape)
    if name.endswith("Classification"):
        assert_close(ours(images), expected.logits)
        return
    outputs = ours(images)
    assert_close(outputs["sequence_output"], expected.last_hidden_state)
    assert_close(outputs["pooled_output"], expected.pooler_output)


def test_twin_of_transformers(hugging_face):
    for name, kind in {
        "ViTModel": "vit",
        "Dinov2Model": "dinov2",
        "Dinov2WithRegistersModel": "dinov2",
    }.items():
        theirs, folder = hugging_face(name)
        images = tiny.images(2, SHAPE)
        saved = converters.read_checkpoint(folder / "model.safetensors")
        tokens, vector = torch_twin.forward(kind, dict(saved), images)
        expected = theirs(channels_first(images))
        for ours, other in (
            (tokens, expected.last_hidden_state),
            (vector, expected.pooler_output),
        ):
            assert_near(ours, other.detach().numpy(), atol=1e-4)


@pytest.fixture
def timm():
    return needs("timm.models").vision_transformer


@pytest.mark.parametrize("shape", [SHAPE, LARGER], ids=["native", "larger"])
@pytest.mark.parametrize("name", TIMM)
def test_timm(timm, tmp_path, name, shape):
    save_file = needs("safetensors.torch").save_file
    arguments = {"img_size": 12, "patch_size": 4, "embed_dim": 12, "depth": 2}
    arguments |= {"num_heads": 3, "mlp_ratio": 2, "dynamic_img_size": True}
    theirs = randomize(timm.VisionTransformer(**arguments, **TIMM[name]))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    ours = converters.dense_model(
        tmp_path / "model.safetensors", image_shape=shape, num_heads=3
    )
    images = tiny.images(2, shape)
    expected = theirs(channels_first(images))
    if TIMM[name]["num_classes"]:
        assert_close(ours(images), expected)
        return
    outputs = ours(images)
    tokens = theirs.forward_features(channels_first(images))
    assert_close(outputs["sequence_output"], tokens)
    assert_close(outputs["pooled_output"], expected)
