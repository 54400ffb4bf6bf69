"""Arrangement of tokens: modalities are joined, and images form groups.

Tokens of several modalities are a dict from names to tokens. A single modality may be a
plain tensor: these functions take and return either.
"""

import math

import keras
from keras import ops

from keras_softmoe.ops.kernels import reshape


def each(function, tokens, *others):
    """Apply a function to the tokens, and other values, of each modality.

    Args:
        function: callable.
        tokens: dict from modalities to tokens, or tokens.
        *others: of the same structure, for further arguments. Missing entries and
            `None` become `None` for each modality.
    """
    if isinstance(tokens, dict):
        others = [other or {} for other in others]
        return {
            name: function(x, *(other.get(name) for other in others))
            for name, x in tokens.items()
        }
    return function(tokens, *others)


def masks_like(tokens, masks):
    """Return masks with an entry for each modality, for Keras to propagate, or `None`.

    Keras would use the only entry of a shorter dict for the first modality.
    """
    return None if masks is None else each(lambda _, mask: mask, tokens, masks)


def add(x, y):
    """Add the tensors of each modality."""
    return each(ops.add, x, y)


def layout(tokens):
    """Return pairs of modality and number of tokens, in the order of `join`.

    Args:
        tokens: dict of `(B, S, D)` tensors or shapes, or one of them.

    Returns:
        tuple of `(name, S)`, empty for a single modality without a name.
    """
    if not isinstance(tokens, dict):
        return ()
    return tuple((name, _shape(tokens[name])[1]) for name in sorted(tokens))


def join(tokens):
    """Concatenate the tokens of all modalities, in alphabetical order, to `(B, S, D)`.

    Raises:
        ValueError: if their batch sizes differ.
    """
    if not isinstance(tokens, dict):
        return tokens
    if len(_known(x.shape[0] for x in tokens.values())) > 1:
        raise ValueError(
            "The modalities that are routed together belong to the same examples: "
            f"pass batches of one size. Received: shapes={shapes_of(tokens)}."
        )
    return ops.concatenate([tokens[name] for name, _ in layout(tokens)], axis=1)


def split(joined, tokens):
    """Split joined tokens into modalities, with the shapes of `tokens`."""
    if not isinstance(tokens, dict):
        return joined
    parts, start = {}, 0
    for name, count in layout(tokens):
        parts[name] = joined[:, start : start + count]
        start += count
    return parts


def joined_shape(shapes):
    """Return the output shape of `join` for tokens of given shapes."""
    if not isinstance(shapes, dict):
        return shapes
    batch, _, width = next(iter(shapes.values()))
    return (batch, sum(count for _, count in layout(shapes)), width)


def join_masks(masks, tokens):
    """Return the `(B, S)` mask of joined tokens, `None` if no modality has one.

    Args:
        masks: dict of `(B, S)` bool tensors or `None`, or one of them.
        tokens: the tokens of the masks.
    """
    if not isinstance(tokens, dict):
        return masks
    if masks is None or all(mask is None for mask in masks.values()):
        return None
    parts = []
    for name, _ in layout(tokens):
        mask = masks.get(name)
        if mask is None:
            mask = ops.ones_like(tokens[name][..., 0], dtype="bool")
        parts.append(mask)
    return ops.concatenate(parts, axis=1)


def as_sequence(tokens):
    """Reshape `(B, ..., D)` tokens to `(B, S, D)`."""
    return each(lambda x: reshape(x, _sequence_shape(x.shape)), tokens)


def sequence_shapes(shapes):
    """Return the output shapes of `as_sequence`, with `B` unchanged."""
    return each(lambda shape: (shape[0], *_sequence_shape(shape)[1:]), shapes)


def _sequence_shape(shape):
    return (-1, math.prod(shape[1:-1]), shape[-1])


def shapes_of(tokens):
    """Return the shapes of tokens as tuples, `None` for values without a shape."""
    return each(lambda x: tuple(x.shape) if hasattr(x, "shape") else None, tokens)


def check_tokens_shape(shapes, any_rank=False):
    """Raise unless shapes are `(batch, tokens, width)` with known tokens and width.

    With `any_rank` there may be several axes of tokens, which must all be known.
    """
    # Keras passes `None` as the shapes of a dict without any tensor.
    parts = list(shapes.values()) if isinstance(shapes, dict) else [shapes]
    if None in parts or not parts:
        raise ValueError(
            "Tokens are a tensor, or a dict from one or more names of modalities to "
            f"tensors. Received: shapes={shapes}. Pass, for example, "
            "`{'image': image_tokens, 'text': text_tokens}`."
        )
    axes = "(batch, ..., width)" if any_rank else "(batch, tokens, width)"
    for shape in parts:
        if len(shape) < 3 or (len(shape) > 3 and not any_rank):
            raise ValueError(
                f"Tokens have a shape {axes}. Received: shape={tuple(shape)}, with "
                f"{len(shape)} axes. Reshape the input of the layer; add the axis of "
                "the batch to the tokens of one example, `tokens[None]`."
            )
        if None in tuple(shape[1:]):
            raise ValueError(
                f"Tokens have a shape {axes}, of which all but the first are known "
                f"beforehand. Received: shape={tuple(shape)}. Give `keras.Input` all "
                "sizes but the batch's."
            )
    if len(_known(shape[-1] for shape in parts)) > 1:
        raise ValueError(
            "The modalities that are routed together must have one width. Received: "
            f"shapes={shapes}."
        )


def check_masks(masks, tokens):
    """Raise unless masks have names and shapes of the tokens, without `D`."""
    if masks is None:
        return
    shapes = shapes_of(tokens)
    pairs = [(masks, shapes)]
    if isinstance(masks, dict) and isinstance(shapes, dict):
        pairs = [(mask, shapes.get(name)) for name, mask in masks.items()]
    if not all(mask is None or _is_mask(mask, shape) for mask, shape in pairs):
        raise ValueError(
            "A mask has the shape of the tokens without the width; for a dict of "
            "modalities, `mask` is a dict with names among theirs. Received: a mask of "
            f"shape {shapes_of(masks)} for tokens of shape {shapes}. Pass bool tensors "
            "that are `False` for padding."
        )


def _is_mask(mask, shape):
    is_shape = isinstance(shape, tuple)
    if not is_shape or len(getattr(mask, "shape", ())) != len(shape) - 1:
        return False
    pairs = zip(mask.shape, shape[:-1], strict=True)
    return all(len(_known(sizes)) < 2 for sizes in pairs)


def _known(sizes):
    """Return the set of known sizes, without symbols of an exported program."""
    return {size for size in sizes if isinstance(size, int)}


def _shape(tokens):
    return getattr(tokens, "shape", tokens)


# === Groups of images whose tokens are routed together ===


def group(inputs, mask, group_images, num_experts):
    """Reshape images to groups.

    Args:
        inputs: `(B, S, D)` tensor.
        mask: `(B, S)` bool tensor or `None`.
        group_images: int, or `None` for the whole batch.
        num_experts: int.

    Returns:
        `(G, S, D)` tokens; the `(G, S)` mask of real tokens, or `None`; and the
        `(G,)` numbers of tokens that determine the capacity, or `None` without a
        mask. Images that pad a batch count in the latter like the others of their
        group.
    """
    if group_images == 1:
        return inputs, mask, _count(mask)
    if group_images is None:
        shape = _shape_of_whole_batch(inputs, num_experts)
        if mask is not None:
            mask = reshape(mask, shape)
        tokens = reshape(inputs, (*shape, inputs.shape[-1]))
        return tokens, mask, _count(mask)
    batch, (num_tokens, width) = ops.shape(inputs)[0], inputs.shape[1:]
    # In this order compilers infer that groups times images is the padded batch.
    groups = (batch + group_images - 1) // group_images
    padded = groups * group_images
    tokens_of_group = group_images * num_tokens
    is_padded = not isinstance(batch, int) or padded > batch
    valid, images = mask, group_images
    if is_padded:
        # The batch size, and so the padding, may be known only when the graph runs:
        # append the maximum number of empty images, and keep those that are needed.
        empty = ops.zeros((group_images - 1, num_tokens, width), inputs.dtype)
        inputs = ops.concatenate([inputs, empty], axis=0)[:padded]
        # Not `ops.less`, which turns an open size of PyTorch's export into a
        # constant.
        is_image = ops.arange(padded, dtype="int32") < batch
        images = reshape(is_image, (groups, group_images))
        images = ops.sum(ops.cast(images, "int32"), axis=-1)
        valid = ops.repeat(ops.expand_dims(is_image, -1), num_tokens, axis=-1)
        if mask is not None:
            empty = ops.zeros((group_images - 1, num_tokens), "bool")
            mask = ops.concatenate([mask, empty], axis=0)[:padded]
            valid = ops.logical_and(valid, mask)
    tokens = reshape(inputs, (groups, tokens_of_group, width))
    if valid is not None:
        valid = reshape(valid, (groups, tokens_of_group))
    count = None
    if mask is not None:
        count = _count(valid) * group_images // images
    return tokens, valid, count


def ungroup(outputs, inputs, group_images):
    """Undo `group` for tensors like its inputs, without images that fill up."""
    if group_images == 1:
        return outputs
    outputs = reshape(outputs, (-1, *inputs.shape[1:]))
    return outputs[: ops.shape(inputs)[0]]


def _shape_of_whole_batch(inputs, num_experts):
    """Return the number of groups and the tokens of each."""
    batch, num_tokens, _ = inputs.shape
    if batch is None:
        raise ValueError(
            "`group_images=None` routes the whole batch as one group, and the size "
            f"of a batch is not known while {keras.backend.backend()} traces a "
            "function for batches of any size. Set `group_images` to the batch "
            "size (smaller batches are padded), or feed a dataset made with "
            "`.batch(batch_size, drop_remainder=True)`."
        )
    if batch == 0:
        # No group, of a size for which every router has slots
        return 0, num_tokens * num_experts
    return 1, batch * num_tokens


def _count(mask):
    """Return the numbers of tokens of a `(G, S)` mask, `(G,)` int32, or `None`."""
    return None if mask is None else ops.sum(ops.cast(mask, "int32"), axis=-1)
