"""Position embeddings of patches: a fixed table, and resampling of learned ones."""

import numpy as np
from keras import ops


def sincos_2d_table(rows, columns, width, temperature=10000.0):
    """Return fixed sine and cosine position embeddings, `(rows * columns, width)`.

    For the patch in row `y` and column `x` and frequencies
    `w_i = temperature ** (-i / (width / 4 - 1))` the row of the table is
    `[sin(x w), cos(x w), sin(y w), cos(y w)]`, float32. The width is a multiple of 4,
    at least 8, and the largest wavelength in patches is `2 pi temperature`.

    Source: the fixed embeddings of Soft MoE's released code; Beyer et al. 2022
    (Better plain ViT baselines for ImageNet-1k).
    """
    if width % 4 or width < 8:
        raise ValueError(
            "`hidden_dim` must be a multiple of 4 and at least 8 for sine-cosine "
            f"position embeddings. Received: hidden_dim={width}. Use another, or "
            "`position_embedding='learned'`."
        )
    y, x = np.mgrid[:rows, :columns].reshape(2, -1, 1)
    frequencies = temperature ** -np.linspace(0.0, 1.0, width // 4)
    parts = [f(p * frequencies) for p in (x, y) for f in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1).astype("float32")


def resample_position_grid(grid, height, width, resampling="bilinear"):
    """Resize a `(h, w, D)` grid of position embeddings to `(height, width, D)`.

    `resampling` is one of `RESAMPLINGS`, see `layers.PositionEmbedding`. Source: V-MoE,
    section 4.4, after Dosovitskiy et al. 2021, section 3.2; cubic kernel: Keys 1981.
    """
    grid, weights = ops.convert_to_tensor(grid), _INTERPOLATIONS[resampling]
    rows = ops.cast(weights(grid.shape[0], height), grid.dtype)
    columns = ops.cast(weights(grid.shape[1], width), grid.dtype)
    return ops.einsum("hi,wj,ijd->hwd", rows, columns, grid)


def _linear(old, new):
    """Return the `(new, old)` matrix of linear weights, with aligned corners."""
    source = np.linspace(0.0, old - 1.0, new)
    distance = np.abs(source[:, None] - np.arange(old))
    return np.maximum(1.0 - distance, 0.0)


def _cubic(old, new):
    """Return the `(new, old)` matrix of cubic weights, with repeated ends."""
    source = (np.arange(new) + 0.5) * old / new - 0.5
    weights = np.zeros((new, old))
    for step in range(-1, 3):
        place = np.floor(source) + step
        # Outside of the axis, the entry at its end is repeated.
        inside = np.clip(place, 0, old - 1).astype(int)
        weights[np.arange(new), inside] += _cubic_kernel(source - place, -0.75)
    return weights


def _cubic_antialias(old, new):
    """Return cubic weights with a kernel as wide as the step, cut off at the ends."""
    step = max(old / new, 1.0)
    source = (np.arange(new) + 0.5) * old / new - 0.5
    distance = source[:, None] - np.arange(old)
    weights = _cubic_kernel(distance / step, -0.5)
    return weights / weights.sum(axis=1, keepdims=True)


def _cubic_kernel(distance, a):
    """Return Keys' kernel, which is zero from a distance of two on."""
    x = np.abs(distance)
    near = ((a + 2.0) * x - (a + 3.0)) * x**2 + 1.0
    far = a * (((x - 5.0) * x + 8.0) * x - 4.0)
    return np.where(x <= 1.0, near, np.where(x < 2.0, far, 0.0))


_INTERPOLATIONS = {
    "bilinear": _linear,
    "bicubic": _cubic,
    "bicubic_antialias": _cubic_antialias,
}
RESAMPLINGS = tuple(_INTERPOLATIONS)
