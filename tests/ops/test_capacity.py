"""Slots per expert."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from keras_softmoe import ops, routers
from tests.support import twins


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
    assert ops.expert_capacity(16, 4, 1.05) == 4
    assert ops.expert_capacity(16, 4, 1.05, rounding="ceil") == 5
    assert ops.expert_capacity(16, 4, 1.05, rounding="ceil", multiple_of=4) == 8
    assert ops.expert_capacity(196, 8, 1.05, rounding="ceil", multiple_of=4) == 28
    # 10 / 4 = 2.5: Python rounds halves to the even neighbour.
    assert ops.expert_capacity(10, 4, 1.0) == 2


# Constructors of the routers, by the arguments that make one choice or slot per token.
ONE_EACH = {
    routers.SoftmaxTokenChoiceRouter: {"capacity_factor": 1.0},
    routers.SinkhornTokenChoiceRouter: {"capacity_factor": 1.0},
    routers.SoftmaxExpertChoiceRouter: {},
    routers.SinkhornExpertChoiceRouter: {},
    routers.SparseTransportExpertChoiceRouter: {},
    routers.LIMoERouter: {"capacity_factor": 1.0, "losses": ()},
}


@pytest.mark.parametrize("make", ONE_EACH, ids=lambda make: make.__name__)
def test_routers_have_the_papers_slots_by_default(make):
    # 196 / 128 = 1.53: two slots, four in the released code.
    router = make(128, **ONE_EACH[make])
    assert router.capacity(196) == ops.expert_capacity(196, 128, 1.0) == 2
    released = make(128, rounding="ceil", multiple_of=4, **ONE_EACH[make])
    assert released.capacity(196) == 4
    # Files say which it is, so older ones keep theirs.
    for kept, (rounding, multiple_of) in (
        (router, ("round", None)),
        (released, ("ceil", 4)),
    ):
        config = kept.get_config()
        assert (config["rounding"], config["multiple_of"]) == (rounding, multiple_of)
        assert kept.clone("other").capacity(196) == kept.capacity(196)


@pytest.mark.parametrize("make", ONE_EACH, ids=lambda make: make.__name__)
def test_less_than_half_a_slot(make):
    # 7 / 16 = 0.44
    router = make(16, **ONE_EACH[make])
    with pytest.raises(ValueError, match="less than one slot.*tokens=7.*'ceil'"):
        router.capacity(7)
    assert make(16, rounding="ceil", **ONE_EACH[make]).capacity(7) == 1


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
