"""Costs of LIMoE, for a pair: against models that are built."""

import numpy as np
import pytest

from keras_softmoe import models, routers
from keras_softmoe.evaluation import cost
from tests.support.products import check_cost, count
from tests.support.tiny_limoe import DISTINCT

ROUTER = routers.LIMoERouter(4, capacity_factor=2.0)
SPARSE = {"moe_layers": (1,), "router": ROUTER}
MODELS = {
    "dense": {},
    "pooled by attention": {
        "image_pooling": "map",
        "text_pooling": "last",
        "use_qk_norm": True,
        "logit_bias": -10.0,
        "image_shape": (8, 12, 1),
        "patch_size": (4, 2),
    },
    "both pooled by attention": {"image_pooling": "map", "text_pooling": "map"},
    # Groups of 7 tokens: one-hot products
    "joint": {**SPARSE, "group_images": 1},
    # Groups of 70 tokens: rows are moved
    "joint, large groups": {**SPARSE, "group_images": 10},
    "einsum": {**SPARSE, "group_images": 10, "dispatcher": "einsum"},
    "a router for each modality": {
        **SPARSE,
        "router": routers.LIMoERouter(4, 2, per_modality=True, losses=()),
        "group_images": 2,
    },
    "disjoint": {
        **SPARSE,
        "router": routers.LIMoERouter(4, image_experts=3, text_experts=1),
        "group_images": 3,
    },
    "pruned": {
        "moe_layers": (0, 1),
        "router": [
            routers.LIMoERouter(
                2, kept_experts=(1, 4), num_predicted_experts=5, losses=()
            ),
            routers.LIMoERouter(
                1,
                kept_experts=(0,),
                num_predicted_experts=3,
                per_modality=True,
                losses=(),
            ),
        ],
        "group_images": 2,
    },
    "soft": {**SPARSE, "router": routers.SoftRouter(3), "group_images": 1},
}


def backbone(**changes):
    return models.LIMoEBackbone(**{**DISTINCT, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_model_that_is_built(name):
    model = backbone(**MODELS[name])
    size = model.group_images
    inputs = {
        "images": np.zeros((size, *model.image_shape), "float32"),
        "token_ids": np.zeros((size, model.sequence_length), "int32"),
    }
    check_cost(model, inputs, size)


def test_bytes_follow_the_policy():
    for dtype in ("bfloat16", "mixed_bfloat16"):
        model = backbone(**SPARSE, logit_bias=0.0, dtype=dtype)
        assert (cost(model).parameters, cost(model).weight_bytes) == count(model)


def test_task_and_preset(tmp_path):
    model = backbone(**SPARSE, dtype="bfloat16")
    found = cost(model)
    assert cost(models.LIMoEContrastive(model)) == found
    model.save_to_preset(str(tmp_path / "preset"))
    assert cost(tmp_path / "preset") == found
    changes = {"sequence_length": 7, "dtype": "float32", "embedding_dim": 3}
    changed = backbone(**{**SPARSE, **changes})
    assert cost(tmp_path / "preset", **changes) == cost(changed)


def test_settings_of_routers():
    model = backbone(**SPARSE, group_images=12)
    # 168 slots for 12 pairs, then 84; two products of 8 x 12
    before, after = cost(model), cost(model, capacity_factor=1.0)
    saved = 2e-9 * 84 * 2 * 8 * 12 / 12
    assert before.gflop_per_image - after.gflop_per_image == pytest.approx(saved)
    # Pairs are not one modality.
    assert cost(model, single_modality_capacity_factor=1.0) == before
    twice = cost(model, num_selected_experts=2).gflop_per_image
    assert twice - before.gflop_per_image == pytest.approx(2 * saved)
    # The whole batch: counted as one pair
    assert cost(model, group_images=None) == cost(model, group_images=1)
    assert cost({**DISTINCT, **SPARSE}) == cost(model, group_images=32)


class Finder(models.LIMoEContrastive):
    """A task of one's own that adds no weights."""


def test_not_a_model():
    model = backbone()
    assert cost(Finder(model)) == cost(model)
    towers = type("Towers", (), {"backbone": model})()
    with pytest.raises(ValueError, match="`LIMoEContrastive`.*Received: model=<.*Tow"):
        cost(towers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": 10}, "no head.*num_classes=10"),
        ({"pooling": "gap"}, "arguments of `LIMoEBackbone`.*Received: also pooling"),
        ({"capacity_factor": 1.0}, "no routers to set. Received: capacity_factor"),
        ({"keep_fraction": 0.5, **SPARSE}, "no such setting"),
        ({"moe_layers": (0,)}, r"moe_layers=\(0,\), router=None"),
        ({"patch_size": 3}, r"patch_size=\(3, 3\)"),
    ],
)
def test_configurations_that_cannot_be_counted(changes, message):
    assert cost(DISTINCT).parameters > 0
    with pytest.raises(ValueError, match=message):
        cost(DISTINCT, **changes)


def test_a_dict_without_an_image():
    arguments = {name: DISTINCT[name] for name in ("vocabulary_size", "patch_size")}
    with pytest.raises(ValueError, match="no image_shape, sequence_length, num_layers"):
        cost(arguments)
