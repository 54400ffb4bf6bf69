"""Quantization of experts' kernels to four bits, with scales for each expert."""

import math

import keras
from keras import ops

LOWEST, HIGHEST = -8, 7


def to_int4(kernel, block_size):
    """Round kernels to 16 values, evenly spaced between the extremes of a block.

    Args:
        kernel: `(E, D, H)` float tensor.
        block_size: int, number of the `D` inputs that share a scale.

    Returns:
        Tuple of `(E, D, ceil(H / 2))` int8, two values in each, and scale (float) and
        zero (int8), `(E, ceil(D / block_size), H)`: a stored `v` has the value
        `(v - zero) * scale`.
    """
    num_experts, width, units = kernel.shape
    blocks = math.ceil(width / block_size)
    kernel = ops.cast(kernel, "float32")
    # Padding with zeros widens no range, as each contains zero; zeros remain zero.
    x = ops.pad(kernel, ((0, 0), (0, blocks * block_size - width), (0, 0)))
    x = ops.reshape(x, (num_experts, blocks, block_size, units))
    low = ops.minimum(ops.min(x, axis=2, keepdims=True), 0.0)
    high = ops.maximum(ops.max(x, axis=2, keepdims=True), 0.0)
    scale = ops.maximum(high - low, 1e-30) / (HIGHEST - LOWEST)
    zero = LOWEST - ops.round(low / scale)
    values = ops.clip(ops.round(x / scale) + zero, LOWEST, HIGHEST)
    values = ops.reshape(values, (num_experts, -1, units))[:, :width]
    packed, _, _ = keras.quantizers.pack_int4(ops.cast(values, "int8"), axis=-1)
    return packed, ops.squeeze(scale, 2), ops.cast(ops.squeeze(zero, 2), "int8")


def from_int4(packed, scale, zero, units, block_size):
    """Return the `(E, D, H)` kernels from the results of `to_int4`.

    Args:
        packed: `(E, D, ceil(H / 2))` int8 tensor.
        scale: `(E, ceil(D / block_size), H)` float tensor.
        zero: int8 tensor of that shape.
        units: int, `H`.
        block_size: int, as given to `to_int4`.
    """
    values = keras.quantizers.unpack_int4(packed, units, axis=-1)
    if scale.shape[1] > 1:
        width = packed.shape[1]
        scale, zero = (
            ops.repeat(x, block_size, axis=1)[:, :width] for x in (scale, zero)
        )
    return ops.cast(values - zero, scale.dtype) * scale
