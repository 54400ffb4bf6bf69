"""How many slots an expert gets."""

import math


def expert_capacity(
    num_tokens, num_experts, capacity_factor, rounding="ceil", multiple_of=4
):
    """Number of slots per expert, from tokens, experts and their ratio.

    `num_tokens * capacity_factor / num_experts`, rounded. With a capacity factor of
    1 there are as many slots as choices, if the choices spread evenly.

    Args:
        num_tokens: int, the number of choices that need slots in a group: tokens times
            experts per token for token choice, tokens for expert choice.
        num_experts: int, number of experts.
        capacity_factor: float, slots per choice.
        rounding: `"ceil"` or `"round"` (to the nearest integer, halves to the even
            one, as Python does).
        multiple_of: int or `None`. The result is rounded up to a multiple of it,
            which some accelerators like; `None`, 0 and 1 leave it as it is.

    Returns:
        int, the number `C` of slots per expert.

    Raises:
        ValueError: if the rounded ratio is under one slot, or an argument is not
            among the accepted values.

    Source: V-MoE, section 2.3 (buffer capacity), which rounds to the nearest
    integer; rounding up and to a multiple of four is what its released code does.

    Example:

    >>> ksm.ops.expert_capacity(196, num_experts=8, capacity_factor=1.05)
    28
    """
    roundings = {"ceil": math.ceil, "round": round}
    if rounding not in roundings:
        raise ValueError(
            "Unknown `rounding`. Accepted: 'ceil', 'round'. "
            f"Received: rounding={rounding!r}."
        )
    if num_tokens < 1 or num_experts < 1 or (multiple_of or 0) < 0:
        raise ValueError(
            "Tokens and experts are counted from 1, and `multiple_of` is a positive "
            f"integer or `None`. Received: num_tokens={num_tokens}, "
            f"num_experts={num_experts}, multiple_of={multiple_of}."
        )
    # This order of operations matters: it decides on which side of a half or of a
    # whole number the ratio falls.
    capacity = roundings[rounding](num_tokens * capacity_factor / num_experts)
    if capacity < 1:
        raise ValueError(
            "An expert would get less than one slot. Raise `capacity_factor`, lower "
            "`num_experts`, or route larger groups of tokens. Received: "
            f"num_tokens={num_tokens}, num_experts={num_experts}, "
            f"capacity_factor={capacity_factor}, rounding={rounding!r}."
        )
    if multiple_of:
        capacity += -capacity % multiple_of
    return capacity
