"""Numbers near the ends of what a dtype can hold, chosen for the dtype they meet.

Written down as they are, they would be infinite or zero in a smaller dtype. And where
it is not said PyTorch takes the default of Keras (`floatx`) for a number, whatever
tensor it goes with: there -1e30 is -inf if that is float16.
"""

import keras
import ml_dtypes
from keras import ops


def lowest(x):
    """A logit that gets nothing beside any other: half of the lowest number.

    Infinity would be NaN where all logits are, and in gradients. From this one an
    ordinary number can still be subtracted.

    Args:
        x: float tensor that it is to stand in.

    Returns:
        Scalar tensor of the dtype of `x`.
    """
    return _like(x, _finfo(x.dtype).min / 2)


def tiny(x):
    """A number next to zero whose logarithm and inverse are finite: at least 1e-30.

    The inverse may even be multiplied by a gradient.

    Args:
        x: float tensor that it is compared with.

    Returns:
        Scalar tensor of the dtype of `x`.
    """
    return _like(x, max(1e-30, smallest(x.dtype)))


def smallest(dtype):
    """The smallest positive float with all its digits, for a dtype."""
    return float(_finfo(dtype).smallest_normal)


def with_real_first(scores, valid):
    """Scores that put every token before padding, whatever the scores are.

    -inf and NaN become the lowest number, and padding -inf.

    Args:
        scores: float tensor.
        valid: bool tensor of that shape, or one that fits it; `False` for padding.

    Returns:
        Tensor like `scores`.
    """
    least = _like(scores, _finfo(scores.dtype).min)
    scores = ops.where(scores > least, scores, least)
    return ops.where(valid, scores, -float("inf"))


def _finfo(dtype):
    return ml_dtypes.finfo(keras.backend.standardize_dtype(dtype))


def _like(x, value):
    return ops.convert_to_tensor(float(value), dtype=x.dtype)
