"""Training on eight devices: the same numbers, and what is sent on the way."""

import numpy as np
import pytest

from keras_softmoe.distribution import plan
from tests.distribution.conftest import jax_only
from tests.support import tiny_distributed as tiny
from tests.support.close import assert_near

pytestmark = jax_only

KINDS = ("soft", "token choice")
# Of the kinds that are trained there
PLACED = [
    ("soft", "one axis"),
    *(("token choice", name) for name in ("data parallel", "one axis", "2 x 4")),
]
MESHES = {"data parallel": (8, 1), "one axis": (1, 8), "2 x 4": (2, 4)}


def sent(told, *names):
    return [c for c in told["collectives"] if c["name"] in names]


def touches_experts(collective):
    """Whether a size is among the shapes that only expert variables have."""
    return any(size % 5 == 0 for shape in collective["shapes"] for size in shape)


@pytest.mark.parametrize(("kind", "placement"), PLACED)
def test_losses_and_predictions_are_those_of_one_device(found, kind, placement):
    alone, told = found["training"][kind]["one device"], found["training"][kind]
    losses = told[placement]["losses"]
    assert len(losses) == 20
    assert_near(losses, alone["losses"], rtol=0, atol=1e-4)
    assert losses[-1] < 0.7 * losses[0]
    predictions = told[placement]["predictions"]
    assert_near(predictions, alone["predictions"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_travel_and_nothing_is_gathered(found, kind):
    told = found["training"][kind]["one axis"]
    assert len(sent(told, "all-to-all")) == 4
    assert {c["name"] for c in told["collectives"]} == {"all-to-all", "all-reduce"}
    assert not any(map(touches_experts, told["collectives"]))


def test_every_router_and_every_layer_costs_four_all_to_alls(found_more):
    for kind, collectives in found_more["compiled_steps"].items():
        told = {"collectives": collectives}
        layers = 2 if kind == "two layers" else 1
        assert len(sent(told, "all-to-all")) == 4 * layers, kind
        assert {c["name"] for c in collectives} == {"all-to-all", "all-reduce"}, kind
        assert not any(map(touches_experts, collectives)), kind
    assert len(found_more["compiled_steps"]) == 7


@pytest.mark.parametrize("kind", ["balanced", "race"])
def test_weights_that_follow_choices_are_those_of_one_device(found, kind):
    alone, placed = found["states"][kind]
    assert np.any(alone)
    assert_near(placed, alone, rtol=1e-4, atol=1e-6)


def test_replicas_of_experts_exchange_their_gradients_only(found):
    told = found["training"]["token choice"]["2 x 4"]
    assert len(sent(told, "all-to-all")) == 4
    assert {c["name"] for c in told["collectives"]} == {"all-to-all", "all-reduce"}
    of_experts = [c for c in told["collectives"] if touches_experts(c)]
    # Each once: two kernels, one bias of the hidden width
    shapes = [shape for c in of_experts for shape in c["shapes"]]
    assert sum(any(size % 5 == 0 for size in shape) for shape in shapes) == 3
    assert {c["name"] for c in of_experts} == {"all-reduce"}


def test_data_parallel_training_only_sums_gradients(found):
    told = found["training"]["token choice"]["data parallel"]
    assert {c["name"] for c in told["collectives"]} == {"all-reduce"}


@pytest.mark.parametrize(("kind", "placement"), PLACED)
def test_the_plan_says_how_much_is_sent(found, kind, placement):
    told = found["training"][kind][placement]
    planned = plan(
        tiny.backbone(kind), 8, 1e9, batch_size=tiny.BATCH, num_classes=tiny.NUM_CLASSES
    )
    (mesh,) = (m for m in planned.meshes if m.shape == MESHES[placement])
    moved = sum(collective["bytes"] for collective in told["collectives"])
    assert mesh.moved == pytest.approx(moved, rel=0.1)
    of_slots = sum(collective["bytes"] for collective in sent(told, "all-to-all"))
    planned = [t for t in mesh.transfers if t.operation == "all-to-all"]
    assert sum(t.times * t.bytes for t in planned) == of_slots


@pytest.mark.parametrize("kind", KINDS)
def test_moments_lie_with_their_experts(found, kind):
    moments = dict(found["training"][kind]["one axis"]["moments"])
    assert len(moments) == (10 if kind == "soft" else 8)
    for path, (shape, shard) in moments.items():
        axis = 1 if "router_mu" in path else 0
        shape[axis] //= tiny.NUM_EXPERTS
        assert shard == shape, path


def test_what_adafactor_keeps_lies_with_its_experts(found_more):
    told = found_more["adafactor"]
    assert_near(told["one axis"], told["one device"], rtol=0, atol=1e-4)
    kept = {
        "kernel_momentum": (16, 20),
        "kernel_mean_of_axis_1": (1, 20),
        "kernel_mean_of_axis_2": (16, 1),
        "bias_momentum": (1, 20),
        "bias_velocity": (1, 20),
    }
    for name, rest in kept.items():
        shape, shard = told["shards"][f"intermediate_dense_{name}"]
        assert (shape, shard) == ([tiny.NUM_EXPERTS, *rest], [1, *rest]), name
    assert len(told["shards"]) == 2 * len(kept)


def test_factors_of_lora_lie_with_their_experts(found_more):
    alone, told = found_more["adapters"]["one device"], found_more["adapters"]["2 x 4"]
    for name in ("losses", "predictions", "merged", "int8"):
        assert_near(told[name], alone[name], rtol=0, atol=1e-4)
    assert_near(told["merged"], told["predictions"], rtol=0, atol=1e-4)
    assert len(sent(told, "all-to-all")) == 4
    assert {c["name"] for c in told["collectives"]} == {"all-to-all", "all-reduce"}
    own = tiny.NUM_EXPERTS // 4
    for name, width, units in (("intermediate", 16, 20), ("output", 20, 16)):
        bank = {"kernel": (width, units), "bias": (1, units)}
        expected = bank | {"lora_kernel_a": (width, 2), "lora_kernel_b": (2, units)}
        quantized = bank | {"kernel_scale": (1, units)}
        for shards, shapes in (
            (told["shards"], expected),
            (told["shards of int8"], quantized),
        ):
            of_bank = {k: v for k, v in shards.items() if k.startswith(f"{name}_dense")}
            assert of_bank == {
                f"{name}_dense/{variable}": [own, *shape]
                for variable, shape in shapes.items()
            }


def test_expert_bytes_fall_with_the_number_of_devices(found):
    told = {int(count): value for count, value in found["expert_bytes"].items()}
    # E (D H + H + H D + D) for the experts, D E C for mu, four bytes each
    total = 4 * (8 * (2 * 16 * 20 + 20 + 16) + 16 * 8 * 2)
    assert told == {n: [total // n, total // n] for n in (1, 2, 4, 8)}


@pytest.mark.parametrize("placement", MESHES)
def test_a_batch_of_any_size_is_trained_on(found, placement):
    told = found["training"]["token choice"]
    alone = told["one device"]["rest"]
    # The loss of a step, then loss and accuracy of an evaluation
    assert len(alone) == 3
    assert_near(told[placement]["rest"], alone, rtol=0, atol=1e-4)


def test_dense_kernels_are_sharded_on_request(found_more):
    alone, told = (
        found_more["dense_part"][name] for name in ("one device", "one axis")
    )
    for placed in (told, found_more["dense_part"]["2 x 4"]):
        assert_near(placed["losses"], alone["losses"], rtol=0, atol=1e-5)
    kernels = {
        "patch_embedding/projection/kernel": [2, 2, 3, 2],
        "block_0/attention/query/kernel": [2, 2, 8],
        "block_0/attention/attention_output/kernel": [2, 8, 2],
        "block_0/mlp/intermediate_dense/kernel": [2, 20],
        "block_0/mlp/output_dense/kernel": [20, 2],
        "block_1/moe/experts/output_dense/kernel": [1, 20, 16],
    }
    assert {path: told["shards"][path] for path in kernels} == kernels
    moments = {p: shard for p, shard in told["shards"].items() if "_momentum" in p}
    assert [2, 20] in moments.values()
    assert told["shards"]["block_0/mlp/output_dense/bias"] == [16]


def test_groups_that_do_not_divide_among_devices_are_told(found):
    (message,) = found["split_groups"]
    assert "16 images makes 4 groups" in message
    assert "group_images=4" in message


@pytest.mark.parametrize("placement", ("one device", *MESHES))
def test_presets_are_the_same_on_every_placement(found, placement):
    assert found["presets"][placement]


def test_presets_in_several_files_and_in_half_precision(found):
    files, equal = found["presets"]["several files"]
    assert files > 1
    assert equal
    assert found["presets"]["half precision"]


def test_experts_in_a_model_of_ones_own_are_placed(found):
    layer = "sequential/soft_mo_e/moe"
    assert found["own_model"] == {
        f"{layer}/router/mu": [8, 1, 1],
        f"{layer}/experts/intermediate_dense/kernel": [1, 8, 20],
        f"{layer}/experts/intermediate_dense/bias": [1, 1, 20],
        f"{layer}/experts/output_dense/kernel": [1, 20, 8],
        f"{layer}/experts/output_dense/bias": [1, 1, 8],
    }


@pytest.mark.parametrize("placement", ["one axis", "2 x 4"])
def test_experts_of_any_layer_are_placed(found_more, placement):
    told, one = found_more["experts_of_any_layer"], 8 if placement == "one axis" else 4
    expected = told["one device"]["losses"]
    np.testing.assert_allclose(told[placement]["losses"], expected, rtol=1e-5)
    # Each step has moved the weights.
    assert len(set(expected)) == 3
    shards = told[placement]["shards"]
    assert shards["stacked_in_kernel"] == [8 // one, 8, 20]
    assert shards["stacked_out_bias"] == [8 // one, 8]
    assert shards["gate_dense/kernel"] == [8 // one, 8, 20]
    assert not any("shared" in path for path in shards)


def test_a_model_may_be_built_by_its_first_batch(found_more):
    told = found_more["built_by_data"]
    np.testing.assert_allclose(told["one axis"], told["one device"], rtol=1e-5)
    assert told["shards"] == [1, 1, 1, 1]


def test_use_outside_of_the_distribution_is_told(found):
    (message,) = found["outside"]
    assert "block_0/moe" in message
    assert "set_distribution" in message


def test_what_is_right_is_not_refused(found):
    assert found["accepted"] == {"output": None, "stranger": None}


def test_the_table_says_what_each_device_holds(found):
    table = found["training"]["soft"]["one axis"]["audit"].splitlines()
    assert table[0].split()[:3] == ["variable", "shape", "layout"]
    rows = {line.split()[0]: line for line in table[2:]}
    kernel = rows["block_0/moe/experts/output_dense/kernel"]
    assert "8 x 20 x 16" in kernel
    assert "batch, -, -" in kernel
    assert kernel.split()[-2:] == ["1,280", "10,240"]
    assert "replicated" in rows["predictions/kernel"]


def test_an_indivisible_number_of_experts_makes_no_weight(found):
    told = found["refused"]
    assert told["indivisible"].startswith("PlacementError: 12 experts do not divide")
    assert "mesh_shape=(2, 4)" in told["indivisible"]
    assert told["made before"] == []
    assert told["divisible"] is None


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("misspelt", ["match", ".*/expert/output_dense/kernel"]),
        ("task", ["match", ".*/expert/output_dense/kernel"]),
        ("duplicate", ["block_0/moe/experts/output_dense/kernel", ".*/experts/"]),
        ("uncut", ["block_0/moe/experts/intermediate_dense/kernel", "replicated"]),
        ("built outside", ["block_0/moe/experts/output_dense/bias", "not made under"]),
        ("narrow", ["patch_embedding/projection/kernel", "shard_dense"]),
    ],
)
def test_what_is_misplaced_is_refused_by_name(found, case, words):
    message = found["refused"][case]
    assert message.startswith("PlacementError: ")
    for word in words:
        assert word in message
