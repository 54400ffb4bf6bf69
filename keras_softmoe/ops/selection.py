"""Selection of entries by index, size (with one rule for ties) or mask of padding."""

import keras
from keras import ops

from keras_softmoe.ops.kernels import as_mask, as_tensor
from keras_softmoe.ops.numbers import INDEX, least, where


def take_along(x, indices, axis):
    """Compute `keras.ops.take_along_axis` of tensors that differ in one axis only.

    On PyTorch, Keras broadcasts the other axes, which makes the batch size a constant
    in an exported model. Indices must not be negative.
    """
    if keras.backend.backend() == "torch":
        return x.gather(axis, indices.long())
    return ops.take_along_axis(x, indices, axis=axis)


def largest_entry(x):
    """Return `keras.ops.max` of the last axis, kept. Keras refuses an empty batch."""
    return x[..., :1] if x.shape[0] == 0 else ops.amax(x, axis=-1, keepdims=True)


def smallest_entry(x):
    """Return `keras.ops.min` of the last axis, kept. Keras refuses an empty batch."""
    return x[..., :1] if x.shape[0] == 0 else ops.amin(x, axis=-1, keepdims=True)


# With `sharded=True`, for a first axis sharded over devices, entries are sorted: for
# `top_k` XLA copies all rows to every device, for a sort it does not.


def top_values(x, k, sharded=False):
    """Return the `k` largest entries of the last axis, in descending order."""
    if sharded:
        return -ops.sort(-x, axis=-1)[..., :k]
    return ops.top_k(x, k)[0]


def last_of_top(x, k, sharded=False):
    """Return the last of the `k` largest entries of the last axis, which is kept."""
    found = top_values(x, k, sharded)
    if keras.backend.backend() == "torch":
        return found[..., -1:]
    # Not the slice: XLA would replace `top_k` and a slice by a full sort.
    return smallest_entry(found)


def top_indices(scores, k, sharded=False):
    """Return the indices of the `k` largest entries of the last axis, of `INDEX`.

    Ties go to the lower index. `top_k` guarantees this on JAX (where 0 exceeds -0) and
    TensorFlow; on PyTorch only `argmax` and the stable sort do.
    """
    if keras.backend.backend() == "torch" and k == 1:
        indices = scores.argmax(dim=-1, keepdim=True)
    elif keras.backend.backend() == "torch":
        indices = scores.sort(dim=-1, descending=True, stable=True).indices
        indices = indices if k == scores.shape[-1] else indices[..., :k]
    elif sharded:
        indices = ops.argsort(-scores, axis=-1)[..., :k]
    else:
        if keras.backend.backend() == "jax":
            scores = ops.where(scores == 0, ops.zeros_like(scores), scores)
        _, indices = ops.top_k(scores, k)
    return ops.cast(indices, INDEX)


# === Padding: tokens that a mask excludes ===


def zero_padding(values, valid):
    """Replace padding by zeros: `(G, S, N)` values where `valid` is `False`.

    Call it before a sum over tokens or a product with a matrix: NaN and infinity would
    survive a later multiplication by a mask, and a later selection in gradients.
    `valid` is a `(G, S)` or `(1, S)` bool tensor, or `None` for no padding.
    """
    if valid is None:
        return values
    return where(as_mask(valid)[..., None], as_tensor(values), 0.0)


def with_real_first(scores, valid):
    """Return scores that rank every token before padding, where `valid` is `False`.

    -inf and NaN become the lowest number, and padding -inf.
    """
    lowest = least(scores)
    scores = where(scores > lowest, scores, lowest)
    return where(valid, scores, -float("inf"))
