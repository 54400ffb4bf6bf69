"""The largest entries of an axis, ties to the lower index on every backend."""

import keras
from keras import ops

from keras_softmoe.ops.placement import is_distributed


def top_values(x, k):
    """The `k` largest entries of the last axis, in descending order."""
    if is_distributed():
        return -ops.sort(-x, axis=-1)[..., :k]
    return ops.top_k(x, k)[0]


def top_indices(scores, k):
    """Indices of the `k` largest entries of the last axis, ties to the lower index.

    `top_k` promises that order on JAX and TensorFlow. PyTorch's does not, its
    stable sort does.
    """
    # XLA hands all rows of a `top_k` to every device. A sort stays where its rows are.
    if keras.backend.backend() == "torch" or is_distributed():
        indices = ops.argsort(-scores, axis=-1)[..., :k]
    else:
        _, indices = ops.top_k(scores, k)
    return ops.cast(indices, "int32")
