"""Initial routers and experts from the tokens of a dense model."""

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import check_numbers
from keras_softmoe.converters.token_statistics import (
    position_directions,
    scale_for,
    spherical_kmeans,
    truncated_kernel,
    unit,
)
from keras_softmoe.models.arguments import check_finite_images, check_images
from keras_softmoe.routers import SoftRouter

# Tokens by which the scale of logits is found.
_SCALING_TOKENS = 4096


def check_start(start, router, images, confidence):
    """Raise unless a router supports a start, before any work.

    Args:
        start: `"clusters"` or `"positions"`.
        router: a `Router`, the template.
        images: as in `upcycle`.
        confidence: float.
    """
    if images is None:
        raise ValueError(
            f"start={start!r} needs some hundred images for the dense model. "
            "Received: images=None. Pass them, as `images=...`."
        )
    kind = f"`{type(router).__name__}`"
    if isinstance(router, SoftRouter):
        kind += f" with dispatch={router.dispatch!r}, combine={router.combine!r}"
    if not getattr(router, "num_directions", 0):
        raise ValueError(
            f"A {kind} has no weights that tokens are compared with, so images cannot "
            f'initialize it. Received: start={start!r}. Take `start="copies"`, or '
            "another router."
        )
    if start == "positions" and not (
        isinstance(router, SoftRouter) and router.dispatch == router.combine == "soft"
    ):
        raise ValueError(
            'start="positions" gives each place of an image a slot of its own, which '
            f"takes a soft router. Received: a {kind}. Take "
            '`start="clusters"`, or a `SoftRouter` with soft dispatch and combine.'
        )
    check_numbers(over=1 / router.num_directions, under=1, confidence=confidence)


def tokens_for_mlps(backbone, layers, images):
    """Return the inputs of the MLPs of some blocks of a dense model.

    Args:
        backbone: dense `ViTMoEBackbone`.
        layers: sequence of int, the blocks.
        images: `(B, height, width, channels)` array, as the backbone takes them.

    Returns:
        dict from block to `(B, S, D)` float32 array.
    """
    blocks = {layer: backbone.blocks[layer] for layer in layers}
    tokens = {str(i): _BeforeMLP(block)(block.input) for i, block in blocks.items()}
    found = keras.Model(backbone.input, tokens).predict(images, 32, verbose=0)
    return {layer: found[str(layer)].astype("float32") for layer in layers}


def prepare_images(dense, backbone, images):
    """Return images as a dense backbone takes them, an array.

    Args:
        dense: the backbone, or a task, whose preprocessor is applied.
        backbone: the backbone.
        images: as in `upcycle`.
    """
    preprocessor = getattr(dense, "preprocessor", None)
    if preprocessor is not None:
        images = preprocessor(images)
    images = ops.convert_to_numpy(images)
    check_images(images, backbone.image_shape)
    check_finite_images(images)
    if not len(images):
        raise ValueError(
            "There is nothing to start from. Received: no image. Pass some hundred."
        )
    if preprocessor is None and images.dtype.kind in "iu":
        raise ValueError(
            "A backbone takes images in [-1, 1], which integers are not. Received: "
            f"images of dtype {images.dtype}. Scale them (`images / 127.5 - 1`), or "
            "upcycle a classifier, which has a preprocessor."
        )
    return images


class _BeforeMLP(keras.layers.Layer):
    """The part of a block before its MLP, for a model that ends there."""

    def __init__(self, block):
        super().__init__(dtype=block.dtype_policy)
        self.block = block

    def call(self, inputs):
        _, tokens = self.block.before_mlp(inputs, training=False)
        return tokens


def start_from_clusters(moe, mlp, tokens, energy, confidence, rng):
    """Set a router to centroids of tokens, and truncate each expert to its cluster.

    Args:
        moe: `layers.MoE`, whose experts are copies of `mlp`.
        mlp: `layers.MLP`, the dense one.
        tokens: `(B, S, D)` array, its inputs.
        energy: float, see `truncated_kernel`.
        confidence: float, see `upcycle`.
        rng: `numpy.random.Generator`.
    """
    tokens = tokens.reshape(-1, tokens.shape[-1])
    num_clusters = moe.router.num_directions
    if len(tokens) < num_clusters:
        raise ValueError(
            f"{num_clusters} clusters take as many tokens, better a hundred times as "
            f"many. Received: images of {len(tokens)} tokens in all. Pass more of them."
        )
    centroids, labels = spherical_kmeans(tokens, num_clusters, rng)
    _set_router(moe.router, centroids, tokens, confidence)
    if energy == 1:
        return
    num_experts = moe.router.num_experts
    # A soft router has several clusters for each expert, one after the other.
    expert_of_token = labels // (num_clusters // num_experts)
    banks = moe.experts.intermediate_dense, moe.experts.output_dense
    dense = mlp.intermediate_dense, mlp.output_dense
    dense = [ops.convert_to_numpy(layer.kernel).astype("float32") for layer in dense]
    kernels = [np.empty(bank.kernel.shape, "float32") for bank in banks]
    for expert in range(num_experts):
        own = tokens[expert_of_token == expert]
        hidden = mlp.hidden(ops.convert_to_tensor(own, mlp.variable_dtype))
        hidden = ops.convert_to_numpy(ops.stop_gradient(hidden))
        inputs = own, hidden.astype("float32")
        for kernel, given, x in zip(kernels, dense, inputs, strict=True):
            kernel[expert] = truncated_kernel(given, x, energy)
    for bank, kernel in zip(banks, kernels, strict=True):
        bank.kernel.assign(kernel)


def start_from_positions(moe, tokens, confidence):
    """Let each slot of a soft router take the token of a position and return it there.

    Args:
        moe: `layers.MoE` with a soft router, whose experts are copies.
        tokens: `(B, S, D)` array, the inputs of the dense MLP.
        confidence: float, see `upcycle`.
    """
    num_tokens, width = tokens.shape[1:]
    num_slots = moe.router.num_directions
    directions = position_directions(tokens, min(num_slots, num_tokens))
    # Where there are more slots than places, some take the same token.
    place = np.arange(num_slots) * len(directions) // num_slots
    tokens = tokens.reshape(-1, width)
    _set_router(moe.router, directions, tokens, confidence, place)


def _set_router(router, directions, tokens, confidence, rows=slice(None)):
    """Set the directions of a router, scaled to a mean confidence.

    Args:
        router: built router.
        directions: `(K, D)` array of unit vectors.
        tokens: `(N, D)` array.
        confidence: float.
        rows: index of the directions, one for each of the router's.
    """
    tokens = tokens[:: max(len(tokens) // _SCALING_TOKENS, 1)]
    if router.normalizes_tokens:
        tokens = unit(tokens)
    scale = scale_for(tokens @ directions.T, confidence)
    router.set_directions(scale * directions[rows])
