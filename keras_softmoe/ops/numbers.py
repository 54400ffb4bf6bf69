"""Numbers near the ends of the range of a dtype.

As constants, such numbers would be infinite or zero in a smaller dtype. And without a
given dtype PyTorch takes Keras' default (`floatx`) for a number, whatever the tensor
that it meets: -1e30 is -inf if that is float16.
"""

import keras
import ml_dtypes
from keras import ops


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


def least(x):
    """Return the lowest number of the dtype of a tensor, as a scalar tensor."""
    return _like(x, _finfo(x.dtype).min)


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


def _finfo(dtype):
    if keras.backend.backend() == "torch":
        # `torch.compile` cannot trace the other.
        import torch

        return torch.finfo(getattr(torch, keras.backend.standardize_dtype(dtype)))
    return ml_dtypes.finfo(keras.backend.standardize_dtype(dtype))


def _like(x, value):
    return ops.convert_to_tensor(float(value), dtype=x.dtype)
