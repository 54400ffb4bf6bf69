"""Slots of all groups, expert by expert."""

import warnings

from keras import ops

from keras_softmoe.keras_adapter.layers import only_finds_shapes
from keras_softmoe.layers.tokens import joined_shape, sequence_shapes
from keras_softmoe.ops.kernels import reshape
from keras_softmoe.sharding.constraints import constrain, layout_of, num_shards


def by_expert(function, slots, path):
    """Apply a function to the slots of each expert, in all groups at once.

    Under a distribution with layouts for `slots_of_groups` and `slots_of_experts` below
    the path, slots are sent to the devices of the experts and back.

    Args:
        function: callable from `(E, N, D)` to a tensor of that shape.
        slots: `(G, E, C, D)` tensor.
        path: str, the path of the layer.

    Returns:
        `(G, E, C, D)` tensor.
    """
    _, num_experts, capacity, width = slots.shape
    of_groups, of_experts = f"{path}/slots_of_groups", f"{path}/slots_of_experts"
    # With experts first each bank is one batched product. With groups first, compilers
    # would transpose the hidden activations, which are several times larger.
    # (E, G, C, D)
    x = ops.transpose(constrain(slots, of_groups), (1, 0, 2, 3))
    # (E, G * C, D)
    x = function(reshape(constrain(x, of_experts), (num_experts, -1, width)))
    x = reshape(x, (num_experts, -1, capacity, width))
    x = ops.transpose(constrain(x, of_experts), (1, 0, 2, 3))
    return constrain(x, of_groups)


def warn_of_split_groups(layer, batch, groups):
    """Warn if images divide evenly among the devices, but groups do not.

    Args:
        layer: `MoE`.
        batch: number of images.
        groups: number of groups.
    """
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


# === Whole images instead of tokens ===


def map_shape(inputs_shape):
    """Return the shape of the tokens of one image, a tuple whose last entry is `D`."""
    if isinstance(inputs_shape, dict):
        inputs_shape = joined_shape(sequence_shapes(inputs_shape))
    return tuple(inputs_shape[1:])


def images_as_tokens(tokens, mask):
    """Return images as groups of one token, for a router that decides for images.

    Args:
        tokens: `(B, S, D)` tensor, zero where masked.
        mask: `(B, S)` bool tensor or `None`.

    Returns:
        The means of the images' tokens, `(B, 1, D)` in float32; all their tokens in one
        vector, `(B, 1, S * D)`; and the `(B, 1)` mask of images with any token, or
        `None`.
    """
    _, num_tokens, width = tokens.shape
    vectors = reshape(tokens, (-1, 1, num_tokens * width))
    # Sums in half precision may overflow.
    tokens = ops.cast(tokens, "float32")
    if mask is None:
        return ops.mean(tokens, axis=1, keepdims=True), vectors, None
    # (B, 1, 1)
    count = ops.sum(ops.cast(mask, "float32"), axis=1, keepdims=True)
    count = ops.expand_dims(ops.maximum(count, 1), -1)
    means = ops.sum(tokens, axis=1, keepdims=True) / count
    return means, vectors, ops.any(mask, axis=1, keepdims=True)


def slots_of_images(experts, slots, axes, **known):
    """Apply experts to slots that hold whole images.

    Args:
        experts: `Experts`, which take the tokens as slots of their own, or
            `TemplateExperts`, which take a map of them.
        slots: `(G, E, C, S * D)` tensor, or sorted rows `(N, S * D)`.
        axes: tuple of int: the axes of tokens, and `D`.
        **known: other arguments of the call.

    Returns:
        Tensor of the shape of `slots`.
    """
    *before, last = slots.shape
    if hasattr(experts, "expert"):
        x = reshape(slots, (-1, *before[1:], *axes))
    elif len(before) == 1:
        x = reshape(slots, (-1, axes[-1]))
        known["count"] = known["count"] * (last // axes[-1])
    else:
        rows = before[2] * (last // axes[-1])
        x = reshape(slots, (-1, before[1], rows, axes[-1]))
    return reshape(experts(x, **known), (-1, *before[1:], last))
