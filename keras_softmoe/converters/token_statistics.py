"""Statistics of the tokens of a dense model, for new routers and experts.

Plain NumPy: it runs once, before training.
"""

import numpy as np

_MOST_ITERATIONS = 100
# Rows at a time, so that a table of all tokens and all clusters is never made.
_CHUNK = 8192
# Added to all squared singular values, as a share of the largest.
_RIDGE = 1e-6


def unit(vectors):
    """Normalize vectors along the last axis; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1.0)


def spherical_kmeans(tokens, num_clusters, rng):
    """Cluster directions: each token belongs to the centroid of largest cosine.

    The first centroids are tokens, drawn as in k-means++; the centroid of an empty
    cluster is replaced by the token with the smallest cosine to its own.

    Args:
        tokens: `(N, D)` float array.
        num_clusters: int, at most `N`.
        rng: `numpy.random.Generator`.

    Returns:
        `(num_clusters, D)` centroids of length one, and the `(N,)` int array of the
        clusters of the tokens.

    Source: Dhillon and Modha 2001 (spherical k-means); Arthur and Vassilvitskii 2007
    (k-means++).
    """
    points = unit(tokens)
    centroids = _first_centroids(points, num_clusters, rng)
    labels, cosines = _nearest(points, centroids)
    for _ in range(_MOST_ITERATIONS):
        sums = np.zeros_like(centroids)
        np.add.at(sums, labels, points)
        counts = np.bincount(labels, minlength=num_clusters)
        (empty,) = np.nonzero(counts == 0)
        sums[empty] = points[np.argsort(cosines, kind="stable")[: len(empty)]]
        centroids = unit(sums)
        before = labels
        labels, cosines = _nearest(points, centroids)
        if np.array_equal(labels, before):
            break
    return centroids, labels


def truncated_kernel(kernel, inputs, energy):
    """Return the kernel of lowest rank that keeps most of its outputs for some inputs.

    Of all matrices of a rank, `kernel @ V @ V.T` changes `inputs @ kernel` least (in
    the sum of squares), where the columns of `V` are the first right singular vectors
    of that product: Eckart and Young. The rank is the lowest at which the sum of
    squares that is left is at least `energy` of the whole.

    Args:
        kernel: `(D, H)` float array.
        inputs: `(N, D)` float array.
        energy: float in (0, 1]. With 1 the kernel is returned as it is.

    Returns:
        `(D, H)` array.
    """
    if energy == 1 or not len(inputs):
        return kernel
    # With Q of length-preserving columns, `Q @ root` are the inputs: `root` has their
    # singular values and right singular vectors, in at most D rows.
    root = np.linalg.qr(inputs, mode="r")
    _, values, directions = np.linalg.svd(root @ kernel, full_matrices=False)
    kept = np.cumsum(np.square(values, dtype="float64"))
    rank = 1 + int(np.searchsorted(kept, energy * kept[-1]))
    directions = directions[:rank]
    return kernel @ directions.T @ directions


def position_directions(tokens, num_groups):
    """Return directions that separate tokens by position.

    Positions are cut into groups of neighbours. The direction of a group is that of its
    column in the ridge regression of "is this token of that group" on the tokens.

    Args:
        tokens: `(B, S, D)` float array.
        num_groups: int, at most `S`.

    Returns:
        `(num_groups, D)` array of vectors of length one.
    """
    _, num_tokens, width = tokens.shape
    groups = np.arange(num_tokens) * num_groups // num_tokens
    points = unit(tokens).astype("float64")
    # (D, D), (D, groups)
    moments = np.einsum("bsd,bse->de", points, points, optimize=True)
    sums = np.zeros((num_groups, width))
    np.add.at(sums, groups, points.sum(axis=0))
    ridge = _RIDGE * np.linalg.eigvalsh(moments)[-1] * np.eye(width)
    directions = unit(np.linalg.solve(moments + ridge, sums.T).T)
    return directions.astype(tokens.dtype)


def scale_for(logits, confidence):
    """Return the factor of logits that gives their softmax a mean confidence.

    Args:
        logits: `(N, K)` float array.
        confidence: float, the wanted mean of the largest probabilities.

    Returns:
        float. With ties the mean may stay below `confidence` at any factor; it is large
        then.
    """
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
