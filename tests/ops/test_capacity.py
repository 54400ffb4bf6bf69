"""Slots per expert."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from keras_softmoe import ops
from tests import twins


@settings(max_examples=300)
@given(
    num_tokens=st.integers(1, 3000),
    num_experts=st.integers(1, 128),
    factor=st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.05, 1.5, 2.0, 4.0]),
    rounding=st.sampled_from(["ceil", "round"]),
    multiple_of=st.sampled_from([None, 0, 1, 3, 4, 8]),
)
def test_capacity(num_tokens, num_experts, factor, rounding, multiple_of):
    arguments = (num_tokens, num_experts, factor, rounding, multiple_of)
    try:
        expected = twins.expert_capacity(*arguments)
    except ValueError:
        with pytest.raises(ValueError, match="Received"):
            ops.expert_capacity(*arguments)
        return
    actual = ops.expert_capacity(*arguments)
    assert actual == expected
    assert isinstance(actual, int)


def test_hand_computed():
    # 16 * 1.05 / 4 = 4.2 -> 5 -> 8.
    assert ops.expert_capacity(16, 4, 1.05) == 8
    # 10 / 4 = 2.5: Python rounds halves to the even neighbour.
    assert ops.expert_capacity(10, 4, 1.0, rounding="round", multiple_of=1) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        (16, 4, 1.0, "floor"),
        (16, 0, 1.0),
        (0, 4, 1.0),
        (16, 4, 0.0),
        (16, 4, -1.0),
        (16, 4, 1.0, "ceil", -4),
    ],
)
def test_bad_arguments_are_named(arguments):
    with pytest.raises(ValueError, match="Received"):
        ops.expert_capacity(*arguments)
