"""What the plan says is sent: against routers that route, and compiled steps."""

import numpy as np
import pytest

from keras_softmoe import routers
from keras_softmoe.distribution import plan
from keras_softmoe.evaluation import cost
from tests.distribution.conftest import jax_only
from tests.distribution.test_mesh_plan import DEVICES, SOFT, TOKEN_CHOICE
from tests.support import tiny, tiny_distributed as tiny_models
from tests.support.gradients import recorded


def mesh_of(planned, shape):
    (mesh,) = (mesh for mesh in planned.meshes if mesh.shape == shape)
    return mesh


def transfers(planned, shape):
    sent = mesh_of(planned, shape).transfers
    return {t.what: (t.operation, t.times, t.bytes, t.over) for t in sent}


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (SOFT, {}),
        (TOKEN_CHOICE, {}),
        ({**TOKEN_CHOICE, "group_images": 4}, {"capacity_factor": 2.0}),
        ({"router": routers.SoftmaxExpertChoiceRouter(8, 2.0)}, {}),
        ({"router": routers.IdentityRouter(8), "group_images": 8}, {}),
        ({**SOFT, "dtype": "mixed_bfloat16"}, {}),
    ],
)
def test_slots_that_travel_are_those_of_the_router(arguments, settings):
    model = tiny.backbone(**arguments, pooling="gap")
    model.set_routing(**settings)
    moe, group = model.get_layer("block_1").moe, model.group_images
    tokens = np.random.default_rng(0).normal(size=(group, 4, 8)).astype("float32")
    _, (routing, _) = recorded(moe, tokens, training=True)
    table = routing.token if hasattr(routing, "token") else routing.dispatch[:, 0]
    _, num_experts, slots = table.shape
    itemsize = 2 if arguments.get("dtype") else 4
    # Three groups on each device
    size = 3 * num_experts * slots * 8 * itemsize
    batch_size = 3 * DEVICES * group
    arguments = tiny.backbone(**arguments, pooling="gap").get_config()
    found = plan(arguments, DEVICES, 1e9, batch_size=batch_size, **settings)
    for shape, experts in (((1, 8), 8), ((2, 4), 4)):
        moved = transfers(found, shape)["block_1/moe: slots"]
        assert moved == ("all-to-all", 4, size, experts)
    assert "block_1/moe: slots" not in transfers(found, (8, 1))


def test_what_moves_on_each_mesh():
    # Of 8 experts: kernels 8 x 12 and 12 x 8, biases 12 and 8
    experts = 8 * (8 * 12 + 12 * 8 + 12 + 8) * 4
    mu = 8 * 16 * 4
    model = tiny.backbone(**SOFT)
    others = cost(model).weight_bytes - experts
    found = plan(model, DEVICES, 1e9)
    gradients = "block_1/moe: gradients of experts"
    slots = ("all-to-all", 4, 16 * 8 * 4)
    assert transfers(found, (1, 8)) == {
        "block_1/moe: slots": (*slots, 8),
        "block_1/moe: slot parameters": ("all-reduce", 1, mu, 8),
        "other gradients": ("all-reduce", 1, others, 8),
    }
    assert transfers(found, (2, 4)) == {
        "block_1/moe: slots": (*slots, 4),
        "block_1/moe: slot parameters": ("all-reduce", 1, mu, 4),
        gradients: ("all-reduce", 1, experts // 4, 2),
        "other gradients": ("all-reduce", 1, others, 8),
    }
    assert transfers(found, (8, 1)) == {
        gradients: ("all-reduce", 1, experts, 8),
        "other gradients": ("all-reduce", 1, others, 8),
    }
    one_axis = found.meshes[-1]
    assert one_axis.moved == 4 * 16 * 8 * 4 + mu + others
    alone = plan(model, 1, 1e9).meshes
    assert [mesh.transfers for mesh in alone] == [()]


def test_dense_kernels_are_gathered_where_they_are_cut():
    model = tiny.backbone(**SOFT)
    whole, cut = (plan(model, DEVICES, 1e9, shard_dense=s) for s in (False, True))
    for before, after in zip(whole.meshes, cut.meshes, strict=True):
        new = {t.what: t for t in set(after.transfers) - set(before.transfers)}
        gathered = new.pop("dense kernels")
        over = max(8 // after.shape[1], 1) if after.shape[0] > 1 else 8
        assert (gathered.operation, gathered.over) == ("all-gather", over)
        # What is gathered is what was cut.
        saved = before.weights - after.weights
        assert saved == gathered.bytes * (over - 1) // over > 0
        # Their gradients go along the axis that cuts them, pieces along the other.
        batch, experts = after.shape
        sums = {(t.operation, t.bytes, t.over) for t in new.values()}
        if 1 in after.shape:
            assert not new
        else:
            others = next(t for t in before.transfers if t.what == "other gradients")
            assert sums == {
                ("all-reduce", gathered.bytes, batch),
                ("all-reduce", gathered.bytes // batch, experts),
                ("all-reduce", others.bytes - gathered.bytes, 8),
            }


def test_what_pairs_add():
    found = plan(tiny_models.limoe(), DEVICES, 1e9, batch_size=16)
    # Attention and norms of two blocks, the MLP of one, the last norm
    attention, norm = 4 * (16 * 16 + 16), 2 * 16
    mlp = 16 * 20 + 20 + 20 * 16 + 16
    shared = 4 * (2 * (attention + 2 * norm) + mlp + norm)
    embeddings = 16 * 24 * 4
    for shape in ((8, 1), (2, 4), (1, 8)):
        told = transfers(found, shape)
        assert {what: t for what, t in told.items() if what.startswith("pairs")} == {
            "pairs: gradients of the second modality": ("all-reduce", 1, shared, 8),
            "pairs: embeddings": ("all-gather", 2, embeddings, 8),
            "pairs: gradients of embeddings": ("all-reduce", 1, embeddings, 8),
            "pairs: most similar images": ("all-gather", 2, 8 * 16 * 4, 8),
        }
    assert plan(tiny_models.limoe(), 1, 1e9).meshes[0].transfers == ()
    assert "pairs" not in str(plan(tiny.backbone(**SOFT), DEVICES, 1e9).meshes)


def bytes_of(collectives):
    return sum(collective["bytes"] for collective in collectives)


@jax_only
def test_the_plan_says_what_pairs_send(found_more):
    told = found_more["pairs"]
    planned = plan(tiny_models.limoe(), DEVICES, 1e9, batch_size=tiny_models.BATCH)
    mesh = mesh_of(planned, (2, 4))
    assert mesh.moved == pytest.approx(bytes_of(told), rel=0.05)
    # No more is gathered than what pairs compare, and some numbers for each.
    gathered = bytes_of(c for c in told if c["name"] == "all-gather")
    of_pairs = [t for t in mesh.transfers if t.operation == "all-gather"]
    expected = sum(t.times * t.bytes for t in of_pairs)
    assert 0 <= gathered - expected <= 10 * 4 * tiny_models.BATCH


@jax_only
@pytest.mark.parametrize(
    ("placement", "shape"), [("one axis", (1, 8)), ("2 x 4", (2, 4))]
)
def test_the_plan_says_what_cut_dense_kernels_send(found_more, placement, shape):
    told = found_more["dense_part"][placement]["collectives"]
    planned = plan(
        tiny_models.backbone("soft", num_layers=2, moe_layers=(1,)),
        DEVICES,
        1e9,
        batch_size=tiny_models.BATCH,
        num_classes=tiny_models.NUM_CLASSES,
        shard_dense=True,
    )
    mesh = mesh_of(planned, shape)
    # Beside the loss and the accuracy
    assert 0 <= bytes_of(told) - mesh.moved <= 16
