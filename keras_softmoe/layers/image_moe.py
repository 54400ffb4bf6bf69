"""The mixture of experts that routes whole images instead of tokens."""

import math
from collections.abc import Sequence

import keras
from keras import ops

from keras_softmoe.checks import received
from keras_softmoe.layers.groups import as_sequence, group, ungroup
from keras_softmoe.layers.moe import MoE
from keras_softmoe.ops import combine, dispatch
from keras_softmoe.ops.kernels import reshape
from keras_softmoe.ops.selection import zero_padding
from keras_softmoe.sharding.constraints import is_distributed


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ImageMoE(MoE):
    """Mixture of experts whose router decides for whole images.

    The router gets means of images, `(G, group_images, D)`, experts get all tokens.

    Args:
        router, mlp_dim, ...: as in `MoE`. A template `expert` gets the map in its shape
            (`(N, H, W, D)` for `(B, H, W, D)`), so it may be a convolution.

    Maps `inputs` and an optional `mask` like `MoE`. Images whose tokens are all masked
    take no slot. In `routers.record` each image has the place of a token.

    Raises:
        ValueError: as in `MoE`; or if the router distinguishes modalities.

    Source: Daxberger et al. 2023 (Mobile V-MoE, arXiv 2309.04354), section 2.

    Examples:
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(num_experts=8)
        >>> convolution = keras.layers.Conv2D(32, 3, padding="same")
        >>> layer = ksm.layers.ImageMoE(router, expert=convolution, group_images=8)
        >>> layer(np.random.normal(size=(8, 4, 4, 32))).shape
        (8, 4, 4, 32)
    """

    routes_images = True

    def build(self, inputs_shape):
        if self.router.knows_modalities:
            raise ValueError(
                "A router that distinguishes tokens of images and text cannot route "
                f"whole images. {received(router=self.router)}"
            )
        if None in inputs_shape[1:]:
            raise ValueError(
                "`ImageMoE` needs to know all sizes except the batch's. Received: "
                f"shape={tuple(inputs_shape)}. Give them to `keras.Input`."
            )
        self._map_shape = tuple(inputs_shape[1:])
        super().build(inputs_shape)

    def call(self, inputs, mask=None, training=None):
        x, mask = as_sequence(inputs, mask)
        # (B, 1, D) means for the router, and (B, 1, S * D) images for the experts
        means, images, valid = images_as_tokens(x, mask)
        groups = self.images_of_group(training), self.router.num_experts
        tokens, valid, counts = group(means, valid, *groups)
        sharded = is_distributed()
        if sharded:
            self._check_groups(x.shape[0], tokens.shape[0])
        routing, rows = self._route(tokens, valid, counts, training)
        # The images themselves, in the same groups: (G, group_images, S * D)
        slots, _, _ = group(images, None, *groups)
        if self.dispatch_dtype:
            slots = self._rounded(slots)
        # (G, E, C, S * D)
        slots = dispatch(slots, routing, sharded)
        known = {"training": training, **rows}
        slots = slots_of_images(self.experts, slots, self._map_shape, **known)
        if self.dispatch_dtype:
            slots = self._rounded(slots)
        outputs = combine(slots, routing, tokens.shape[1], sharded)
        if groups[0] != 1:
            outputs = ungroup(outputs, images)
        # An expert computes masked tokens of its images, too.
        outputs = zero_padding(reshape(outputs, ops.shape(x)), mask)
        if self.shared_mlp is not None:
            outputs = outputs + zero_padding(self.shared_mlp(x), mask)
        return reshape(outputs, (-1, *inputs.shape[1:]))


def images_as_tokens(tokens, mask):
    """Return images as groups of one token, for a router that decides for images.

    Tokens are `(B, S, D)`, zero where the `(B, S)` mask is `False`. The result is their
    means in float32, `(B, 1, D)`; all tokens in one vector, `(B, 1, S * D)`; and a
    `(B, 1)` mask of images with any token, or `None` without a mask.
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


def slots_of_images(experts, slots, axes: Sequence[int], **known):
    """Apply experts to slots that hold whole images.

    For `Experts` a token is a slot, for `TemplateExperts` an image is a map. Slots are
    `(G, E, C, S * D)`, or rows `(N, S * D)`; `axes` are those of tokens, and `D`.
    """
    *before, last = slots.shape
    num_tokens = math.prod(axes[:-1])
    if hasattr(experts, "expert"):
        x = reshape(slots, (-1, *before[1:], *axes))
    elif len(before) == 1:
        x = reshape(slots, (-1, axes[-1]))
        known["count"] = known["count"] * num_tokens
    else:
        x = reshape(slots, (-1, before[1], before[2] * num_tokens, axes[-1]))
    return reshape(experts(x, **known), (-1, *before[1:], last))
