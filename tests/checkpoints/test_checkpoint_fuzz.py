"""Damaged checkpoints by the hundred: read as they are, or refused, at little cost."""

import pytest

from benchmarks.torture.campaign import Tally
from benchmarks.torture.checkpoints import damaged_checkpoints, own_checkpoint
from tests.support.references import unpack_checkpoints

ROUNDS = 800
REFERENCE_ROUNDS = {"misc_ckpt_1234": 200, "sub_ckpt": 200, "ckpt": 12}


def fuzz(contents, rounds):
    """How many of the mutated checkpoints were read, and how many refused."""
    tally = Tally("checkpoints")
    read = damaged_checkpoints(tally, contents, rounds, seed=0)
    assert not tally.failures
    return read, tally.refusals["CheckpointError"]


def test_own_checkpoint():
    read, refused = fuzz(own_checkpoint(), ROUNDS)
    # Wrong are only numbers in arrays, or names of arrays: nobody can tell.
    assert read > ROUNDS // 50
    assert refused > ROUNDS // 2


@pytest.mark.parametrize("name", REFERENCE_ROUNDS)
def test_reference_checkpoints(name, tmp_path):
    unpack_checkpoints(tmp_path)
    contents = {
        path.name.removeprefix(name): path.read_bytes()
        for path in tmp_path.glob(f"{name}.*")
    }
    rounds = REFERENCE_ROUNDS[name]
    _, refused = fuzz(contents, rounds)
    assert refused > rounds // 4
