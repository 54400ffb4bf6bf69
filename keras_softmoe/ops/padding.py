"""Padding: tokens that a mask excludes."""

from keras import ops

from keras_softmoe.ops.numbers import least


def zero_padding(values, valid):
    """Replace padding by zeros.

    Call it before a sum over tokens or a product with a matrix: NaN and infinity would
    survive a later multiplication by a mask, and a later selection in gradients.
    Encoder blocks and attention call it, `MoE` before routing, and a router where it is
    called alone. Pooling has its own sum over unmasked tokens.

    Args:
        values: `(G, S, N)` float tensor.
        valid: `(G, S)` or `(1, S)` bool tensor, `False` for padding; `None` for none.

    Returns:
        Tensor like `values`; the same one without a mask.
    """
    if valid is None:
        return values
    return ops.where(ops.expand_dims(valid, -1), values, 0.0)


def with_real_first(scores, valid):
    """Return scores that rank every token before padding.

    -inf and NaN become the lowest number, and padding -inf.

    Args:
        scores: float tensor.
        valid: bool tensor that broadcasts to it, `False` for padding.
    """
    lowest = least(scores)
    scores = ops.where(scores > lowest, scores, lowest)
    return ops.where(valid, scores, -float("inf"))
