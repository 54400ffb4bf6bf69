"""Tokens that are not there."""

from keras import ops


def zero_padding(values, valid):
    """Zeros in place of padding.

    Whatever is summed over tokens, or multiplied by a matrix, starts with this: a mask
    that is multiplied afterwards leaves NaN and infinity as they are, and a selection
    afterwards leaves them in gradients.

    Args:
        values: `(G, S, N)` float tensor.
        valid: `(G, S)` or `(1, S)` bool tensor, `False` for padding; `None` for none.

    Returns:
        Tensor like `values`, the same one if there is no mask.
    """
    if valid is None:
        return values
    return ops.where(ops.expand_dims(valid, -1), values, 0.0)
