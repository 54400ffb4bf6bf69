"""Padding, and numbers near the ends of the range of a dtype.

As constants, such numbers would be infinite or zero in a smaller dtype. And without a
given dtype PyTorch takes Keras' default (`floatx`) for a number, whatever the tensor
that it meets: -1e30 is -inf if that is float16.
"""

import keras
import ml_dtypes
from keras import ops


def zero_padding(values, valid):
    """Replace padding by zeros.

    Call it before a sum over tokens or a product with a matrix: NaN and infinity would
    survive a later multiplication by a mask, and a later selection in gradients.

    Args:
        values: `(G, S, N)` float tensor.
        valid: `(G, S)` or `(1, S)` bool tensor, `False` for padding; `None` for none.

    Returns:
        Tensor like `values`; the same one without a mask.
    """
    if valid is None:
        return values
    return ops.where(ops.expand_dims(valid, -1), values, 0.0)


def lowest(x):
    """Return a logit with probability zero beside others: half of the lowest number.

    Infinity would lead to NaN if all logits are, and in gradients. An ordinary number
    can be subtracted from this one.

    Args:
        x: float tensor of the logits.

    Returns:
        Scalar tensor of the dtype of `x`.
    """
    return _like(x, _finfo(x.dtype).min / 2)


def tiny(x):
    """Return a small number with finite logarithm and inverse: at least 1e-30.

    The inverse may be multiplied by a gradient.

    Args:
        x: float tensor to compare with.

    Returns:
        Scalar tensor of the dtype of `x`.
    """
    return _like(x, max(1e-30, smallest(x.dtype)))


def smallest(dtype):
    """Return the smallest positive normal number of a dtype."""
    return float(_finfo(dtype).smallest_normal)


def with_real_first(scores, valid):
    """Return scores that rank every token before padding.

    -inf and NaN become the lowest number, and padding -inf.

    Args:
        scores: float tensor.
        valid: bool tensor that broadcasts to it, `False` for padding.
    """
    least = _like(scores, _finfo(scores.dtype).min)
    scores = ops.where(scores > least, scores, least)
    return ops.where(valid, scores, -float("inf"))


def _finfo(dtype):
    return ml_dtypes.finfo(keras.backend.standardize_dtype(dtype))


def _like(x, value):
    return ops.convert_to_tensor(float(value), dtype=x.dtype)
