"""Initial routers and experts from the tokens of a dense model, in plain NumPy."""

import keras
import numpy as np
from keras import ops
from keras.utils import normalize

from keras_softmoe.checks import check_finite, check_numbers
from keras_softmoe.models.arguments import check_images
from keras_softmoe.routers import SoftRouter

# Tokens by which the scale of logits is found
_SCALING_TOKENS = 4096
_MOST_ITERATIONS = 100
# Rows at a time, so that a table of all tokens and all clusters is never made.
_CHUNK = 8192
# Added to all squared singular values, as a share of the largest.
_RIDGE = 1e-6


def check_start(start, router, images, confidence):
    """Raise unless a router supports a start from images."""
    if images is None:
        raise ValueError(
            f"start={start!r} needs some hundred images. Received: images=None."
        )
    kind = f"`{type(router).__name__}`"
    if isinstance(router, SoftRouter):
        kind += f" with dispatch={router.dispatch!r}, combine={router.combine!r}"
    if not getattr(router, "num_directions", 0):
        raise ValueError(
            f"A {kind} has no weights that tokens are compared with, so images cannot "
            f"initialize it. Received: start={start!r}."
        )
    if start == "positions" and not (
        isinstance(router, SoftRouter) and router.dispatch == router.combine == "soft"
    ):
        raise ValueError(
            'start="positions" gives each position of an image a slot of its own, and '
            f"needs a `SoftRouter` with soft dispatch and combine. Received: a {kind}."
        )
    check_numbers(over=1 / router.num_directions, under=1, confidence=confidence)


def tokens_for_mlps(backbone, layers, images):
    """Return the inputs of the MLPs of some blocks, `(B, S, D)` float32 arrays."""
    blocks = {layer: backbone.blocks[layer] for layer in layers}
    tokens = {str(i): _BeforeMLP(block)(block.input) for i, block in blocks.items()}
    found = keras.Model(backbone.input, tokens).predict(images, 32, verbose=0)
    return {layer: found[str(layer)].astype("float32") for layer in layers}


def prepare_images(dense, backbone, images):
    """Return images as a dense backbone takes them, prepared like those of a task."""
    preprocessor = getattr(dense, "preprocessor", None)
    if preprocessor is not None:
        images = preprocessor(images)
    images = ops.convert_to_numpy(images)
    check_images(images, backbone.image_shape)
    check_finite("Images", images, "image")
    if not len(images) or (preprocessor is None and images.dtype.kind in "iu"):
        raise ValueError(
            "There must be images to start from, for a backbone floats in [-1, 1] "
            "(`images / 127.5 - 1`); a classifier has a preprocessor. "
            f"Received: {len(images)} images of dtype {images.dtype}."
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
    """Set a router to centroids of `(B, S, D)` tokens, and truncate experts to them."""
    tokens = tokens.reshape(-1, tokens.shape[-1])
    num_clusters = moe.router.num_directions
    if len(tokens) < num_clusters:
        raise ValueError(
            f"{num_clusters} clusters need at least {num_clusters} tokens, better a "
            f"hundred times more. Received: images of {len(tokens)} tokens in all."
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
    """Let each slot of a soft router get and return the token of a position."""
    num_tokens, width = tokens.shape[1:]
    num_slots = moe.router.num_directions
    directions = position_directions(tokens, min(num_slots, num_tokens))
    # With more slots than positions, some get the same token.
    place = np.arange(num_slots) * len(directions) // num_slots
    tokens = tokens.reshape(-1, width)
    _set_router(moe.router, directions, tokens, confidence, place)


def _set_router(router, directions, tokens, confidence, rows=slice(None)):
    """Set the directions of a router to those of some rows, scaled to a confidence."""
    tokens = tokens[:: max(len(tokens) // _SCALING_TOKENS, 1)]
    if router.normalizes_tokens:
        tokens = normalize(tokens)
    scale = scale_for(tokens @ directions.T, confidence)
    router.set_directions(scale * directions[rows])


def spherical_kmeans(tokens, num_clusters, rng):
    """Return centroids of length 1, `(num_clusters, D)`, and the cluster of each token.

    Source: Dhillon and Modha 2001 (spherical k-means); Arthur and Vassilvitskii 2007
    (k-means++).
    """
    points = normalize(tokens)
    centroids = _first_centroids(points, num_clusters, rng)
    labels, cosines = _nearest(points, centroids)
    for _ in range(_MOST_ITERATIONS):
        sums = np.zeros_like(centroids)
        np.add.at(sums, labels, points)
        counts = np.bincount(labels, minlength=num_clusters)
        (empty,) = np.nonzero(counts == 0)
        sums[empty] = points[np.argsort(cosines, kind="stable")[: len(empty)]]
        centroids = normalize(sums)
        before = labels
        labels, cosines = _nearest(points, centroids)
        if np.array_equal(labels, before):
            break
    return centroids, labels


def truncated_kernel(kernel, inputs, energy):
    """Return a `(D, H)` kernel of lowest rank with a share of the outputs' squares."""
    if energy == 1 or not len(inputs):
        return kernel
    # Of all matrices of a rank, `kernel @ V @ V.T` changes `inputs @ kernel` least,
    # where the columns of V are the first right singular vectors of that product
    # (Eckart and Young).
    # The triangular factor has the singular values of the inputs in at most D rows.
    root = np.linalg.qr(inputs, mode="r")
    _, values, directions = np.linalg.svd(root @ kernel, full_matrices=False)
    kept = np.cumsum(np.square(values, dtype="float64"))
    rank = 1 + int(np.searchsorted(kept, energy * kept[-1]))
    directions = directions[:rank]
    return kernel @ directions.T @ directions


def position_directions(tokens, num_groups):
    """Return directions that separate tokens by position, `(num_groups, D)`.

    Positions are divided into groups of neighbours. The direction of a group is that of
    its column in the ridge regression of the token's group on the `(B, S, D)` tokens.
    """
    _, num_tokens, width = tokens.shape
    groups = np.arange(num_tokens) * num_groups // num_tokens
    points = normalize(tokens).astype("float64")
    # (D, D), (D, groups)
    moments = np.einsum("bsd,bse->de", points, points, optimize=True)
    sums = np.zeros((num_groups, width))
    np.add.at(sums, groups, points.sum(axis=0))
    ridge = _RIDGE * np.linalg.eigvalsh(moments)[-1] * np.eye(width)
    directions = normalize(np.linalg.solve(moments + ridge, sums.T).T)
    return directions.astype(tokens.dtype)


def scale_for(logits, confidence):
    """Return the factor of `(N, K)` logits for a mean of the largest probabilities."""
    margins = logits - logits.max(axis=-1, keepdims=True)
    spread = float(-margins.mean()) or 1.0
    least, most = np.log(1e-3 / spread), np.log(1e4 / spread)
    for _ in range(40):
        middle = (least + most) / 2
        # The largest term is 1.
        largest = 1.0 / np.exp(np.exp(middle) * margins).sum(axis=-1)
        if largest.mean() < confidence:
            least = middle
        else:
            most = middle
    return float(np.exp(most))


def _first_centroids(points, count, rng):
    """Return distinct points, each drawn by its distance from those before it."""
    chosen = [int(rng.integers(len(points)))]
    # Squared distances on the sphere are 2 - 2 cosines.
    distances = np.full(len(points), np.inf)
    while len(chosen) < count:
        distances = np.minimum(distances, 1.0 - points @ points[chosen[-1]])
        distances = np.maximum(distances, 0.0)
        distances[chosen] = 0.0
        weights = distances.astype("float64")
        if not weights.any():
            # Fewer different tokens than clusters
            weights[:] = 1.0
            weights[chosen] = 0.0
        chosen.append(int(rng.choice(len(points), p=weights / weights.sum())))
    return points[chosen]


def _nearest(points, centroids):
    """Return the clusters of points, and the cosines to their centroids."""
    labels = np.empty(len(points), "int64")
    cosines = np.empty(len(points), points.dtype)
    for start in range(0, len(points), _CHUNK):
        rows = slice(start, start + _CHUNK)
        products = points[rows] @ centroids.T
        labels[rows] = products.argmax(axis=-1)
        cosines[rows] = products.max(axis=-1)
    return labels, cosines
