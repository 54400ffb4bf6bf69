"""Which blocks of a Transformer are mixtures of experts."""

from keras_softmoe.checks import is_whole_number


def every_n(num_layers: int, n: int = 2) -> tuple:
    """Every `n`-th block, V-MoE's "Every-n".

    Blocks are counted from 0, so these are blocks `n - 1`, `2n - 1`, and so on: with
    `n=2` the second, the fourth, ... Blocks that are left over at the end stay dense.

    Args:
        num_layers: int, number of encoder blocks.
        n: int, from 1 (all blocks) to `num_layers` (the last one, if nothing is left
            over).

    Returns:
        tuple of ints for `moe_layers`, ascending.

    Raises:
        ValueError: if `n` is not from 1 to `num_layers`.

    Source: V-MoE, section 3.1; numbered as in its released code.

    Examples:
        >>> ksm.models.every_n(12, 2)
        (1, 3, 5, 7, 9, 11)
    """
    _check(num_layers, "n", n, num_layers)
    return tuple(range(n - 1, num_layers, n))


def last_n(num_layers: int, n: int) -> tuple:
    """The last `n` of every second block, V-MoE's "Last-n".

    The paper's "last n even blocks": those of `every_n(num_layers, 2)` that are
    nearest to the head. They are not `n` blocks in a row, as in Soft MoE, for which
    there is `second_half`.

    Args:
        num_layers: int, number of encoder blocks.
        n: int, how many mixtures of experts, from 1 to `num_layers // 2`.

    Returns:
        tuple of ints for `moe_layers`, ascending, counted from 0.

    Raises:
        ValueError: if `n` is not from 1 to `num_layers // 2`.

    Source: V-MoE, section 3.1 and appendix E.1 (blocks 21 and 23 of 24).

    Examples:
        >>> ksm.models.last_n(24, 2)
        (21, 23)
    """
    _check(num_layers, "n", n, num_layers // 2)
    return tuple(range(1, num_layers, 2))[-n:]


def second_half(num_layers: int) -> tuple:
    """The second half of the blocks, Soft MoE's placement.

    With an odd number of blocks the one in the middle is among them.

    Args:
        num_layers: int, number of encoder blocks.

    Returns:
        tuple of ints for `moe_layers`, ascending, counted from 0.

    Raises:
        ValueError: if `num_layers` is under one.

    Source: Soft MoE, sections 2.1 and 3.4.

    Examples:
        >>> ksm.models.second_half(12)
        (6, 7, 8, 9, 10, 11)
    """
    _check(num_layers, "num_layers", num_layers, None)
    return tuple(range(num_layers // 2, num_layers))


def _check(num_layers, argument, value, largest):
    is_count = is_whole_number(value)
    if not is_count or (largest is not None and value > largest):
        upto = "" if largest is None else f" and at most {largest}"
        layers = "" if argument == "num_layers" else f", num_layers={num_layers}"
        raise ValueError(
            f"`{argument}` must be an integer, at least 1{upto}. "
            f"Received: {argument}={value!r}{layers}."
        )
