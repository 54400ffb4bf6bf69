"""Which blocks are mixtures of experts."""

import pytest

from keras_softmoe.models import moe_blocks


def test_every_second_block():
    assert moe_blocks(8, 2) == moe_blocks(8, every=2) == (1, 3, 5, 7)
    assert moe_blocks(8, every=3) == (2, 5)
    assert moe_blocks(3) == moe_blocks(3, every=1) == (0, 1, 2)
    assert moe_blocks(5, every=5) == (4,)


def test_the_last_of_every_second_block():
    # V-MoE, appendix E.1: "the last two layers, 21 and 23"
    assert moe_blocks(24, every=2, last=2) == (21, 23)
    # "Last 5" of the 32 blocks of V-MoE-H/14
    assert moe_blocks(32, every=2, last=5) == (23, 25, 27, 29, 31)
    # With an odd number of blocks the last one stays dense, as in Every-2.
    assert moe_blocks(5, every=2, last=1) == (3,)
    assert moe_blocks(12, every=2, last=6) == moe_blocks(12, every=2)


def test_the_second_half():
    assert moe_blocks(12, last=6) == (6, 7, 8, 9, 10, 11)
    assert moe_blocks(3, last=2) == (1, 2)
    assert moe_blocks(1, last=1) == (0,)


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        ({"num_layers": 8, "every": 0}, "every=0, num_layers=8"),
        ({"num_layers": 8, "every": 9}, "every=9, num_layers=8"),
        ({"num_layers": 8, "every": 2.0}, "every=2.0, num_layers=8"),
        # `[-0:]` would be all of them.
        ({"num_layers": 8, "every": 2, "last": 0}, "last=0, num_layers=8"),
        ({"num_layers": 8, "every": 2, "last": 5}, "last=5, num_layers=8"),
        ({"num_layers": 8, "last": 9}, "last=9, num_layers=8"),
        ({"num_layers": 0}, "num_layers=0"),
    ],
)
def test_impossible_placements(arguments, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        moe_blocks(**arguments)
