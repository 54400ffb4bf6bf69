"""The plan: against models that are built, routers that route, and by hand.

Its sizes are those of `distribution/sizes.py`.
"""

import math
import re

import keras
import numpy as np
import pytest

from keras_softmoe import models, presets, routers, training
from keras_softmoe.distribution import layout_map, plan
from keras_softmoe.evaluation import cost
from tests.support import tiny, tiny_limoe

DEVICES = 8
SOFT = {"router": routers.SoftRouter(8, slots_per_expert=2)}
TOKEN_CHOICE = {
    "router": routers.SoftmaxTokenChoiceRouter(
        8, num_selected_experts=2, eval_capacity_factor=0.5
    ),
    "group_images": 2,
}
LIMOE = {
    **tiny_limoe.DISTINCT,
    "moe_layers": (1,),
    "router": routers.LIMoERouter(8, capacity_factor=2.0),
    "group_images": 2,
    "image_pooling": "map",
}
VIT = {
    "soft": {**SOFT, "moe_layers": (0, 1), "pooling": "map"},
    "token choice": TOKEN_CHOICE,
    "expert choice": {
        "router": routers.SoftmaxExpertChoiceRouter(8, capacity_factor=2.0),
        "pooling": "gap",
        "use_qk_norm": True,
    },
    "uniform": {"router": routers.SoftRouter(8, dispatch="uniform", combine="uniform")},
    "identity": {"router": routers.IdentityRouter(8), "group_images": 8},
    "two kinds": {
        "router": [
            routers.SoftRouter(8),
            routers.SoftmaxExpertChoiceRouter(16, capacity_factor=4.0),
        ],
        "moe_layers": (0, 1),
        "representation_dim": 6,
    },
    "dense": tiny.DENSE,
}


def limoe(**changes):
    return models.LIMoEBackbone(**{**LIMOE, **changes})


def by_hand(variables, mesh_shape, shard_dense=False):
    """Bytes on one device, variable by variable, from the rules of the placement."""
    batch, experts = mesh_shape
    shape = (experts,) if batch == 1 else mesh_shape
    mesh = keras.distribution.DeviceMesh(
        shape, ["batch", "expert"][: len(shape)], np.arange(batch * experts)
    )
    layouts = layout_map(mesh, shard_dense)
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    total = 0
    for variable in variables:
        layout = layouts[variable.path]
        parts = math.prod(sizes[axis] for axis in layout.axes if axis) if layout else 1
        numbers, rest = divmod(math.prod(variable.shape), parts)
        assert not rest
        total += numbers * (2 if variable.dtype == "bfloat16" else 4)
    return total


@pytest.mark.parametrize("name", VIT)
def test_weights_are_those_of_a_model_cut_by_hand(name):
    model = tiny.backbone(**VIT[name])
    for shard_dense in (False, True):
        found = plan(model, DEVICES, 1e9, shard_dense=shard_dense)
        shapes = [mesh.shape for mesh in found.meshes]
        splits = [(8, 1), (4, 2), (2, 4), (1, 8)]
        assert shapes == (splits if model.moe_layers else splits[:1])
        for mesh in found.meshes:
            assert mesh.weights == by_hand(model.weights, mesh.shape, shard_dense)
            assert mesh.gradients == mesh.weights


def test_weights_of_a_classifier_in_half_precision():
    model = tiny.classifier({"head_dtype": "float32"}, dtype="bfloat16", **SOFT)
    for mesh in plan(model, DEVICES, 1e9).meshes:
        assert mesh.weights == by_hand(model.weights, mesh.shape)
    config = model.backbone.get_config()
    with_head = plan(config, DEVICES, 1e9, num_classes=tiny.NUM_CLASSES)
    head = 2 * (tiny.NUM_CLASSES * (8 + 1))
    for mesh in with_head.meshes:
        expected = by_hand(model.backbone.weights, mesh.shape) + head
        assert mesh.weights == expected


@pytest.mark.parametrize("shard_dense", [False, True])
def test_weights_of_a_limoe(shard_dense):
    model = limoe()
    for mesh in plan(model, DEVICES, 1e9, shard_dense=shard_dense).meshes:
        assert mesh.weights == by_hand(model.weights, mesh.shape, shard_dense)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        ("adam", 2),
        (keras.optimizers.SGD(0.1), 0),
        (keras.optimizers.SGD(0.1, momentum=0.9), 1),
        (keras.optimizers.Lion(gradient_accumulation_steps=2), 2),
        (keras.optimizers.AdamW(use_ema=True), 3),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop()), 1),
    ],
)
def test_moments_are_what_the_optimizer_keeps(optimizer, copies):
    # None of its weights is a single number, as those that the optimizer counts with.
    model = tiny.backbone(dtype="bfloat16", **TOKEN_CHOICE)
    found = plan(model, DEVICES, 1e9, optimizer=optimizer)
    assert [mesh.moments for mesh in found.meshes] == [
        copies * mesh.weights for mesh in found.meshes
    ]
    # Planning does not touch it
    optimizer = keras.optimizers.get(optimizer)
    assert not optimizer.built
    optimizer.build(model.trainable_variables)
    kept = [v for v in optimizer.variables if v.shape != ()]
    assert by_hand(kept, (8, 1)) == found.meshes[0].moments


@pytest.mark.parametrize(
    "optimizer", ["adafactor", training.Adafactor(), keras.optimizers.Muon()]
)
def test_optimizers_without_whole_copies(optimizer):
    with pytest.raises(ValueError, match="whole copies.*Received: optimizer="):
        plan(tiny.backbone(**SOFT), DEVICES, 1e9, optimizer=optimizer)


def test_activations_grow_with_the_images_of_a_device():
    config = tiny.backbone(**TOKEN_CHOICE).get_config()
    one, three = (
        plan(config, DEVICES, 1e9, batch_size=size).meshes[-1].activations
        for size in (DEVICES * 2, DEVICES * 6)
    )
    assert three == 3 * one
    half = plan(config, DEVICES, 1e9, dtype="mixed_bfloat16").meshes[-1]
    assert 0.5 * one < half.activations < one
    masks = plan(config, DEVICES, 1e9, dropout_rate=0.1, expert_dropout_rate=0.1)
    # A byte for each number: 10 tokens, twice in both blocks, and the hidden width of
    # 8 experts' slots
    capacity = config["router"]["config"]["capacity_factor"]
    slots = 8 * routers.SoftmaxTokenChoiceRouter(
        8, num_selected_experts=2, capacity_factor=capacity
    ).capacity(10)
    assert masks.meshes[-1].activations - one == 10 * 2 * 2 * 8 + slots * 12


def test_rematerialized_experts_keep_their_slots():
    config = tiny.backbone(**TOKEN_CHOICE).get_config()
    kept, again = (
        plan(config, DEVICES, 1e9, remat_experts=remat).meshes[-1].activations
        for remat in (False, True)
    )
    capacity = config["router"]["config"]["capacity_factor"]
    slots = 8 * routers.SoftmaxTokenChoiceRouter(
        8, num_selected_experts=2, capacity_factor=capacity
    ).capacity(10)
    assert kept - again == slots * 3 * 12 * 4


if keras.backend.backend() == "jax":

    def test_activations_are_near_what_xla_keeps():
        import jax

        model = models.ViTMoEBackbone(
            image_shape=(32, 32, 3),
            patch_size=4,
            num_layers=2,
            num_heads=4,
            hidden_dim=64,
            mlp_dim=256,
            moe_layers=(1,),
            router=routers.SoftRouter(64),
            pooling="gap",
        )
        weights = [v.value for v in model.trainable_variables]
        rest = [v.value for v in model.non_trainable_variables]

        def loss(weights, images):
            outputs, _ = model.stateless_call(weights, rest, images, training=True)
            return keras.ops.mean(outputs["pooled_output"] ** 2)

        images = jax.ShapeDtypeStruct((16, *model.image_shape), "float32")
        compiled = jax.jit(jax.grad(loss)).lower(weights, images).compile()
        # Beside arguments and results
        kept = compiled.memory_analysis().temp_size_in_bytes
        planned = plan(model, 1, 1e9, batch_size=16).meshes[0].activations
        assert 0.9 < planned / kept < 1.35


def test_meshes_that_fit():
    config = tiny.backbone(**TOKEN_CHOICE).get_config()
    found = plan(config, DEVICES, 1e9, batch_size=32)
    assert found.fitting == found.meshes
    for mesh in found.meshes:
        parts = mesh.weights + mesh.moments + mesh.gradients + mesh.activations
        assert mesh.total == parts
    # Memory between two of them
    repeated, *others = found.meshes
    assert repeated.total > max(mesh.total for mesh in others)
    tight = plan(config, DEVICES, repeated.total - 1, batch_size=32)
    assert [mesh.shape for mesh in tight.fitting] == [(4, 2), (2, 4), (1, 8)]
    assert tight.meshes[0].max_batch_size == 16
    for mesh in tight.meshes:
        largest = mesh.max_batch_size
        for batch_size, fits in ((largest, True), (largest + 16, False)):
            again = plan(config, DEVICES, tight.memory, batch_size=batch_size)
            assert fits == (mesh.shape in [found.shape for found in again.fitting])
    hopeless = plan(config, DEVICES, 100)
    assert not hopeless.fitting
    assert {mesh.max_batch_size for mesh in hopeless.meshes} == {0}


def test_meshes_divide_the_experts_and_what_else_is_cut():
    config = tiny.backbone(router=routers.SoftRouter(6)).get_config()
    shapes = [mesh.shape for mesh in plan(config, 12, 1e9).meshes]
    assert shapes == [(12, 1), (6, 2), (4, 3), (2, 6)]
    # A width of 8
    cut = [mesh.shape for mesh in plan(config, 12, 1e9, shard_dense=True).meshes]
    assert cut == [(4, 3), (2, 6)]


def test_table():
    found = plan(
        "soft_moe_huge_patch14_256e_224", 64, 80e9, batch_size=1024, optimizer="lion"
    )
    title, setting, header, *rows = str(found).splitlines()
    assert title == (
        "soft_moe_huge_patch14_256e_224: 54.1 B parameters, 53.7 B of them in experts"
    )
    assert setting.startswith(
        "64 devices of 80 GB, batches of 1024, Lion with 1 moment;"
    )
    columns = "mesh,weights,moments,gradients,activations,total,moved in a step,fits"
    assert re.split("  +", header) == [*columns.split(","), "largest batch"]
    labels = "64, data parallel|32 x 2|16 x 4|8 x 8|4 x 16|2 x 32|64, one axis"
    assert [row.split("  ")[0] for row in rows] == labels.split("|")
    repeated, one_axis = (re.split("  +", rows[i]) for i in (0, -1))
    assert repeated[1] == f"{cost(found.name).weight_bytes / 1e9:.2f}" == "216.56"
    assert repeated[-2:] == ["no", "0"]
    mesh = found.meshes[-1]
    assert one_axis[1:] == [
        *(f"{size / 1e9:.2f}" for size in (mesh.weights,) * 3),
        f"{mesh.activations / 1e9:.2f}",
        f"{mesh.total / 1e9:.2f}",
        f"{mesh.moved / 1e9:.2f}",
        "yes",
        f"{mesh.max_batch_size:,}",
    ]


def test_every_preset_has_a_plan():
    # Every fourth: there are more than a hundred.
    for name in presets.names()[::4]:
        found, expected = plan(name, DEVICES, 80e9), cost(name)
        data_parallel, *others = found.meshes
        assert data_parallel.shape == (DEVICES, 1)
        assert data_parallel.weights == expected.weight_bytes
        weights = [mesh.weights for mesh in found.meshes]
        assert weights == sorted(weights, reverse=True)
        assert len(set(weights)) == len(weights)
        assert bool(others) == bool(found.expert_parameters)
        assert found.parameters == expected.parameters


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ((0, 1e9), {}, "`devices` must be a positive integer.*devices=0"),
        ((8.0, 1e9), {}, "`devices` must be a positive integer.*devices=8.0"),
        ((8, 0), {}, "`memory` must be a finite number over 0.*memory=0"),
        ((8, "80GB"), {}, "memory='80GB'"),
        ((8, 1e9), {"batch_size": 24}, "multiple of 16: 8 devices times 2.*size=24"),
        ((8, 1e9), {"batch_size": -16}, "`batch_size` must be a positive integer"),
        ((8, 1e9), {"group_images": None}, "cannot be divided.*group_images=None"),
        ((8, float("inf")), {}, "finite.*memory=inf"),
        ((8, float("nan")), {}, "finite.*memory=nan"),
        ((8, 1e9), {"optimizer": "adamant"}, "adamant"),
        ((8, 1e9), {"optimizer": None}, "`optimizer` must be the name.*optimizer=None"),
        ((8, 1e9), {"depth": 3}, "also depth"),
    ],
)
def test_what_cannot_be_planned(arguments, changes, message):
    config = tiny.backbone(**TOKEN_CHOICE).get_config()
    with pytest.raises(ValueError, match=message):
        plan(config, *arguments, **changes)


def test_unknown_preset():
    with pytest.raises(ValueError, match="Unknown preset 'soft_moe_hgue'"):
        plan("soft_moe_hgue", 8, 1e9)


def test_any_number_of_devices():
    config = tiny.backbone(**TOKEN_CHOICE).get_config()
    with pytest.raises(ValueError, match="`devices`.*at most 1,048,576"):
        plan(config, 10**9, 80e9)
    # Only numbers that divide the experts are tried.
    found = plan(config, 2**20, 80e9)
    assert [mesh.shape[1] for mesh in found.meshes] == [1, 2, 4, 8]
