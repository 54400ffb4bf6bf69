"""Translation of other libraries' names and layouts to V-MoE's, by tables of rules.

A rule is a pattern for the whole original name, V-MoE's name (a template with the
groups of the pattern), and a function that changes the layout of the array. The
functions here do that on reading, and return dicts, as an array may contain several:
`{}` in the template is replaced by the key. An array with `None` for a name is not used
by an image model and is left out.
"""

import functools
import re

import numpy as np

from keras_softmoe.checkpoints._checkpoint import LazyArray
from keras_softmoe.checkpoints._stream import CheckpointError

# Unsupported features of models, by words in names of parameters
_FOREIGN = (
    (
        r"(?i).*(pre_layrnorm|pre_layernorm|norm_pre|ln_pre|class_embedding).*",
        "CLIP's models normalize tokens before the first block and have another "
        "activation (QuickGELU)",
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
    (
        r".*\b[qk]_norm\..*",
        "their normalization of queries and keys has an offset",
    ),
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
    """Return arrays under V-MoE's names.

    Args:
        arrays: dict from original name to `LazyArray`.
        rules: iterable of `(pattern, name, function)`. A function takes an array and
            the number of heads, and returns a dict from words to arrays.
        where: str, name of the source in errors.
        num_heads: int, the number of attention heads.

    Returns:
        dict from V-MoE's name to `LazyArray`.

    Raises:
        CheckpointError: if a name has no rule, an array does not have the axes of its
            rule, or two are the same parameter.
    """
    translated, unknown = {}, []
    for theirs, array in arrays.items():
        found = _find(rules, theirs)
        if found is None:
            unknown.append(theirs)
            continue
        match, name, function = found
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
            ours = match.expand(name).format(word)
            if ours in translated:
                raise CheckpointError(f"{where} holds {ours!r} twice, as {theirs!r}.")
            translated[ours] = part
    if unknown:
        raise CheckpointError(_unknown(unknown, len(arrays), where))
    return translated


def _find(rules, theirs):
    for pattern, name, function in rules:
        match = re.fullmatch(pattern, theirs)
        if match:
            return match, name, function
    return None


def _unknown(unknown, count, where):
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
    return (
        f"{where} is no plain Vision Transformer: of {count} arrays, {len(unknown)} "
        f"have no place in one.{because} Received: {names}{more}."
    )


# === Layouts ===


def same(array, num_heads=None):
    """Keep the array."""
    return {"": array}


def vector(array, num_heads=None):
    """Flatten a vector or a matrix of one row."""
    (width,) = (size for size in array.shape if size != 1) if array.shape else ()
    return {"": reshaped(array, (width,))}


def token(array, num_heads=None):
    """Reshape tokens to `(1, S, D)`."""
    if len(array.shape) == 1:
        return {"": reshaped(array, (1, 1, *array.shape))}
    if len(array.shape) == 2:
        return {"": reshaped(array, (1, *array.shape))}
    first, _, _ = array.shape
    if first != 1:
        raise ValueError("tokens of one image")
    return {"": array}


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
        return {
            part: layout(changed(array, shape, _rows(index * rows, rows)), num_heads)[
                ""
            ]
            for index, part in enumerate(parts)
        }

    return cut


def _rows(first, count):
    return lambda x: x[first : first + count]


def _heads(width, num_heads):
    if width % num_heads:
        raise ValueError("equal heads")
    return num_heads, width // num_heads
