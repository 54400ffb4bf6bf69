"""Groups of tokens, and slots arranged by expert."""

import math
import warnings

import keras
from keras import ops

from keras_softmoe.keras_adapter.layers import only_finds_shapes
from keras_softmoe.ops.kernels import as_mask, reshape, swap_axes
from keras_softmoe.ops.selection import zero_padding
from keras_softmoe.sharding.constraints import constrain, layout_of, num_shards

# === Tokens ===


def as_sequence(inputs, mask):
    """Return tokens as one sequence per image, with zeros for padding.

    Inputs are `(B, ..., D)`, or `(B, D)` with a token in each row, with a mask or
    `None`. The result is `(B, S, D)` tokens and their `(B, S)` mask or `None`.
    """
    shape = tuple(getattr(inputs, "shape", ()))
    if len(shape) != 3:
        check_tokens_shape(shape, any_rank=True)
        num_tokens = math.prod(ops.shape(inputs)[1:-1])
        inputs = reshape(inputs, (-1, num_tokens, shape[-1]))
    if mask is None:
        return inputs, None
    check_mask(mask, shape)
    mask = as_mask(mask)
    if len(shape) != 3:
        mask = reshape(mask, (-1, num_tokens))
    # Padding may hold NaN, which would enter the gradients of all weights.
    return zero_padding(inputs, mask), mask


def check_tokens_shape(shape, any_rank=False):
    """Raise unless a shape is `(batch, tokens, width)` with a known width.

    With `any_rank` there may be no axis of tokens, or several.
    """
    axes = "(batch, ..., width)" if any_rank else "(batch, tokens, width)"
    if isinstance(shape, dict) or not shape:
        raise ValueError(
            f"Tokens are a tensor of shape {axes}. Received: shape={shape}. "
            "Concatenate tokens of several modalities along the second axis."
        )
    if len(shape) < 2 or (len(shape) != 3 and not any_rank):
        raise ValueError(
            f"Tokens have a shape {axes}. Received: shape={tuple(shape)}, with "
            f"{len(shape)} axes. Add the axis of the batch to the tokens of one "
            "example: `tokens[None]`."
        )
    if shape[-1] is None or (None in shape[1:] and not any_rank):
        known = "the width is" if any_rank else "all but the first are"
        raise ValueError(
            f"Tokens have a shape {axes}, of which {known} known beforehand. "
            f"Received: shape={tuple(shape)}. Give it to `keras.Input`."
        )


def check_mask(mask, shape):
    """Raise unless a mask has the shape of the tokens without `D`."""
    found = tuple(getattr(mask, "shape", ()))
    pairs = zip(found, shape[:-1], strict=False)
    # Sizes may be symbols of an exported program.
    sizes = [{n for n in pair if isinstance(n, int)} for pair in pairs]
    if len(found) != len(shape) - 1 or any(len(known) > 1 for known in sizes):
        raise ValueError(
            "A mask has the shape of the tokens without the width. Received: a mask of "
            f"shape {found or type(mask).__name__} for tokens of shape {shape}. Pass a "
            "bool tensor that is `False` for padding."
        )


# === Groups of images whose tokens are routed together ===


def group(inputs, mask, group_images, num_experts):
    """Reshape `(B, S, D)` images, with a `(B, S)` mask or `None`, to groups.

    Returns:
        `(G, S, D)` tokens; the `(G, S)` mask of real tokens, or `None`; and the
        `(G,)` numbers of tokens that determine the capacity, or `None` without a
        mask. In these a group that is filled up with empty images counts as full: its
        real images have the slots that they would have in any other group.
    """
    if group_images == 1:
        # Each image is a group: nothing moves.
        return inputs, mask, None if mask is None else _count(mask)
    if group_images is None:
        shape = _shape_of_whole_batch(inputs, num_experts)
        tokens = reshape(inputs, (*shape, inputs.shape[-1]))
        if mask is None:
            return tokens, None, None
        mask = reshape(mask, shape)
        return tokens, mask, _count(mask)
    batch, num_tokens, width = ops.shape(inputs)
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
    # Real tokens of a full group: those of the real images, times all over real images
    count = None if mask is None else _count(valid) * group_images // images
    return tokens, valid, count


def ungroup(outputs, inputs):
    """Undo `group` for tensors like its inputs, and drop images that filled a group."""
    batch, *shape = ops.shape(inputs)
    return reshape(outputs, (-1, *shape))[:batch]


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
    """Return the numbers of tokens of a `(G, S)` mask, `(G,)` int32."""
    return ops.sum(ops.cast(mask, "int32"), axis=-1)


def warn_of_split_groups(layer, batch, groups):
    """Warn if a batch of a `MoE` divides among the devices, but its groups do not."""
    sharding = layout_of(f"{layer.experts.path}/slots_of_groups")
    if sharding is None or not (isinstance(batch, int) and isinstance(groups, int)):
        return
    if only_finds_shapes():
        return
    parts = num_shards(sharding.device_mesh, sharding.axes[0])
    if batch % parts == 0 and groups % parts:
        warnings.warn(
            f"A batch of {batch} images makes {groups} groups, which do not divide "
            f"among {parts} devices: every device routes all tokens of {layer.path}."
            f" The result is correct, but slow. Received: group_images="
            f"{layer.group_images}. Use batches whose size is a multiple of "
            "`group_images` times the number of devices.",
            stacklevel=3,
        )


# === Slots ===


def by_expert(function, slots, path, sharded):
    """Apply a function to the slots of each expert, in all groups at once.

    The function maps `(E, N, D)` to that shape, slots and results are `(G, E, C, D)`.
    Under a distribution with layouts for `slots_of_groups` and `slots_of_experts` below
    the path of the layer, slots are sent to the devices of the experts and back.
    """
    _, num_experts, capacity, width = slots.shape
    if sharded:
        slots = constrain(slots, f"{path}/slots_of_groups")
    # With experts first each bank is one batched product. With groups first, compilers
    # would transpose the hidden activations, which are several times larger.
    # (E, G, C, D)
    x = swap_axes(slots, 0, 1)
    if sharded:
        x = constrain(x, f"{path}/slots_of_experts")
    # (E, G * C, D)
    x = function(reshape(x, (num_experts, -1, width)))
    x = reshape(x, (num_experts, -1, capacity, width))
    if sharded:
        x = constrain(x, f"{path}/slots_of_experts")
    # (G, E, C, D)
    x = swap_axes(x, 0, 1)
    return constrain(x, f"{path}/slots_of_groups") if sharded else x
