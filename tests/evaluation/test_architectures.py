"""What can be counted: every backbone, from whatever stands for it."""

import numpy as np
import pytest

from keras_softmoe import distribution, models, routers
from keras_softmoe.evaluation import cost
from keras_softmoe.evaluation.model_cost import described
from tests.models.test_two_towers import image_tower, text_tower
from tests.support import tiny, tiny_limoe
from tests.support.products import check_cost

TEXT = {
    "dense": {},
    "map": {"pooling": "map", "use_qk_norm": True, "dtype": "bfloat16"},
    "experts": {"moe_layers": (0,), "router": routers.SoftRouter(4)},
}


@pytest.mark.parametrize("name", TEXT)
def test_text_towers(name):
    model = text_tower(**TEXT[name])
    check_cost(model, np.ones((1, model.sequence_length), "int32"))


@pytest.mark.parametrize("projects", [False, True])
def test_two_towers(projects):
    dims = {"image_projection_dim": 5, "text_projection_dim": 5} if projects else {}
    model = models.TwoTowerBackbone(
        image_tower(dtype="bfloat16"), text_tower(), **dims, logit_bias=-10.0
    )
    pair = {
        "images": np.zeros((1, *model.image_shape), "float32"),
        "token_ids": np.ones((1, model.sequence_length), "int32"),
    }
    assert cost(models.TwoTowerContrastive(model)) == check_cost(model, pair)


def test_groups_of_each_tower():
    image = tiny.backbone(router=tiny.SPARSE, group_images=8)
    text = text_tower(moe_layers=(0,), router=tiny.SPARSE, group_images=2)
    model = models.TwoTowerBackbone(image, text)
    parts = cost(image).gflop_per_image + cost(text).gflop_per_image
    assert cost(model).gflop_per_image == pytest.approx(parts)
    with pytest.raises(ValueError, match="one tower at a time.*capacity_factor"):
        cost(model, capacity_factor=1.0)
    with pytest.raises(ValueError, match="plan them separately"):
        distribution.plan(model, devices=2, memory=1e9)
    assert distribution.plan(text, devices=2, memory=1e9).parameters > 0


def test_a_saved_text_tower(tmp_path):
    model = text_tower()
    model.save_to_preset(str(tmp_path / "text"))
    assert cost(tmp_path / "text") == cost(model)
    changed = cost(tmp_path / "text", sequence_length=3)
    assert changed.gflop_per_image < cost(model).gflop_per_image


@pytest.mark.parametrize("model", [text_tower, tiny_limoe.backbone])
def test_no_head_without_images_alone(model):
    with pytest.raises(ValueError, match="has no head.*num_classes=3"):
        cost(model(), num_classes=3)


def test_names_and_heads():
    model = tiny.classifier({"head_dtype": "float32", "name": "mine"})
    found = described(model)
    assert (found.name, found.num_classes) == ("mine", tiny.NUM_CLASSES)
    assert found.head_dtype == model.head_dtype
    assert described(model, 7).num_classes == 7
    assert described("vit_base_patch16_224").name == "vit_base_patch16_224"
    assert described({**model.backbone.get_config(), "name": "x"}).name == "x"
