"""Where in an image each expert works."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe.analysis._inputs import backbone_of, check_block
from keras_softmoe.analysis._streaming import LastDecision, observe
from keras_softmoe.ops import to_dense


class RoutingMaps(NamedTuple):
    """Routing of some images at one block, laid out on the grid of patches.

    The class token, if the model has one, is left out.

    Attributes:
        dispatch: `(B, rows, columns, E, C)` float32 array, how much of each patch goes
            into slot `c` of expert `e`. Soft routers: weights that sum to one over the
            tokens of the group. Sparse routers: 1 where the slot holds the patch,
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


def routing_maps(
    model: keras.Model,
    images: ArrayLike,
    layer: int | None = None,
    preprocessor: Callable | None = None,
) -> RoutingMaps:
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

    Examples:
        >>> maps = ksm.analysis.routing_maps(soft, images)
        >>> maps.dispatch.shape
        (8, 8, 8, 16, 4)
    """
    backbone, _ = backbone_of(model)
    layer = check_block(backbone, layer)
    # One batch.
    reducers = [LastDecision(layer)]
    ((decision, images),) = observe(
        model, [images], reducers, preprocessor=preprocessor, verbose=0
    )
    # Tokens of an image, then of a group.
    num_tokens = backbone.output["sequence_output"].shape[1]
    group_tokens = decision.summary["valid"].shape[1]
    dispatch, combine = (
        _to_patches(weights, num_tokens, backbone.patch_grid)[: len(images)]
        for weights in to_dense(decision.routing, group_tokens)
    )
    return RoutingMaps(dispatch, combine, images, layer, group_tokens)


def main_experts(maps: RoutingMaps) -> np.ndarray:
    """The expert with the largest combine weight, summed over its slots, per patch.

    Args:
        maps: `RoutingMaps`.

    Returns:
        `(B, rows, columns)` int array; -1 where no expert takes the patch.

    Examples:
        >>> maps = ksm.analysis.routing_maps(sparse, images)
        >>> experts = ksm.analysis.main_experts(maps)
        >>> (experts < 0).mean()  # share of dropped patches
    """
    # (B, rows, columns, E)
    weight = maps.combine.sum(axis=-1)
    dropped = maps.dispatch.sum(axis=(-2, -1)) == 0
    return np.where(dropped, -1, weight.argmax(axis=-1))


def _to_patches(weights, num_tokens, grid):
    """`(G, tokens of a group, E, C)` to `(images, rows, columns, E, C)`."""
    weights = ops.convert_to_numpy(weights)
    slots = weights.shape[2:]
    weights = weights.reshape(-1, num_tokens, *slots)
    first = num_tokens - grid[0] * grid[1]
    return weights[:, first:].reshape(-1, *grid, *slots)
