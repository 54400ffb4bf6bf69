"""The audit, of models on one device, under distributions that need none.

Rules and layouts are those of `distribution/layouts.py`.
"""

import keras
import numpy as np
import pytest

from keras_softmoe import distribution, layers, models, routers
from keras_softmoe.distribution import PlacementError, audit, layout_map
from tests.support import tiny, tiny_limoe

KERNEL = r".*/experts/(intermediate|output)_dense/kernel"


def mesh(*shape):
    """A mesh of devices that are names only."""
    count = int(np.prod(shape))
    names = [f"cpu:{index}" for index in range(count)]
    return keras.distribution.DeviceMesh(
        shape, ["batch", "expert"][: len(shape)], names
    )


def rules(layouts, shape=(8,)):
    """Keras' own distribution with a layout map written by hand."""
    result = keras.distribution.LayoutMap(mesh(*shape))
    for path, axes in layouts.items():
        result[path] = axes
    return keras.distribution.ModelParallel(layout_map=result)


def backbone(num_experts=8, **changes):
    return tiny.backbone(**{"router": routers.SoftRouter(num_experts), **changes})


def problems(model, placed):
    with pytest.raises(PlacementError) as caught:
        audit(model, placed)
    assert all(problem in str(caught.value) for problem in caught.value.audit.problems)
    return caught.value.audit.problems


def naming(found, *words):
    """The problems that have all of some words."""
    return [problem for problem in found if all(word in problem for word in words)]


def test_every_replicated_expert_variable_is_named():
    model = backbone()
    found = problems(model, rules(dict(layout_map(mesh(8)).items())))
    paths = [v.path for v in model.variables if "experts/" in v.path or "/mu" in v.path]
    assert len(paths) == 5
    for path in paths:
        assert len(naming(found, repr(path), "replicated on every device")) == 1
    assert len(found) == 5


def test_replicated_moments_are_named():
    model = tiny.classifier(router=routers.SoftRouter(8))
    model.compile(keras.optimizers.Adam())
    model.optimizer.build(model.trainable_variables)
    found = problems(model, rules(dict(layout_map(mesh(8)).items())))
    path = f"{model.optimizer.name}/block_1_moe_experts_output_dense_kernel_velocity"
    assert len(naming(found, path, "replicated on every device")) == 1
    # Five variables, and two moments of each
    assert len(found) == 15


AXES = ("batch", None, None)
OUTPUT = "block_1/moe/experts/output_dense/kernel"
MISSPELT = r".*/expert/output_dense/kernel"
# Keras found it anywhere in a path up to version 3.13.
PARTIAL = "experts/output_dense/kernel"
SECOND = r".*output_dense/kernel"


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ({MISSPELT: AXES}, [repr(MISSPELT), "Nothing has a path"]),
        ({MISSPELT: AXES}, ["output_dense/kernel'", "no rule matches"]),
        ({PARTIAL: AXES}, [repr(PARTIAL), "Nothing has a path"]),
        (
            {KERNEL: AXES, SECOND: AXES},
            ["Several rules", OUTPUT, repr(KERNEL), repr(SECOND)],
        ),
        ({KERNEL: (None, "batch", None)}, [OUTPUT, "does not shard that axis"]),
        (
            {r".*/mlp/output_dense/kernel": ("batch",)},
            ["block_0/mlp/output_dense/kernel", "1 axes"],
        ),
        # (12, 8) into 8
        (
            {r".*/mlp/output_dense/kernel": ("batch", None)},
            ["block_0/mlp/output_dense/kernel", "cannot be sharded"],
        ),
    ],
)
def test_problems_are_named(layouts, words):
    assert naming(problems(backbone(), rules(layouts)), *words)


def test_layers_whose_slots_no_rule_lays_out_are_named():
    found = problems(backbone(), rules({KERNEL: ("batch", None, None)}))
    for name in ("slots_of_groups", "slots_of_experts"):
        assert naming(found, f"block_1/moe/experts/{name}", "No rule lays out")


def test_replicas_are_no_problem_where_they_are_meant():
    model = backbone()
    rows = audit(model, keras.distribution.DataParallel(device_mesh=mesh(8))).rows
    assert [row.path for row in rows] == [v.path for v in model.variables]
    assert sum(row.is_expert for row in rows) == 5


def test_a_dense_model_has_nothing_to_spread():
    placed = rules(dict(layout_map(mesh(8)).items()))
    found = audit(tiny.backbone(**tiny.DENSE), placed)
    assert not any(row.is_expert for row in found.rows)
    assert found.total_bytes == found.bytes_per_device


def test_without_a_distribution_there_is_nothing_to_compare_with():
    with pytest.raises(ValueError, match="`distribution` must be given.*Received"):
        audit(backbone())


@pytest.mark.parametrize("what", ["model", layers.SoftMoE(8, mlp_dim=12)])
def test_only_what_is_built_can_be_looked_at(what):
    placed = keras.distribution.DataParallel(device_mesh=mesh(8))
    with pytest.raises(ValueError, match="built.*Received: model="):
        audit(what, placed)


@pytest.mark.parametrize(
    "layouts", [[1], {"(": ("batch",)}, {KERNEL: "batch"}, {KERNEL: None}]
)
def test_rules_of_another_kind_are_refused(layouts):
    with pytest.raises(ValueError, match="Received: "):
        layout_map(mesh(8), layouts=layouts)


def test_the_table_adds_up():
    placed = keras.distribution.DataParallel(device_mesh=mesh(8))
    model = tiny.backbone(**tiny.DENSE)
    lines = str(audit(model, placed)).splitlines()
    # Heading, a line, variables, a line, sum
    assert len(lines) == len(model.variables) + 4
    numbers = sum(int(np.prod(v.shape)) for v in model.variables)
    assert lines[-1].split() == ["sum", f"{4 * numbers:,}", f"{4 * numbers:,}"]


LIMOE = {**tiny_limoe.DISTINCT, "image_pooling": "map", "moe_layers": (1,)}


def in_own_model():
    return keras.Sequential(
        [keras.Input((4, 8)), layers.SoftMoE(8, mlp_dim=12), layers.SoftMoE(8, 12)]
    )


MODELS = {
    "soft": backbone,
    "map": lambda: backbone(pooling="map", use_qk_norm=True, representation_dim=5),
    "limoe": lambda: models.LIMoEBackbone(**LIMOE, router=routers.LIMoERouter(8)),
    "own": in_own_model,
}
NUM_EXPERT_VARIABLES = {"soft": 5, "map": 5, "limoe": 4, "own": 10}


@pytest.mark.parametrize("kind", MODELS)
def test_each_expert_variable_has_one_rule_that_cuts_its_experts(kind):
    model = MODELS[kind]()
    layouts = layout_map(mesh(2, 4), shard_dense=True)
    placed = keras.distribution.DataParallel(device_mesh=mesh(8))
    expert = {row.path: row for row in audit(model, placed).rows if row.is_expert}
    assert len(expert) == NUM_EXPERT_VARIABLES[kind]
    for variable in model.variables:
        # Raises if two of them match.
        layout = layouts[variable.path]
        if variable.path in expert:
            axis = list(variable.shape).index(8) if "/mu" not in variable.path else 1
            assert layout.axes[axis] == "expert"
            assert variable.shape[axis] == 8
        elif "kernel" in variable.path and "moe" not in variable.path:
            is_head = "pre_logits" in variable.path or "_projection" in variable.path
            assert (layout is None) == is_head, variable.path
        else:
            assert layout is None or "embedding" in variable.path


def test_layouts_of_our_own_add_to_the_rules_or_replace_them():
    name = next(iter(distribution.layouts.EXPERT_RULES))
    layouts = layout_map(
        mesh(2, 4),
        layouts={name: ("batch", None, None), ".*/mine": (("batch", "expert"),)},
    )
    path = "block_1/moe/experts/output_dense/kernel"
    assert layouts[path].axes == ("batch", None, None)
    assert layouts["layer/mine"].axes == (("batch", "expert"),)
    with pytest.raises(ValueError, match="Invalid axis names"):
        layout_map(mesh(8), layouts={".*/mine": (("batch", "expert"),)})
