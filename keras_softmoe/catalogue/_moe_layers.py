"""Placement of mixtures of experts in the blocks of a Transformer."""

from keras_softmoe.checks import is_whole_number


def moe_blocks(num_layers: int, every: int = 1, last: int | None = None) -> tuple:
    """Return the indices of the blocks with experts, as in the papers.

    Blocks are counted from 0, so with `every=2` these are the second, the fourth, ...:
    blocks 1, 3, ... Remaining blocks at the end are dense.

    | paper | placement | call |
    |---|---|---|
    | V-MoE | "Every-2" | `moe_blocks(12, every=2)` |
    | V-MoE | "Last-2": the last 2 of every second block | `moe_blocks(24, 2, last=2)` |
    | Soft MoE | the second half of the blocks | `moe_blocks(12, last=6)` |

    V-MoE's "Last-n" does not mean the last `n` blocks in a row.

    Args:
        num_layers: int, number of encoder blocks.
        every: int, distance between mixtures of experts, from 1 (all blocks) to
            `num_layers`.
        last: int or `None`, number of those blocks to keep, counted from the end.
            `None` keeps all.

    Returns:
        tuple of ints for `moe_layers`, ascending.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: V-MoE, section 3.1 and appendix E.1 (blocks 21 and 23 of 24); Soft MoE,
    sections 2.1 and 3.4. Numbered as in V-MoE's released code.

    Examples:
        >>> ksm.models.moe_blocks(12, every=2)
        (1, 3, 5, 7, 9, 11)
        >>> ksm.models.moe_blocks(24, every=2, last=2)
        (21, 23)
        >>> ksm.models.moe_blocks(12, last=6)
        (6, 7, 8, 9, 10, 11)
    """
    _check(num_layers, "num_layers", num_layers, None)
    _check(num_layers, "every", every, num_layers)
    blocks = tuple(range(every - 1, num_layers, every))
    if last is None:
        return blocks
    _check(num_layers, "last", last, len(blocks))
    return blocks[-last:]


def _check(num_layers, argument, value, largest):
    if not is_whole_number(value) or (largest is not None and value > largest):
        upto = "" if largest is None else f" and at most {largest}"
        layers = "" if argument == "num_layers" else f", num_layers={num_layers}"
        raise ValueError(
            f"`{argument}` must be an integer, at least 1{upto}. "
            f"Received: {argument}={value!r}{layers}."
        )
