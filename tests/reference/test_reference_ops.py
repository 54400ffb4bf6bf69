"""Capacity, tie breaking and position resampling: the released code's numbers."""

import itertools

import numpy as np
import pytest

from keras_softmoe import ops
from keras_softmoe.ops.position import resample_position_grid
from tests.support import references
from tests.support.close import assert_near

TIES = [
    *(f"k{k}_bpr{b}_C{c}" for k in (1, 2, 4) for b in (0, 1) for c in (1, 3, 5)),
    *(f"expert_choice_C{c}" for c in (1, 3, 5, 12)),
]
ZOOMS = ["tok_up", "tok_up_big", "tok_down", "notok_up", "notok_down", "same"]
OTHER_TOKENS = (
    "tok_to_notok notok_to_tok_array notok_to_tok_struct one_to_many many_to_one"
).split()
GRIDS = ["zoom_2d", "zoom_2d_down", "zoom_3d"]


def test_capacity():
    reference = references.Reference("i_capacity")
    axes = [reference.config[axis] for axis in reference.config["axes"]]
    actual = []
    for arguments in itertools.product(*axes):
        try:
            actual.append(ops.expert_capacity(*arguments))
        except ValueError:
            actual.append(reference.config["raises_value"])
    shape = [len(axis) for axis in axes]
    reference.check("capacity", np.array(actual, "int32").reshape(shape))
    references.finish(reference)


@pytest.mark.parametrize("case", TIES)
def test_ties(case):
    reference = references.Reference("bc_ties")
    gates = reference.given("gates")[None]
    capacity = int(case.rpartition("_C")[2])
    if case.startswith("expert_choice"):
        seats = ops.expert_choice(gates, capacity)
    else:
        priority = "max" if "bpr1" in case else "position"
        seats = ops.token_choice(gates, int(case[1]), capacity, priority=priority)
    routing = references.slot_routing(*seats, gates)
    dispatch, combine = (
        references.to_numpy(w)[0] for w in ops.to_dense(routing, len(gates[0]))
    )
    reference.check(f"{case}/dispatch_weights", dispatch.astype(bool))
    reference.check(f"{case}/combine_weights", combine)
    if case.startswith("expert_choice"):
        references.check_statistics(reference, f"{case}/metrics/", routing, gates)
    else:
        check_indices(
            routing,
            reference.given(f"{case}/indices")[None],
            reference.given(f"{case}/indices_combine_weights")[None],
        )
    references.finish(reference, f"{case}/")


def check_indices(routing, indices, weights):
    """A routing against (expert, slot) and gate of each choice (G, S, K).

    A slot number that reaches the capacity means a dropped choice.
    """
    token, filled, gate = map(references.to_numpy, routing)
    expected_token, expected_gate = np.zeros_like(token), np.zeros_like(gate)
    expected_filled = np.zeros_like(filled)
    for g, s, k in np.ndindex(*weights.shape):
        e, c = indices[g, s, k]
        if c < token.shape[-1]:
            expected_token[g, e, c] = s
            expected_filled[g, e, c] = True
            expected_gate[g, e, c] = weights[g, s, k]
    np.testing.assert_array_equal(filled, expected_filled)
    np.testing.assert_array_equal(token, expected_token)
    assert_near(gate, expected_gate, rtol=2e-5, atol=2e-5)


def split(table):
    """Class token (0 or 1 rows) and square grid of a position table (1, N, D)."""
    table = table[0]
    size = int(len(table) ** 0.5)
    has_token = size * size != len(table)
    size = int((len(table) - has_token) ** 0.5)
    return table[:has_token], table[has_token:].reshape(size, size, -1)


@pytest.mark.parametrize("case", [*ZOOMS, *OTHER_TOKENS])
def test_resampled_position_table(case):
    reference = references.Reference("j_posembed_resize")
    token, grid = split(reference.given(f"{case}/source"))
    expected_token, expected = split(reference.given(f"{case}/output"))
    actual = references.to_numpy(resample_position_grid(grid, *expected.shape[:2]))
    assert_near(actual, expected, rtol=2e-5, atol=2e-5)
    if len(token) and len(expected_token):
        np.testing.assert_array_equal(token, expected_token)
    if f"{case}/target" in reference:
        # A table without a class token takes over that of the target.
        target_token, _ = split(reference.given(f"{case}/target"))
        np.testing.assert_array_equal(target_token, expected_token)
    references.finish(reference, f"{case}/")


@pytest.mark.parametrize("case", GRIDS)
def test_resampled_grid(case):
    reference = references.Reference("j_posembed_resize")
    source = reference.given(f"{case}/source")
    expected = reference.given(f"{case}/output")
    if source.ndim == 2:
        source, expected = source[..., None], expected[..., None]
    actual = resample_position_grid(source, *expected.shape[:2])
    assert_near(references.to_numpy(actual), expected, rtol=2e-5, atol=2e-5)
    references.finish(reference, f"{case}/")
