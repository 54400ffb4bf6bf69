"""Tokens before the patches, with and without positions.

Libraries differ in both. Here all are converted to a class token with a position, then
registers without. The position of a register is added to the token, and a class token
without a position gets zeros.
"""

import math

import numpy as np

from keras_softmoe.checkpoints._checkpoint import LazyArray
from keras_softmoe.checkpoints._stream import CheckpointError

CLASS_TOKEN, REGISTERS = "cls", "registers"
# These two are not in the result.
DISTILLATION_TOKEN, POSITIONS = "distillation_token", "positions"
_OUR_POSITIONS = "Encoder/posembed_input/pos_embedding"


def place_tokens(arrays, covered, num_patches=None):
    """Convert tokens and positions to the layout of this library's models.

    Args:
        arrays: dict from V-MoE's name to `LazyArray`; optionally with `"cls"`,
            `"distillation_token"`, `"registers"` and `"positions"`, each `(1, S, D)`.
        covered: tuple of the possible numbers of these tokens, in this order, that have
            positions. The number of patches decides between several.
        num_patches: int or `None`, the number of patches. If it does not fit, patches
            form a square.

    Returns:
        dict, the arrays with `"cls"`, `"registers"` and V-MoE's name of the positions.

    Raises:
        CheckpointError: if the number of positions fits no such model.
    """
    arrays = dict(arrays)
    extra = [arrays.pop(DISTILLATION_TOKEN, None), arrays.pop(REGISTERS, None)]
    extra = [tokens for tokens in extra if tokens is not None]
    count = sum(tokens.shape[1] for tokens in extra)
    has_class_token = CLASS_TOKEN in arrays
    positions = arrays.pop(POSITIONS, None)
    covers = 0
    if positions is not None:
        total, width = positions.shape[1:]
        covers = _covered(total, covered, num_patches)
        patches = total - covers

        def place():
            table = positions.read()
            parts = [table[:, covers:]]
            if has_class_token:
                of_class = table[:, :1] if covers else np.zeros_like(table[:, :1])
                parts.insert(0, of_class)
            return np.concatenate(parts, axis=1)

        shape = (1, patches + has_class_token, width)
        arrays[_OUR_POSITIONS] = LazyArray(shape, positions.dtype, place)
    if extra:

        def join():
            tokens = np.concatenate([tokens.read() for tokens in extra], axis=1)
            first = int(has_class_token)
            if covers > first:
                tokens = np.array(tokens, dtype="float32")
                of_tokens = positions.read()[:, first:covers]
                tokens[:, : covers - first] += of_tokens
            return tokens

        arrays[REGISTERS] = LazyArray(
            (1, count, extra[0].shape[2]), np.dtype("float32"), join
        )
    return arrays


def count_patches(image_shape, patch_size):
    """Return the number of whole patches in an image.

    Args:
        image_shape: `(height, width, channels)`.
        patch_size: `(height, width)`.
    """
    return (image_shape[0] // patch_size[0]) * (image_shape[1] // patch_size[1])


def _covered(total, covered, num_patches):
    possible = {number: total - number for number in sorted(set(covered))}
    possible = {number: patches for number, patches in possible.items() if patches > 0}
    for number, patches in possible.items():
        if patches == num_patches:
            return number
    for number, patches in possible.items():
        if math.isqrt(patches) ** 2 == patches or len(set(covered)) == 1:
            return number
    raise CheckpointError(
        f"Of {total} positions {' or '.join(map(str, covered))} may belong to tokens "
        "before the patches, and the rest is no square. Received: a checkpoint of "
        "another model, or one for images that are not square: pass "
        "`image_shape=(height, width, channels)`."
    )
