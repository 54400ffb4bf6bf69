"""Tokens in front of the patches, and which of them have positions.

Libraries differ in both. Here all become the same: a class token with a position, then
registers without. A position that is the same for all images is added to its token, and
a class token that has none gets one of zeros.
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
    """Lay tokens and positions out as our models have them.

    Args:
        arrays: dict from V-MoE's name to `LazyArray`; among them perhaps `"cls"`,
            `"distillation_token"`, `"registers"` and `"positions"`, each `(1, S, D)`.
        covered: how many of these tokens, in this order, have positions: a tuple of the
            numbers that are possible. If there are several the number of patches
            decides.
        num_patches: int or `None`, how many patches there may be. If it does not fit
            they are those of a square.

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
    """How many whole patches an image has.

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
        f"There are {total} positions, of which {' or '.join(map(str, covered))} may "
        "be of tokens in front of the patches. The rest is no square. Received: a "
        "checkpoint of another model, or one for images that are no squares: say "
        "`image_shape=(height, width, channels)`."
    )
