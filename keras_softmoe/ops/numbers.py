"""Numbers near the ends of the range of a dtype, and noise.

As constants, the first would be infinite or zero in a smaller dtype. Without a given
dtype Keras on PyTorch converts a number to `floatx`, whatever tensor it is combined
with: -1e30 is -inf if that is float16.
"""

import keras
import ml_dtypes
from keras import ops

from keras_softmoe.types import Tensor


def lowest(x):
    """Return a scalar like `x`, half of the lowest number: a logit that never wins.

    Infinity would lead to NaN if all logits are infinite, and in gradients. An ordinary
    number can be subtracted from this one.
    """
    return _like(x, _finfo(x.dtype).min / 2)


def least(x):
    """Return a scalar like `x`, the lowest number of its dtype."""
    return _like(x, _finfo(x.dtype).min)


def tiny(x):
    """Return a scalar like `x`, small but with finite logarithm and inverse.

    It is at least 1e-30: the inverse may be multiplied by a gradient.
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


# === Noise ===


def normal_like(x: Tensor, seed: keras.random.SeedGenerator) -> Tensor:
    """Return normal noise of the shape and dtype of a tensor."""
    if keras.backend.backend() == "torch" and torch.compiler.is_compiling():
        return _draw(seed.state.value, x)
    dtype = keras.backend.standardize_dtype(x.dtype)
    return keras.random.normal(ops.shape(x), dtype=dtype, seed=seed)


if keras.backend.backend() == "torch":
    import torch

    # `torch.compile` cannot trace a generator, and Keras leaves the graph to make one.
    # With a graph for each side of every draw, the functions of Keras that each layer
    # calls would be compiled for a few layers only, up to Dynamo's limit.
    @torch.library.custom_op("keras_softmoe::normal_like", mutates_args=("state",))
    def _draw(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        # The seed and the next state are those of `keras.random.normal`.
        seed = int(state.sum()) & 0xFFFFFFFF
        state[1] += 1
        dtype = keras.backend.standardize_dtype(x.dtype)
        return keras.random.normal(tuple(x.shape), dtype=dtype, seed=seed)

    @_draw.register_fake
    def _(state, x):
        return torch.empty_like(x)
