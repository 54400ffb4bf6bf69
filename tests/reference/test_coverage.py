"""No file and no case of the reference numbers is passed over."""

import re

import pytest

from tests.reference import (
    INEXPRESSIBLE,
    test_reference_layers as layers,
    test_reference_models as models,
    test_reference_ops as ops,
    test_reference_routers as routers,
    test_reference_training as training,
    test_reference_transport as transport,
    test_reference_two_towers as two_towers,
)
from tests.support.references import NUMBERS, Reference

# File -> cases, where its arrays belong to cases. The tests of the other files compare
# all arrays at once.
CASES = {
    "bc_ties": ops.TIES,
    "j_posembed_resize": [*ops.ZOOMS, *ops.OTHER_TOKENS, *ops.GRIDS],
    "bc_layer_even": layers.SPARSE_CASES,
    "bc_layer_odd": layers.SPARSE_CASES,
    **{
        name: [
            *routers.TOKEN_CHOICE_CASES,
            *routers.NOISY_TOKEN_CHOICE,
            "metrics_det_k1",
            "metrics_det_k2",
        ]
        for name in routers.TOKEN_CHOICE_FILES
    },
    **{
        name: [*routers.EXPERT_CHOICE_CASES, routers.NOISY_EXPERT_CHOICE]
        for name in routers.EXPERT_CHOICE_FILES
    },
    **{
        f"{prefix}_{size}": cases
        for prefix, cases in transport.TRANSPORT.items()
        for size in transport.SIZES
    },
    "l_optimizers": [*training.OPTIMIZERS, *training.GRADIENTS],
}
WHOLE_FILES = [
    "i_capacity",
    "h_schedules",
    *layers.SOFT_FILES,
    *models.MODELS,
    *training.TRAINED,
    *two_towers.TOWERS,
]
SHARED_ARRAYS = {"inputs", "gates", "logits", "softmax", "cotangent"}


def excused(name, key):
    return any(
        re.fullmatch(file, name) and re.fullmatch(pattern, key)
        for file, pattern in INEXPRESSIBLE
    )


def test_every_file_is_named():
    files = {p.stem for p in NUMBERS.glob("*.npz")}
    letters = "a b c d bc e f h i j l".split()
    ours = {name for name in files if name.split("_")[0] in letters}
    assert ours == {*CASES, *WHOLE_FILES}


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_named(name):
    arrays = Reference(name)
    expressible = [k for k in arrays.keys if not excused(name, k)]
    assert {k.split("/")[0] for k in expressible if "/" in k} - {"params"} == set(
        CASES[name]
    )
    assert {k for k in expressible if "/" not in k} <= SHARED_ARRAYS


@pytest.mark.parametrize("file, key", INEXPRESSIBLE)
def test_every_excuse_is_used(file, key):
    names = [n for n in [*CASES, *WHOLE_FILES] if re.fullmatch(file, n)]
    assert any(re.fullmatch(key, k) for n in names for k in Reference(n).keys)
