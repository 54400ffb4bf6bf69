"""Groups of images whose tokens are routed together."""

import keras
from keras import ops


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
            mask = ops.reshape(mask, shape)
        tokens = ops.reshape(inputs, (*shape, inputs.shape[-1]))
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
        images = ops.reshape(is_image, (groups, group_images))
        images = ops.sum(ops.cast(images, "int32"), axis=-1)
        valid = ops.repeat(ops.expand_dims(is_image, -1), num_tokens, axis=-1)
        if mask is not None:
            empty = ops.zeros((group_images - 1, num_tokens), "bool")
            mask = ops.concatenate([mask, empty], axis=0)[:padded]
            valid = ops.logical_and(valid, mask)
    tokens = ops.reshape(inputs, (groups, tokens_of_group, width))
    if valid is not None:
        valid = ops.reshape(valid, (groups, tokens_of_group))
    count = None
    if mask is not None:
        count = _count(valid) * group_images // images
    return tokens, valid, count


def ungroup(outputs, inputs, group_images):
    """Undo `group` for tensors like its inputs, without images that fill up."""
    if group_images == 1:
        return outputs
    outputs = ops.reshape(outputs, (-1, *inputs.shape[1:]))
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
