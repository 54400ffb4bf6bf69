"""Icons, each distorted anew: batches that follow from a seed."""

import math

import numpy as np

# Pictures are drawn in blocks, one random stream each. Part of what a seed means.
BLOCK = 128
# Ranges of the distortions: scale (of each axis, exponent of e), angle and shear
# (radians), shift (pixels), contrast, noise
SCALE, ANGLE, SHEAR, SHIFT, CONTRAST, NOISE = 0.2, 0.25, 0.2, 3.0, 0.5, 0.05


class Icons:
    """Pictures of the icons of a bank.

    Args:
        bank: `bank.Bank`.
        concepts: int or `None`, so many of the trained concepts, the first ones.
    """

    block = BLOCK

    def __init__(self, bank, concepts=None):
        self.bank = bank
        self.num_classes = min(concepts or bank.num_concepts, bank.num_concepts)

    def batches(self, seed, start=0):
        """Draw pictures of the split `"train"` without end.

        Args:
            seed: int.
            start: int, number of the first block.

        Returns:
            iterator over `(BLOCK, 32, 32, 3)` uint8 images and `(BLOCK,)` int32 labels.
            Block `n` depends on the seed and `n` alone.
        """
        rows, labels = self.rows("train")
        block = start
        while True:
            rng = np.random.default_rng((seed, block))
            index = rng.integers(len(rows), size=BLOCK)
            yield distort(self.bank.pictures[rows[index]], rng), labels[index]
            block += 1

    def rows(self, split):
        """Return the rows of a split, and their labels, as `Bank.rows`."""
        rows, labels = self.bank.rows(split)
        if split != "held_out_concepts":
            known = labels < self.num_classes
            rows, labels = rows[known], labels[known]
        return rows, labels

    def some(self, split, count=None):
        """Return some or all pictures of a split as they are drawn, and labels."""
        rows, labels = self.rows(split)
        chosen = np.random.default_rng(0).permutation(len(rows))[:count]
        return three_channels(self.bank.pictures[rows[chosen]]), labels[chosen]


def distort(pictures, rng):
    """Move, turn, stretch and shear pictures, change contrast, invert half of them.

    Args:
        pictures: `(N, 32, 32)` uint8 array, ink bright.
        rng: `np.random.Generator`.

    Returns:
        `(N, 32, 32, 3)` uint8 array.
    """
    count, side = pictures.shape[:2]

    def uniform(reach):
        return rng.uniform(-reach, reach, (count, 1, 1)).astype("float32")

    axis = np.arange(side, dtype="float32") - (side - 1) / 2
    y, x = axis[:, None], axis[None, :]
    angle, shear = uniform(ANGLE), uniform(SHEAR)
    cos, sin = np.cos(angle), np.sin(angle)
    # Where in the icon each pixel of the picture lies, (N, 32, 32) each
    u = (cos * x + sin * y) * np.exp(uniform(SCALE)) + shear * y + uniform(SHIFT)
    v = (cos * y - sin * x) * np.exp(uniform(SCALE)) + uniform(SHIFT)
    ink = _sampled(pictures, u + (side - 1) / 2, v + (side - 1) / 2)
    ink *= rng.uniform(CONTRAST, 1, (count, 1, 1)).astype("float32")
    ink += NOISE * 255 * rng.standard_normal(ink.shape, "float32")
    ink = np.clip(ink, 0, 255)
    inverted = rng.random((count, 1, 1)) < 0.5
    return three_channels(np.where(inverted, 255 - ink, ink).astype("uint8"))


def three_channels(pictures):
    """Return `(N, 32, 32, 3)` of `(N, 32, 32)` pictures."""
    return np.repeat(pictures[..., None], 3, axis=-1)


def _sampled(pictures, u, v):
    """Bilinear samples at columns `u` and rows `v`; black outside."""
    count, side = pictures.shape[:2]
    # A black border of one pixel, on which all that lies outside is
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1)))
    u, v = (np.clip(place + 1, 0, side + 1 - 1e-3) for place in (u, v))
    left, top = u.astype("int32"), v.astype("int32")
    a, b = u - left, v - top
    flat = padded.reshape(-1)
    start = np.arange(count, dtype="int32")[:, None, None] * math.prod(padded.shape[1:])
    at = start + top * (side + 2) + left
    upper = flat[at] * (1 - a) + flat[at + 1] * a
    lower = flat[at + side + 2] * (1 - a) + flat[at + side + 3] * a
    return upper * (1 - b) + lower * b
