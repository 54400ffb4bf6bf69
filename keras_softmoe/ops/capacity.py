"""The capacity of experts: their number of slots."""

import math

from keras_softmoe.checks import check_choice, check_numbers

# The nearest whole number, as in the papers: the default of all routers
ROUNDING, MULTIPLE_OF = "round", None
_ROUNDINGS = {"round": round, "ceil": math.ceil}
ROUNDINGS = tuple(_ROUNDINGS)

# The settings of the released V-MoE code and its checkpoints
RELEASED = {"rounding": "ceil", "multiple_of": 4}


def expert_capacity(
    num_tokens: int,
    num_experts: int,
    capacity_factor: float,
    rounding: str = ROUNDING,
    multiple_of: int | None = MULTIPLE_OF,
) -> int:
    """Return the number of slots per expert.

    It is `num_tokens * capacity_factor / num_experts`, rounded. The released V-MoE code
    rounds up, then up to a multiple of four: `rounding="ceil", multiple_of=4`. Experts
    compute all their slots, filled or not.

    Args:
        num_tokens: int, the number of choices that need slots in a group: tokens times
            experts per token for token choice, tokens for expert choice.
        num_experts: int, number of experts.
        capacity_factor: float, slots per choice.
        rounding: `"round"` (to the nearest integer, halves to the even one) or
            `"ceil"`.
        multiple_of: int or `None`. The result is rounded up to a multiple of it.

    Returns:
        int, the number `C` of slots per expert.

    Raises:
        ValueError: if the rounded ratio is under one slot, or an argument is invalid.

    Source: V-MoE, section 2.4 (buffer capacity); Soft MoE, section 3.

    Examples:
        >>> ksm.ops.expert_capacity(196, num_experts=128, capacity_factor=1.0)
        2
    """
    check_choice("rounding", rounding, ROUNDINGS)
    check_numbers(over=0, capacity_factor=capacity_factor)
    if num_tokens < 1 or num_experts < 1 or (multiple_of or 0) < 0:
        raise ValueError(
            "`num_tokens` and `num_experts` must be positive, and `multiple_of` "
            f"positive or `None`. Received: num_tokens={num_tokens}, "
            f"num_experts={num_experts}, multiple_of={multiple_of}."
        )
    return rounded_capacity(
        num_tokens, num_experts, capacity_factor, rounding, multiple_of
    )


def rounded_capacity(num_tokens, num_experts, capacity_factor, rounding, multiple_of):
    """Return `expert_capacity` of arguments that were checked before."""
    # The order of operations matters where the ratio is close to a half or a whole
    # number.
    capacity = _ROUNDINGS[rounding](num_tokens * capacity_factor / num_experts)
    if capacity < 1:
        raise ValueError(
            "An expert would get less than one slot. Received: "
            f"num_tokens={num_tokens}, num_experts={num_experts}, "
            f"capacity_factor={capacity_factor}, rounding={rounding!r}. Raise "
            "`capacity_factor`, route larger groups, or round up with 'ceil'."
        )
    if multiple_of:
        capacity += -capacity % multiple_of
    return capacity
