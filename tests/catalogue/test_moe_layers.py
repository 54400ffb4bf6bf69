"""Which blocks are mixtures of experts."""

import pytest

from keras_softmoe import models


def test_every_n():
    assert models.every_n(8) == models.every_n(8, 2) == (1, 3, 5, 7)
    assert models.every_n(8, 3) == (2, 5)
    assert models.every_n(3, 1) == (0, 1, 2)
    assert models.every_n(5, 5) == (4,)


def test_last_n():
    # V-MoE, appendix E.1: "the last two layers, 21 and 23"
    assert models.last_n(24, 2) == (21, 23)
    # "Last 5" of the 32 blocks of V-MoE-H/14
    assert models.last_n(32, 5) == (23, 25, 27, 29, 31)
    # With an odd number of blocks the last one stays dense, as in Every-2.
    assert models.last_n(5, 1) == (3,)
    assert models.last_n(12, 6) == models.every_n(12, 2)


def test_second_half():
    assert models.second_half(12) == (6, 7, 8, 9, 10, 11)
    assert models.second_half(3) == (1, 2)
    assert models.second_half(1) == (0,)


@pytest.mark.parametrize(
    ("function", "arguments", "received"),
    [
        (models.every_n, (8, 0), "n=0, num_layers=8"),
        (models.every_n, (8, 9), "n=9, num_layers=8"),
        (models.every_n, (8, 2.0), "n=2.0, num_layers=8"),
        # `[-0:]` would be all of them.
        (models.last_n, (8, 0), "n=0, num_layers=8"),
        (models.last_n, (8, 5), "n=5, num_layers=8"),
        (models.last_n, (1, 1), "n=1, num_layers=1"),
        (models.second_half, (0,), "num_layers=0"),
    ],
)
def test_impossible_placements(function, arguments, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        function(*arguments)
