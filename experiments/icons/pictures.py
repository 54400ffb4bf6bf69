"""Icons as they are trained on: moved, turned, of other contrast, on light and dark."""

import numpy as np

from experiments.icons.sources import SIZE

# Of random distortions: degrees, factors and pixels.
_DEGREES, _SHEAR, _SMALLEST, _LARGEST, _SHIFT = 10.0, 0.1, 0.8, 1.15, 2.0
_INVERTED = 0.3
# The grey of the ground, and the least difference of the ink from it.
_GROUND, _LEAST_CONTRAST = 100, 110
# Epochs in which distortions grow to their whole strength: in short trials on 20
# concepts (one seed) the loss fell sooner with weaker ones.
_RISE = 4


class Icons:
    """Batches of one training, which follow from the seed, the epoch and the step.

    Args:
        bank: `Bank`.
        seed: int.
        batch_size: int.
    """

    def __init__(self, bank, seed, batch_size):
        self.bank, self.seed, self.batch_size = bank, seed, batch_size
        self.rows, self.labels = bank.rows("train")
        self.counts = np.bincount(self.labels)
        order = np.argsort(self.labels, kind="stable")
        # The training icons of each concept
        self.of_concept = np.split(self.rows[order], np.cumsum(self.counts)[:-1])

    @property
    def steps_per_epoch(self):
        """Number of batches with as many icons as there are, a last one left out."""
        return len(self.rows) // self.batch_size

    def labelled(self, epoch):
        """Iterator over batches of pictures and labels, each icon once."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))
        for step in range(self.steps_per_epoch):
            random = np.random.default_rng((self.seed, epoch, step))
            chosen = order[step * self.batch_size :][: self.batch_size]
            pictures = self.bank.pictures[self.rows[chosen]]
            yield distorted(pictures, random, strength(epoch)), self.labels[chosen]

    def named(self, epoch):
        """Iterator over batches of pictures and names, no two of one concept.

        Two names of a concept in a batch would be told apart. Concepts are drawn by
        their number of icons.
        """
        share = self.counts / self.counts.sum()
        for step in range(self.steps_per_epoch):
            random = np.random.default_rng((self.seed, epoch, step))
            concepts = random.choice(
                len(share), self.batch_size, replace=False, p=share
            )
            rows = [random.choice(self.of_concept[concept]) for concept in concepts]
            names = [str(random.choice(self.bank.captions_of(row))) for row in rows]
            pictures = self.bank.pictures[rows]
            yield distorted(pictures, random, strength(epoch)), np.array(names)


def strength(epoch):
    """How strongly icons are distorted, from 0 to 1."""
    return min(1.0, (epoch + 1) / _RISE)


def plain(pictures):
    """Icons as sets show them: black on white, `(N, 32, 32, 3)` uint8."""
    return np.repeat((255 - pictures)[..., None], 3, axis=-1)


def distorted(pictures, random, strength=1.0):
    """Icons at random places, angles, sizes and contrasts, some of them inverted.

    Args:
        pictures: `(N, 32, 32)` uint8 array, ink bright.
        random: `np.random.Generator`.
        strength: float, 0 for icons as sets show them.

    Returns:
        `(N, 32, 32, 3)` uint8 array of greys.
    """
    count = len(pictures)
    ink = _sampled(pictures, *_affine(count, random, strength)) / 255
    ground = 255 - strength * random.uniform(0, _GROUND, (count, 1, 1))
    most = 255 - strength * (255 - _LEAST_CONTRAST)
    black = ground - random.uniform(most, 255, (count, 1, 1))
    grey = np.clip(ground + (np.maximum(black, 0) - ground) * ink, 0, 255)
    inverted = random.random((count, 1, 1)) < _INVERTED * strength
    grey = np.where(inverted, 255 - grey, grey).astype("uint8")
    return np.repeat(grey[..., None], 3, axis=-1)


def _affine(count, random, strength):
    """Matrices `(count, 2, 2)` and shifts `(count, 2, 1)`, from places to places."""
    angle = np.radians(random.uniform(-_DEGREES, _DEGREES, count)) * strength
    # Of the picture; the places that are read lie closer if it grows.
    size = random.uniform(np.log(_SMALLEST), np.log(_LARGEST), (2, count))
    scale = np.exp(-size * strength)
    shear = random.uniform(-_SHEAR, _SHEAR, count) * strength
    cos, sin = np.cos(angle), np.sin(angle)
    rows = np.array([[cos, shear * cos - sin], [sin, shear * sin + cos]])
    matrices = np.moveaxis(rows, -1, 0) * scale.T[:, None]
    return matrices, random.uniform(-_SHIFT, _SHIFT, (count, 2, 1)) * strength


def _sampled(pictures, matrices, shifts):
    """Read pictures between their pixels, `(N, 32, 32)` float32; 0 outside."""
    side = SIZE + 2
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1))).astype("float32")
    axis = np.arange(SIZE) - (SIZE - 1) / 2
    places = np.stack(np.meshgrid(axis, axis, indexing="ij")).reshape(2, -1)
    # (N, 2, pixels), in pixels of the padded picture
    places = (matrices @ places + shifts + (side - 1) / 2).astype("float32")
    places = np.clip(places, 0, side - 1.001)
    corner = places.astype("int32")
    down, right = np.moveaxis(places - corner, 1, 0)
    first = corner[:, 0] * side + corner[:, 1]
    first += np.arange(len(pictures), dtype="int32")[:, None] * side**2
    flat = padded.ravel()
    above = flat[first] * (1 - right) + flat[first + 1] * right
    below = flat[first + side] * (1 - right) + flat[first + side + 1] * right
    return (above * (1 - down) + below * down).reshape(-1, SIZE, SIZE)
