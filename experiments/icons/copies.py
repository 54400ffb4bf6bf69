"""Which icons are copies of each other, and which sets are one family by their copies.

Two icons are copies if their drawings, moved and scaled to the same box, hardly differ
but for what is blurred away. Sets copy each other, with other margins and other names.
"""

import importlib

import keras
import numpy as np
from scipy.ndimage import gaussian_filter

# Pixels of the box that drawings are compared in.
_SIDE = 16
_LEAST_INK = 40
# Of the difference between the two the drawing is left, and the mass of ink is not: all
# full discs look alike otherwise, whatever they bear.
_FINE, _COARSE = 0.5, 2.0
# Cosine. Found by eye, on pairs of all similarities: below it many differ.
LEAST_SIMILARITY = 0.95
# Sets of which one shares more with the other are one family.
_LEAST_SHARED = 0.2
# Smaller sets may share simple signs by chance.
_LEAST_PICTURES = 20
_BLOCK = 2048


def drawings(pictures):
    """Drawings of icons as vectors of length 1, 0 where a picture is blank.

    Args:
        pictures: `(N, size, size)` uint8 array.

    Returns:
        `(N, _SIDE ** 2)` float32 array.
    """
    boxes = np.stack([_box(picture) for picture in pictures]).astype("float32")
    sharp = gaussian_filter(boxes, (0, _FINE, _FINE))
    vectors = sharp - gaussian_filter(boxes, (0, _COARSE, _COARSE))
    vectors = vectors.reshape(len(boxes), -1)
    norm = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norm, 1e-6)


def _box(picture):
    """The ink in the middle of a square that it fills, `(_SIDE, _SIDE)` uint8."""
    rows = np.flatnonzero(picture.max(1) >= _LEAST_INK)
    columns = np.flatnonzero(picture.max(0) >= _LEAST_INK)
    if not len(rows):
        return np.zeros((_SIDE, _SIDE), np.uint8)
    ink = picture[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    side = max(ink.shape)
    top, left = (side - ink.shape[0]) // 2, (side - ink.shape[1]) // 2
    square = np.zeros((side, side), np.uint8)
    square[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    image = importlib.import_module("PIL.Image")
    small = image.fromarray(square).resize((_SIDE, _SIDE), image.Resampling.BOX)
    return np.asarray(small)


def pairs(vectors, least=LEAST_SIMILARITY):
    """All pairs of icons that are copies.

    Args:
        vectors: what `drawings` returned. All pairs are compared, in blocks.
        least: float, the least similarity.

    Returns:
        `(first, second, similarity)`, arrays; `first < second`, in ascending order.
    """
    parts = []
    bar = keras.utils.Progbar(len(vectors))
    for start in range(0, len(vectors), _BLOCK):
        block = vectors[start : start + _BLOCK] @ vectors[start:].T
        first, second = np.nonzero(block >= least)
        later = second > first
        first, second = first[later], second[later]
        parts.append((first + start, second + start, block[first, second]))
        bar.update(min(start + _BLOCK, len(vectors)))
    first, second, similarity = map(np.concatenate, zip(*parts, strict=True))
    return first, second, similarity


def families(set_of, authors, first, second):
    """Group sets by author and by the copies that they share.

    Args:
        set_of: `(N,)` int array, the set of each icon.
        authors: sequence of str, of each set.
        first, second: int arrays, pairs of copies.

    Returns:
        `(sets,)` int array, the family of each set: the number of its largest set.
    """
    count = len(authors)
    sizes = np.bincount(set_of, minlength=count)
    shared = np.zeros((count, count))
    for of, other in ((first, second), (second, first)):
        # An icon with several copies in a set counts once.
        once = np.unique(np.stack([of, set_of[other]]), axis=1)
        np.add.at(shared, (set_of[once[0]], once[1]), 1)
    rates = np.where(sizes >= _LEAST_PICTURES, 1 / np.maximum(sizes, 1), 0)
    linked = shared * rates[:, None] > _LEAST_SHARED
    linked |= np.equal.outer(np.array(authors), np.array(authors))
    return _groups(linked, sizes)


def _groups(linked, sizes):
    """Union-find; each group is named by its largest member."""
    parent = list(range(len(sizes)))

    def root(index):
        while parent[index] != index:
            index = parent[index]
        return index

    for one, other in zip(*np.nonzero(linked), strict=True):
        one, other = root(one), root(other)
        small, large = sorted((one, other), key=lambda index: (sizes[index], -index))
        parent[small] = large
    return np.array([root(index) for index in range(len(sizes))])


def distinct(first, second, count):
    """Whether each icon is kept if of copies the first one is, a bool array.

    Args:
        first, second: int arrays, pairs in ascending order.
        count: int, number of icons.
    """
    kept = np.ones(count, bool)
    order = np.lexsort((first, second))
    for one, other in zip(first[order], second[order], strict=True):
        # All pairs that could remove `one` were seen before.
        if kept[one]:
            kept[other] = False
    return kept
