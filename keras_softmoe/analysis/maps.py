"""Where in an image each expert works."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_softmoe.ops.routing import to_dense


class RoutingMaps(NamedTuple):
    """Routing of some images at one block, laid out on the grid of patches.

    The class token, if the model has one, is left out.

    Attributes:
        dispatch: `(B, rows, columns, E, C)` float32 array, how much of each patch goes
            into slot `c` of expert `e`. Soft routers: weights that sum to one over the
            tokens of the group. Sparse routers: 1 where the patch sits in the slot,
            else 0.
        combine: `(B, rows, columns, E, C)` float32 array, how much of that slot's
            output each patch receives.
        images: `(B, height, width, channels)` float32 array, the images as the model
            saw them, in `[-1, 1]`.
        layer: int, the block.
        group_tokens: int, tokens of a group, those of an image unless images are routed
            together.
    """

    dispatch: np.ndarray
    combine: np.ndarray
    images: np.ndarray
    layer: int
    group_tokens: int


def routing_maps(model, images, layer=None, preprocessor=None):
    """Route some images and lay the decisions of one block out on the patch grid.

    Under a router with `group_images > 1` the images compete for slots with those
    beside them, in the order given.

    Args:
        model: `ViTMoEBackbone`, or a task that has one (its `preprocessor`, if any, is
            applied to the images).
        images: `(B, height, width, channels)` array, routed as one batch. A few: the
            result holds `B * S * E * C` numbers twice.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        preprocessor: callable applied to the images, such as a preset's image
            converter. By default a task's own, else none: floats in `[-1, 1]` are
            then expected.

    Returns:
        `RoutingMaps`.

    Raises:
        ValueError: if the model is dense, the block is not one of its MoE blocks, or
            the images are not a batch that the model takes.

    Source: Soft MoE, section 2.1 (dispatch and combine weights); V-MoE, section 5.

    Example:

    >>> maps = ksm.evaluation.routing_maps(classifier, images)
    >>> maps.dispatch.shape
    (4, 8, 8, 16, 4)
    """
    model, preprocessor = backbone_of(model, preprocessor)
    layer = _check_layer(model, layer)
    images = prepared(model, images, preprocessor)
    routing = model.route(images)[layer].routing
    # Tokens of an image, then of a group.
    num_tokens = model.output["sequence_output"].shape[1]
    group_images = model.group_images or len(images)
    group_tokens = num_tokens * group_images
    dense = to_dense(routing, group_tokens)
    dispatch, combine = (
        _to_patches(weights, num_tokens, model.patch_grid)[: len(images)]
        for weights in dense
    )
    return RoutingMaps(dispatch, combine, images, layer, group_tokens)


def main_experts(maps):
    """The expert that each patch listens to most.

    That is the one with the largest combine weight, summed over its slots.

    Args:
        maps: `RoutingMaps`.

    Returns:
        `(B, rows, columns)` int array; -1 where no expert takes the patch.

    Example:

    >>> experts = ksm.evaluation.main_experts(maps)
    >>> (experts < 0).mean()  # share of dropped patches
    """
    # (B, rows, columns, E)
    weight = maps.combine.sum(axis=-1)
    dropped = maps.dispatch.sum(axis=(-2, -1)) == 0
    return np.where(dropped, -1, weight.argmax(axis=-1))


def backbone_of(model, preprocessor=None):
    """The backbone of a task (or the model itself) and the preprocessor to use."""
    if isinstance(getattr(model, "backbone", None), keras.Model):
        return model.backbone, preprocessor or model.preprocessor
    return model, preprocessor


def prepared(backbone, images, preprocessor):
    """Images as the backbone takes them, a float32 array.

    Raises:
        ValueError: if they are not a batch that the model takes.
    """
    if preprocessor is not None:
        images = preprocessor(images)
    elif "int" in keras.backend.standardize_dtype(images.dtype):
        raise ValueError(
            "Integer images need a preprocessor that scales them to [-1, 1]. "
            f"Received: images of dtype={images.dtype}, preprocessor=None. Pass the "
            "preset's `ViTMoEImageConverter`, or the task in place of its backbone."
        )
    images = ops.convert_to_numpy(images).astype("float32")
    if images.shape[1:] != backbone.image_shape or not len(images):
        raise ValueError(
            f"The model takes batches of {backbone.image_shape} images. Received: "
            f"images of shape={images.shape}. Add the batch axis, or resize them "
            "first."
        )
    return images


def _to_patches(weights, num_tokens, grid):
    """`(G, tokens of a group, E, C)` to `(images, rows, columns, E, C)`."""
    weights = ops.convert_to_numpy(weights)
    slots = weights.shape[2:]
    weights = weights.reshape(-1, num_tokens, *slots)
    first = num_tokens - grid[0] * grid[1]
    return weights[:, first:].reshape(-1, *grid, *slots)


def check_has_routers(backbone):
    """Raise unless the model has MoE blocks."""
    moe_layers = getattr(backbone, "moe_layers", ())
    if not moe_layers:
        raise ValueError(
            "A dense model routes nothing. Pass a `ViTMoEBackbone` with `moe_layers`, "
            f"or a task that has one. Received: {type(backbone).__name__} with "
            f"moe_layers={moe_layers}."
        )


def _check_layer(backbone, layer):
    check_has_routers(backbone)
    moe_layers = backbone.moe_layers
    if layer is None:
        return moe_layers[0]
    if layer not in moe_layers:
        raise ValueError(
            f"Only the blocks {moe_layers} are mixtures of experts. "
            f"Received: layer={layer}."
        )
    return layer
