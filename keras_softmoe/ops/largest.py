"""The largest entries of an axis, ties to the lower index on every backend."""

import keras
from keras import ops

# With `sharded=True`, for tensors whose first axis is sharded over devices, entries are
# sorted: XLA hands all rows of a `top_k` to every device, a sort stays with its rows.


def top_values(x, k, sharded=False):
    """The `k` largest entries of the last axis, in descending order."""
    if sharded:
        return -ops.sort(-x, axis=-1)[..., :k]
    return ops.top_k(x, k)[0]


def top_indices(scores, k, sharded=False):
    """Indices of the `k` largest entries of the last axis, ties to the lower index.

    `top_k` promises that order on JAX and TensorFlow. PyTorch's does not, its
    stable sort does.
    """
    if keras.backend.backend() == "torch" or sharded:
        indices = ops.argsort(-scores, axis=-1)[..., :k]
    else:
        _, indices = ops.top_k(scores, k)
    return ops.cast(indices, "int32")
