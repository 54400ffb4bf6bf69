"""Costs: against models that are built, against the papers, and at no cost."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_softmoe import distribution, layers, models, ops, presets, routers
from keras_softmoe.evaluation import cost
from keras_softmoe.evaluation.model_cost import described
from tests.models.test_two_towers import image_tower, text_tower
from tests.support import tiny, tiny_limoe
from tests.support.products import check_cost, count

# What rounds up to more slots than the default
RELEASED = {"rounding": "ceil", "multiple_of": 4}
MODELS = {
    "dense": tiny.DENSE,
    "token": {**tiny.DENSE, "pooling": "token", "representation_dim": 5},
    "rectangles": {
        **tiny.DENSE,
        "image_shape": (8, 12, 1),
        "patch_size": (4, 2),
        "pooling": "first",
        "position_embedding": "none",
    },
    "registers": {
        "num_registers": 3,
        "layer_scale": 0.5,
        "activation": "gelu",
        "layer_norm_epsilon": 1e-3,
        "pooling": "gap",
    },
    "map": {**tiny.DENSE, "pooling": "map", "use_qk_norm": True},
    "soft": {
        "router": routers.SoftRouter(4, slots_per_expert=2),
        "moe_layers": (0, 1),
        "pooling": "gap",
        "position_embedding": "sincos2d",
        "use_qk_norm": True,
    },
    "soft, groups": {"group_images": 3},
    "soft, plain": {"router": routers.SoftRouter(3, normalize=False)},
    "uniform, soft": {"router": routers.SoftRouter(4, dispatch="uniform")},
    "uniform": {"router": routers.SoftRouter(4, dispatch="uniform", combine="uniform")},
    "identity": {"router": routers.IdentityRouter(2), "pooling": "gap"},
    # Groups of 10 tokens: one-hot products
    "token choice": {
        "router": routers.SoftmaxTokenChoiceRouter(4, num_selected_experts=2),
        "group_images": 2,
    },
    # Groups of 64 tokens: rows are moved
    "token choice, large groups": {
        "router": routers.SinkhornTokenChoiceRouter(4, capacity_factor=0.75),
        "group_images": 16,
        "pooling": "gap",
    },
    # More slots asked for than there are tokens
    "expert choice": {
        "router": routers.SoftmaxExpertChoiceRouter(3, capacity_factor=6.0),
        "dispatcher": "gather",
    },
    "expert choice, einsum": {
        "router": routers.SinkhornExpertChoiceRouter(2),
        "dispatcher": "einsum",
        "group_images": 16,
        "pooling": "gap",
    },
    "a router for each block": {
        "router": [
            routers.SoftRouter(4),
            routers.SoftmaxTokenChoiceRouter(2, eval_capacity_factor=2.0),
        ],
        "moe_layers": (0, 1),
    },
    "transport": {
        "router": routers.SparseTransportExpertChoiceRouter(
            4, num_iterations=2, **RELEASED
        )
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_model_that_is_built(name):
    model = tiny.backbone(**MODELS[name])
    images = np.zeros((model.group_images, *model.image_shape), "float32")
    check_cost(model, images, model.group_images)


def test_bytes_follow_the_policy():
    for dtype in ("bfloat16", "mixed_bfloat16"):
        model = tiny.backbone(dtype=dtype)
        assert (cost(model).parameters, cost(model).weight_bytes) == count(model)
    arguments = {**model.get_config(), "dtype": None}
    rest = cost(model).parameters - (8 * 4 + 1)
    # A model without a policy of its own follows the global one, routers never.
    for dtype, size in (("float16", 2), ("float32", 4), ("mixed_bfloat16", 4)):
        keras.config.set_dtype_policy(dtype)
        assert cost(arguments).weight_bytes == 4 * (8 * 4 + 1) + size * rest
        assert cost(model).weight_bytes == count(model)[1]


@pytest.mark.parametrize(
    "head", [{}, {"head_dtype": "float32"}, {"head_dtype": "mixed_bfloat16"}]
)
def test_classifier(head):
    model = tiny.classifier(head, dtype="bfloat16", representation_dim=5)
    found = cost(model)
    assert (found.parameters, found.weight_bytes) == count(model)
    backbone = cost(model.backbone)
    assert found.parameters - backbone.parameters == (5 + 1) * tiny.NUM_CLASSES
    products = 1e9 * (found.gflop_per_image - backbone.gflop_per_image) / 2
    assert products == pytest.approx(5 * tiny.NUM_CLASSES)
    # Another head, or one for a backbone
    assert cost(model, 7).parameters == backbone.parameters + (5 + 1) * 7
    assert cost(model.backbone, 7).parameters == cost(model, 7).parameters


def test_presets_and_changes(tmp_path):
    model = tiny.classifier(pooling="gap")
    path = tmp_path / "preset"
    model.save_to_preset(str(path))
    # The backbone alone, like `describe`
    assert cost(path) == cost(str(path)) == cost(model.backbone)
    assert cost(path, tiny.NUM_CLASSES) == cost(model)
    changes = {"image_shape": (16, 8, 3), "dtype": "bfloat16"}
    changed = models.ViTMoEBackbone.from_preset(path, load_weights=False, **changes)
    assert cost(path, **changes) == cost(changed)
    # All costs are recorded in `tests/guards`.
    for name in presets.names()[::40]:
        assert cost(name).parameters == presets.describe(name).parameters


def test_settings_of_routers():
    router = routers.SoftmaxTokenChoiceRouter(4, capacity_factor=2.0)
    model = tiny.backbone(router=router, group_images=16, pooling="gap")
    before, after = cost(model), cost(model, capacity_factor=1.0)
    # 64 of 128 slots for 16 images, two products of 8 x 12
    saved = 2e-9 * 64 * 2 * 8 * 12 / 16
    assert before.gflop_per_image - after.gflop_per_image == pytest.approx(saved)
    assert before.parameters == after.parameters
    model.set_routing(capacity_factor=1.0)
    assert cost(model) == after
    # A group without a size
    assert cost(model, group_images=None) == cost(model, group_images=1)


# V-MoE, table 8: epochs of 305 million images, exaFLOP of training
VMOE_TRAINING = {
    "vmoe_dense_small_patch32_224": (5, 12.27),
    "vmoe_small_patch32_last2_32e_k1_224": (5, 12.50),
    "vmoe_small_patch32_last2_32e_224": (5, 14.40),
    "vmoe_small_patch32_every2_32e_224": (5, 16.53),
    "vmoe_small_patch32_last2_32e_k5_224": (5, 20.44),
    "vmoe_base_patch32_last2_32e_k5_224": (7, 81.75),
    "vmoe_base_patch16_every2_32e_224": (7, 303.24),
    "vmoe_large_patch32_every2_32e_224": (7, 267.10),
    "vmoe_large_patch16_every2_32e_224": (14, 2177.14),
    "vmoe_huge_patch14_last5_32e_224": (14, 4750.73),
}


@pytest.mark.parametrize("name", VMOE_TRAINING)
def test_vmoe_training_flops(name):
    epochs, exaflop = VMOE_TRAINING[name]
    found = cost(name, num_classes=18_291, dispatcher="gather")
    # A step is a forward pass and a backward pass of twice its products.
    total = 3 * found.gflop_per_image * 305e6 * epochs / 1e9
    assert total == pytest.approx(exaflop, rel=0.02)


# Soft MoE, table 10: exaFLOP of 300,000 steps of 4,096 images
SOFT_TRAINING = {
    "vit_small_patch32_224": 4.2,
    "soft_moe_base_patch16_512e_224": 103.1,
    "soft_moe_small_patch8_512e_224": 85.6,
    "expert_choice_base_patch32_64e_224": 16.5,
    "expert_choice_small_patch16_32e_224": 21.5,
    "expert_choice_large_patch16_256e_224": 255.2,
    "token_choice_large_patch32_64e_224": 56.9,
    "token_choice_base_patch16_32e_224": 73.6,
}


@pytest.mark.parametrize("name", SOFT_TRAINING)
def test_soft_moe_training_flops(name):
    found = cost(name, num_classes=29_593, dispatcher="einsum")
    # The paper's training figures count a multiply-add once, unlike its table 9, and
    # its sparse models dispatch by one-hot products.
    total = 3 * (found.gflop_per_image / 2) * 300e3 * 4096 / 1e9
    assert total == pytest.approx(SOFT_TRAINING[name], rel=0.035)


def test_largest_preset_is_not_built():
    script = """
import resource, sys
import keras_softmoe as ksm

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before, loaded = peak(), set(sys.modules)
found = ksm.evaluation.cost("soft_moe_huge_patch14_256e_224", num_classes=29593)
heavy = {"keras_hub", "tensorflow"} & (set(sys.modules) - loaded)
print(found.parameters, peak() - before, *heavy)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ
    )
    assert run.returncode == 0, run.stderr
    parameters, megabytes, *heavy = run.stdout.split()
    assert int(parameters) == 54_177_079_209
    # What the backend itself takes to be imported is not ours.
    assert float(megabytes) < 100
    assert not heavy


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("soft_moe_tni", "Unknown preset 'soft_moe_tni'"),
        ("hf://me/model", "preset='hf://me/model'.*Load it"),
        (routers.SoftRouter(4), "Received: model=<"),
        (None, "Received: model=None"),
        ({"patch_size": 4}, "Received: no image_shape, num_layers"),
    ],
)
def test_not_a_model(model, message):
    with pytest.raises(ValueError, match=message):
        cost(model)


class Strange(routers.Router):
    """A router of an unknown kind."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 12}, "Received: also depth"),
        ({"image_shape": (10, 8, 3)}, r"image_shape=\(10, 8, 3\), patch_size=\(4, 4\)"),
        ({"moe_layers": ()}, r"moe_layers=\(\), router=<"),
        ({"router": None}, r"moe_layers=.*1.*, router=None"),
        ({"router": [routers.SoftRouter(4)] * 2}, r"2 routers for moe_layers=\(1,\)"),
        ({"router": None, "moe_layers": (), "capacity_factor": 1.0}, "capacity_factor"),
        ({"keep_fraction": 0.5}, "no such setting"),
        ({"router": {"class_name": "Nothing", "config": {}}}, "cannot be made"),
        ({"dtype": "int8_from_float32"}, "before they are quantized.*int8_from"),
    ],
)
def test_configurations_that_cannot_be_counted(changes, message):
    config = {**tiny.SIZES, "moe_layers": [1], "router": tiny.SOFT}
    assert cost(config).parameters > 0
    with pytest.raises(ValueError, match=message):
        cost(config, **changes)


def test_router_without_a_call():
    with pytest.raises(TypeError, match="`Strange` is abstract.*implement `call`"):
        cost(tiny.backbone().get_config(), router=Strange(4))


@pytest.mark.parametrize("num_classes", [0, -1, 2.5, "10"])
def test_head_without_classes(num_classes):
    with pytest.raises(ValueError, match=f"num_classes={num_classes!r}"):
        cost("vit_tiny_patch8_32_icons", num_classes=num_classes)


def test_preset_of_another_class(tmp_path):
    config = {"registered_name": "keras_softmoe>Other", "config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'keras_softmoe>Other'"):
        cost(tmp_path)
    (tmp_path / "config.json").write_text('{"registered_name": "keras_softmoe>Vi')
    with pytest.raises(ValueError, match="cannot be read"):
        cost(tmp_path)


def test_layers_of_a_user_are_counted():
    tokens = keras.Input((6, 8))
    block = layers.EncoderBlock(2, keras.layers.Conv1D(8, 1))
    model = keras.Model(tokens, block(tokens))
    found = cost(model)
    assert (found.parameters, found.weight_bytes) == count(model)
    # Four projections and two products of attention, and the convolution
    products = 5 * 6 * 8 * 8 + 2 * 6 * 6 * 8
    assert found.gflop_per_image == pytest.approx(2e-9 * products)


@keras.saving.register_keras_serializable(package="tests")
class EveryOther(routers.Router):
    """Tokens to experts in turn, two slots each, and a weight of its own."""

    def build(self, tokens_shape):
        self.bias = self.add_weight(shape=(tokens_shape[-1],), name="bias")

    def capacity(self, num_tokens, training=False):
        return 2

    def call(self, tokens, valid=None, training=False):
        token = keras.ops.reshape(keras.ops.arange(8), (1, 4, 2))
        token = token + keras.ops.zeros_like(tokens[:, :1, :1], dtype="int32")
        filled = keras.ops.ones_like(token, dtype="bool")
        gate = keras.ops.cast(filled, "float32") * keras.ops.sigmoid(self.bias[0])
        return routers.Decision(ops.SlotRouting(token, filled, gate), {})


def test_a_router_of_a_user_is_counted():
    arguments = {**tiny.SIZES, "moe_layers": (1,), "router": EveryOther(4)}
    arguments |= {"group_images": 16, "pooling": "gap"}
    found = cost(arguments)
    dense = cost({**arguments, "router": None, "moe_layers": ()})
    mlp = (8 + 1) * 12 + (12 + 1) * 8
    assert found.parameters - dense.parameters == 3 * mlp + 8
    # 8 slots instead of 64 tokens for 16 images, two products of 8 x 12
    saved = 2e-9 * (64 - 8) * 2 * 8 * 12 / 16
    assert dense.gflop_per_image - found.gflop_per_image == pytest.approx(saved)
    plan = distribution.plan(arguments, devices=2, memory=1e9)
    slots = [t for t in plan.meshes[-1].transfers if t.what == "block_1/moe: slots"]
    assert [t.bytes for t in slots] == [4 * 8 * 8]


# === Every backbone, from whatever stands for it ===


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
