"""Entries of the last axis: the largest ones, with one rule for ties, and look-ups."""

import keras
from keras import ops


def take_along(x, indices, axis):
    """`keras.ops.take_along_axis` for tensors that differ in the size of one axis only.

    PyTorch's own way of it, which Keras calls, also brings other axes to equal sizes,
    and takes the size of a batch for a constant of a model that is exported.

    Args:
        x: tensor.
        indices: int tensor of the same rank, none negative.
        axis: int.

    Returns:
        Tensor of the shape of `indices`.
    """
    if keras.backend.backend() == "torch":
        x, indices = ops.convert_to_tensor(x), ops.convert_to_tensor(indices)
        return x.gather(axis, indices.long())
    return ops.take_along_axis(x, indices, axis=axis)


def largest_entry(x):
    """`keras.ops.max` of the last axis, which stays. Keras refuses an empty batch."""
    return x[..., :1] if x.shape[0] == 0 else ops.max(x, axis=-1, keepdims=True)


def smallest_entry(x):
    """`keras.ops.min` of the last axis, which stays. Keras refuses an empty batch."""
    return x[..., :1] if x.shape[0] == 0 else ops.min(x, axis=-1, keepdims=True)


# With `sharded=True`, for tensors whose first axis is sharded over devices, entries are
# sorted: XLA hands all rows of a `top_k` to every device, a sort stays with its rows.


def top_values(x, k, sharded=False):
    """The `k` largest entries of the last axis, in descending order."""
    if sharded:
        return -ops.sort(-x, axis=-1)[..., :k]
    return ops.top_k(x, k)[0]


def top_indices(scores, k, sharded=False):
    """Indices of the `k` largest entries of the last axis, ties to the lower index.

    `top_k` promises that order on JAX and TensorFlow, but to JAX 0 is more than -0.
    PyTorch's does not promise it, its `argmax` and its stable sort do.
    """
    if keras.backend.backend() == "torch" and k == 1:
        indices = ops.convert_to_tensor(scores).argmax(dim=-1, keepdim=True)
    elif keras.backend.backend() == "torch":
        scores = ops.convert_to_tensor(scores)
        indices = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    elif sharded:
        indices = ops.argsort(-scores, axis=-1)[..., :k]
    else:
        if keras.backend.backend() == "jax":
            scores = ops.where(scores == 0, ops.zeros_like(scores), scores)
        _, indices = ops.top_k(scores, k)
    return ops.cast(indices, "int32")
