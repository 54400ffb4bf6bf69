"""Resizing as matrix products, `rows @ image @ columns.T`, equal on every backend."""

import numpy as np


def bilinear_matrix(size, source):
    """Upsampling of `source` samples to `size`, pixel centres aligned, edges held.

    Args:
        size: int, number of samples wanted, at least `source`.
        source: int, number of samples given.

    Returns:
        float32 array of shape (size, source); every row sums to 1.
    """
    position = (np.arange(size) + 0.5) * source / size - 0.5
    position = np.clip(position, 0, source - 1)
    distance = np.abs(position[:, None] - np.arange(source))
    return np.clip(1 - distance, 0, None).astype("float32")


def area_matrix(size, source):
    """Downsampling of `source` samples to `size` by averaging what each one covers.

    Args:
        size: int, number of samples wanted, at most `source`.
        source: int, number of samples given.

    Returns:
        float32 array of shape (size, source); every row sums to 1.
    """
    edges = np.arange(size + 1)[:, None] * source / size
    pixel = np.arange(source)
    end = np.minimum(edges[1:], pixel + 1)
    begin = np.maximum(edges[:-1], pixel)
    covered = np.clip(end - begin, 0, None)
    return (covered * size / source).astype("float32")
