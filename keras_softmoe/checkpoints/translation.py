"""Translation of other libraries' names and layouts to V-MoE's, by tables of rules.

A rule is a pattern for the whole original name, V-MoE's name (a template with the
groups of the pattern), and a function that changes the layout of the array. The
functions here do that on reading, and return dicts, as an array may contain several:
`{}` in the template is replaced by the key. An array without a name is left out.
"""

import functools
import math
import re

import numpy as np

from keras_softmoe.checkpoints.checkpoint import CheckpointError, LazyArray

CLASS_TOKEN, REGISTERS = "cls", "registers"
# These two are not in the result of `place_tokens`.
DISTILLATION_TOKEN, POSITIONS = "distillation_token", "positions"
OUR_POSITIONS = "Encoder/posembed_input/pos_embedding"

# Unsupported features of models, by words in names of parameters
_FOREIGN = (
    (
        r"(?i).*(pre_layrnorm|pre_layernorm|norm_pre|ln_pre|class_embedding).*",
        "CLIP's models normalize tokens before the first block and use QuickGELU",
    ),
    (
        r"(?i).*(rope|rotary).*",
        "their positions are rotations of queries and keys (RoPE), as in DINOv3",
    ),
    (
        r"(?i).*(weights_in|w12|w3|swiglu|gate_proj|up_proj|fc1_[gx])\b.*",
        "their MLPs have gates (SwiGLU), as in DINOv2-giant and DINOv3",
    ),
    (
        r"(?i).*(rel_pos|relative_position).*",
        "their attention has relative positions, as in BEiT and Swin",
    ),
    (
        r".*fc_norm\..*",
        "they normalize after the pooling, where our models do before it",
    ),
    (r".*\b[qk]_norm\..*", "their normalization of queries and keys has an offset"),
    (
        r"(.*patch_embed\.backbone\..*|conv_root/.*|gn_root/.*|block[0-9]+/unit.*)",
        "they are hybrids that begin with convolutions",
    ),
    (
        r"(head_dist|distillation_classifier|cls_classifier)\..*",
        "they have a second head, on the distillation token; `head=False` leaves heads "
        "out",
    ),
)


def changed(array, shape, function):
    """Return a `LazyArray` of another shape, computed by a function on reading."""
    return LazyArray(tuple(shape), array.dtype, lambda: function(array.read()))


def reshaped(array, shape):
    """Return a `LazyArray` with the same values in another shape."""
    return changed(array, shape, functools.partial(np.reshape, shape=tuple(shape)))


def translate(arrays, rules, where, num_heads=None):
    """Return arrays under V-MoE's names, a dict to `LazyArray`.

    `arrays` is such a dict from original names, `rules` are `(pattern, name, function)`
    where a function takes an array and the number of heads and returns a dict from
    words to arrays, and `where` is the source in errors.
    """
    translated, unknown = {}, []
    for theirs, array in arrays.items():
        rule = next((r for r in rules if re.fullmatch(r[0], theirs)), None)
        if rule is None:
            unknown.append(theirs)
            continue
        pattern, name, function = rule
        if name is None:
            continue
        try:
            parts = function(array, num_heads)
        except (ValueError, IndexError) as error:
            raise CheckpointError(
                f"{theirs!r} in {where} has another shape than a Vision Transformer's "
                f"parameter. Received: {array.shape}."
            ) from error
        for word, part in parts.items():
            ours = re.fullmatch(pattern, theirs).expand(name).format(word)
            if ours in translated:
                raise CheckpointError(f"{where} holds {ours!r} twice, as {theirs!r}.")
            translated[ours] = part
    if unknown:
        reasons = {
            reason: name
            for pattern, reason in reversed(_FOREIGN)
            for name in unknown
            if re.fullmatch(pattern, name)
        }
        because = "".join(
            f" Models with {name!r} are not supported: {reason}."
            for reason, name in reasons.items()
        )
        names = ", ".join(sorted(name[:80] for name in unknown)[:20])
        more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
        raise CheckpointError(
            f"{where} is no plain Vision Transformer: of {len(arrays)} arrays, "
            f"{len(unknown)} have no place in one.{because} Received: {names}{more}."
        )
    return translated


def same(array, num_heads=None):
    """Keep the array."""
    return {"": array}


def vector(array, num_heads=None):
    """Flatten a vector or a matrix of one row."""
    (width,) = (size for size in array.shape if size != 1) if array.shape else ()
    return {"": reshaped(array, (width,))}


def token(array, num_heads=None):
    """Reshape tokens to `(1, S, D)`."""
    first, _, _ = shape = (1,) * (3 - len(array.shape)) + array.shape
    if first != 1:
        raise ValueError("tokens of one image")
    return {"": reshaped(array, shape)}


def matrix(array, num_heads=None):
    """Transpose PyTorch's `(outputs, inputs)` to `(inputs, outputs)`."""
    outputs, inputs = array.shape
    return {"": changed(array, (inputs, outputs), np.transpose)}


def convolution(array, num_heads=None):
    """Transpose PyTorch's `(outputs, inputs, height, width)`, outputs last."""
    outputs, inputs, height, width = array.shape
    shape = (height, width, inputs, outputs)
    return {"": changed(array, shape, lambda x: np.transpose(x, (2, 3, 1, 0)))}


def to_heads(array, num_heads):
    """Rearrange PyTorch's `(H * d, inputs)` to `(inputs, H, d)`."""
    outputs, inputs = array.shape
    shape = (inputs, *_heads(outputs, num_heads))
    return {"": changed(array, shape, lambda x: np.reshape(x.T, shape))}


def to_heads_bias(array, num_heads):
    """Reshape `(H * d,)` to `(H, d)`."""
    (outputs,) = array.shape
    return {"": reshaped(array, _heads(outputs, num_heads))}


def from_heads(array, num_heads):
    """Rearrange PyTorch's `(outputs, H * d)` to `(H, d, outputs)`."""
    outputs, inputs = array.shape
    shape = (*_heads(inputs, num_heads), outputs)
    return {"": changed(array, shape, lambda x: np.reshape(x.T, shape))}


def fused(*parts):
    """Return a function that splits stacked kernels or biases of heads into parts."""

    def cut(array, num_heads):
        rows, remainder = divmod(array.shape[0], len(parts))
        if remainder:
            raise ValueError("equal parts")
        shape = (rows, *array.shape[1:])
        layout = to_heads if len(shape) == 2 else to_heads_bias
        found = {}
        for index, part in enumerate(parts):
            own = slice(index * rows, (index + 1) * rows)
            own = changed(array, shape, lambda x, own=own: x[own])
            found[part] = layout(own, num_heads)[""]
        return found

    return cut


def _heads(width, num_heads):
    if width % num_heads:
        raise ValueError("equal heads")
    return num_heads, width // num_heads


def place_tokens(arrays, covered, num_patches=None):
    """Convert tokens and positions to the layout of this library's models.

    That is a class token with a position, then registers without. `covered` are numbers
    of tokens with positions, between which `num_patches` (or a square) decides.
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
        arrays[OUR_POSITIONS] = LazyArray(shape, positions.dtype, place)
    if extra:

        def join():
            tokens = np.concatenate([tokens.read() for tokens in extra], axis=1)
            first = int(has_class_token)
            if covers > first:
                tokens = np.array(tokens, dtype="float32")
                tokens[:, : covers - first] += positions.read()[:, first:covers]
            return tokens

        shape = (1, count, extra[0].shape[2])
        arrays[REGISTERS] = LazyArray(shape, np.dtype("float32"), join)
    return arrays


def count_patches(image_shape, patch_size):
    """Return the number of whole patches in an image."""
    return (image_shape[0] // patch_size[0]) * (image_shape[1] // patch_size[1])


def _covered(total, covered, num_patches):
    """Return how many positions belong to tokens before the patches."""
    possible = [number for number in sorted(set(covered)) if number < total]
    for number in possible:
        if total - number == num_patches:
            return number
    for number in possible:
        patches = total - number
        if math.isqrt(patches) ** 2 == patches or len(set(covered)) == 1:
            return number
    raise CheckpointError(
        f"Of {total} positions {' or '.join(map(str, covered))} may belong to tokens "
        "before the patches, and the rest is no square. Images that are not square "
        f"need `image_shape`. Received: num_patches={num_patches}."
    )
