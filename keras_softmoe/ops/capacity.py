"""How many slots an expert gets."""

import math

from keras_softmoe.checks import check_choice, check_numbers

# As the papers have it: the nearest whole number. The default of all routers.
ROUNDING, MULTIPLE_OF = "round", None
_ROUNDINGS = {"round": round, "ceil": math.ceil}
ROUNDINGS = tuple(_ROUNDINGS)

# As the released V-MoE code has it, and so the checkpoints that were trained with it.
RELEASED = {"rounding": "ceil", "multiple_of": 4}


def expert_capacity(
    num_tokens: int,
    num_experts: int,
    capacity_factor: float,
    rounding: str = ROUNDING,
    multiple_of: int | None = MULTIPLE_OF,
) -> int:
    """Number of slots per expert, from tokens, experts and their ratio.

    `num_tokens * capacity_factor / num_experts`, rounded. With a capacity factor of
    1 there are as many slots as choices, up to that rounding.

    Experts compute all their slots, filled or not, so their compute is proportional to
    this number. The released V-MoE code rounds up, and then up to a multiple of four;
    `rounding="ceil", multiple_of=4` reproduces it. That adds little where an expert has
    many slots, and much where it has few: 196 tokens, 128 experts and a factor of 1
    make 2 slots for each expert, and with the released code's rounding 4, which is
    twice the compute.

    The added slots also take choices that would otherwise be dropped. With the default
    a low factor drops what it says (at 0.5 about half of the choices, or more if they
    spread unevenly), and in a small group a little slack is rounded away: 16 choices, 4
    experts and a factor of 1.05 make 4 slots for each expert, none to spare.

    Args:
        num_tokens: int, the number of choices that need slots in a group: tokens times
            experts per token for token choice, tokens for expert choice.
        num_experts: int, number of experts.
        capacity_factor: float, slots per choice.
        rounding: `"round"` (to the nearest integer, halves to the even one, as Python
            does) or `"ceil"`.
        multiple_of: int or `None`. The result is rounded up to a multiple of it,
            which some accelerators like; `None`, 0 and 1 leave it as it is.

    Returns:
        int, the number `C` of slots per expert.

    Raises:
        ValueError: if the rounded ratio is under one slot, or an argument is not
            among the accepted values.

    Source: V-MoE, section 2.4 (buffer capacity); Soft MoE, section 3.

    Examples:
        >>> ksm.ops.expert_capacity(196, num_experts=128, capacity_factor=1.0)
        2
    """
    check_choice("rounding", rounding, ROUNDINGS)
    check_numbers(over=0, capacity_factor=capacity_factor)
    if num_tokens < 1 or num_experts < 1 or (multiple_of or 0) < 0:
        raise ValueError(
            "Tokens and experts are counted from 1, and `multiple_of` is a positive "
            f"integer or `None`. Received: num_tokens={num_tokens}, "
            f"num_experts={num_experts}, multiple_of={multiple_of}."
        )
    # This order of operations matters: it decides on which side of a half or of a
    # whole number the ratio falls.
    capacity = _ROUNDINGS[rounding](num_tokens * capacity_factor / num_experts)
    if capacity < 1:
        raise ValueError(
            "An expert would get less than one slot. Raise `capacity_factor`, lower "
            "`num_experts`, route larger groups of tokens, or round up with "
            "`rounding='ceil'`. Received: "
            f"num_tokens={num_tokens}, num_experts={num_experts}, "
            f"capacity_factor={capacity_factor}, rounding={rounding!r}."
        )
    if multiple_of:
        capacity += -capacity % multiple_of
    return capacity
