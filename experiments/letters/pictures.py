"""Pictures of letters, each distorted anew: batches that follow from a seed."""

import functools
import itertools

import numpy as np

from experiments.letters.fonts import OFFSET, STEPS, sample_fields, warped_grid

# Pictures are drawn in blocks, one random stream each. Part of what a seed means.
BLOCK = 128
# Part of the largest distortions: between thousands of signs there is little room.
_STRENGTH = 0.6
# Streams of random numbers: pictures of different splits have nothing in common.
_STREAMS = {"train": 0, "new_fonts": 1, "new_classes": 2, "test": 3}


# Sides in pixels: of a picture, of the square of a letter, and of a patch.
IMAGE_SIZE, LETTER_SIZE, PATCH_SIZE = 20, 16, 4
# Each place of a letter is equally likely, or it is in the middle: then the place of a
# stroke belongs to the letter.
PLACEMENTS = ("anywhere", "centred")


class Letters:
    """Pictures of one placement, from the letters of a bank.

    Args:
        bank: `bank.Bank`.
        placement: str, of `PLACEMENTS`.
    """

    def __init__(self, bank, placement):
        self.bank = bank
        self.is_centred = placement == "centred"
        self.block = BLOCK

    def batches(self, seed, start, split="train"):
        """Draw pictures without end.

        Args:
            seed: int.
            start: int, number of the first block.
            split: str, `"train"`, `"test"` (other pictures of the same letters),
                `"new_fonts"` or `"new_classes"`, see `Bank.rows`.

        Returns:
            iterator over `(BLOCK, size, size, 3)` uint8 images and `(BLOCK,)` int32
            labels. Block `n` depends on seed, split and `n` alone.
        """
        rows, labels = self.bank.rows("train" if split == "test" else split)
        classes = np.flatnonzero(np.diff(labels, prepend=-1))
        counts = np.diff(classes, append=len(labels))
        block = start
        while True:
            rng = np.random.default_rng((seed, _STREAMS[split], block))
            # Each class is equally likely, and each of its fonts.
            index = rng.integers(len(classes), size=BLOCK)
            index = classes[index] + rng.integers(counts[index])
            yield self._draw(rows[index], rng), labels[index]
            block += 1

    def take(self, number, seed, split="test"):
        """Return the first pictures of a split, and their labels.

        Args:
            number: int, rounded up to whole blocks.
            seed, split: as in `batches`.
        """
        blocks = itertools.islice(self.batches(seed, 0, split), -(-number // BLOCK))
        images, labels = zip(*blocks, strict=True)
        return np.concatenate(images), np.concatenate(labels)

    def _draw(self, rows, rng):
        canvas = np.zeros((BLOCK, IMAGE_SIZE, IMAGE_SIZE), "float32")
        room = IMAGE_SIZE - LETTER_SIZE
        corner = rng.integers(room + 1, size=(2, BLOCK))
        if self.is_centred:
            corner = np.full_like(corner, room // 2)
        canvas[_squares(corner, LETTER_SIZE)] = self._letters(rows, rng)
        noise = rng.standard_normal(canvas.shape, "float32")
        canvas += noise * (0.05 * rng.random((BLOCK, 1, 1), "float32"))
        pixels = np.rint(np.clip(canvas, 0, 1) * 255).astype("uint8")
        return np.repeat(pixels[..., None], 3, axis=-1)

    def _letters(self, rows, rng):
        """`(BLOCK, LETTER_SIZE, LETTER_SIZE)` ink from 0 to 1."""
        uniform = functools.partial(_uniform, rng)
        x, y = warped_grid(LETTER_SIZE, functools.partial(_mild, rng), rng, BLOCK)
        distance = sample_fields(self.bank.fields, rows, x, y) / STEPS - OFFSET
        # Strokes are at most fattened, edges more or less soft.
        ink = (uniform(0.0, 2.0) - distance) / uniform(1.5, 3.5) + 0.5
        return np.clip(ink, 0, 1) * uniform(0.6, 1.0)


def _uniform(rng, low, high):
    return low + (high - low) * rng.random((BLOCK, 1, 1), "float32")


def _mild(rng, low, high):
    """Numbers that spread less around the middle."""
    middle, reach = (low + high) / 2, _STRENGTH * (high - low) / 2
    return _uniform(rng, middle - reach, middle + reach)


def _squares(corner, side):
    """Index of squares in a block of pictures; `corner` `(2, BLOCK)`: top, left."""
    top, left = corner[..., None] + np.arange(side)
    return np.arange(BLOCK)[:, None, None], top[:, :, None], left[:, None, :]
