"""Synthetic pictures of letters and signs: an upstream task that needs no network."""

import functools
from typing import NamedTuple

import numpy as np

from experiments.synthetic.fonts import OFFSET, STEPS, sample_fields, warped_grid
from experiments.synthetic.glyph_bank import glyph_bank

# Images are drawn in blocks, one random stream each. Part of what a seed means.
_BLOCK = 256
# Sides, in pixels, of the coarse grids that a picture may have passed through.
# (0: none.) All are equally likely, so the commonest is listed most often.
_COARSE = (0, 0, 0, 8, 8, 8, 8, 10, 12, 16)
# Places that are tried for a distractor.
_TRIES = 4


def glyphs(
    num_images, image_size=32, seed=0, start=0, placement="center", distractors=0
):
    """Synthetic images of letters and signs, `len(GLYPH_CLASSES)` classes.

    Latin, Greek, Cyrillic, Armenian, Georgian and Hebrew letters, punctuation and
    mathematical signs, white on black. They are drawn from the fonts that ship inside
    matplotlib, as print or as the path of a pen along the centre lines, in random
    weight, sharpness and contrast, under rotation, scaling, shear, perspective and a
    smooth warp, at random resolution (down to 8 x 8, then enlarged) and with noise. No
    digit of any script is a class.

    Image `i` depends on `seed` and `i` alone: a smaller set is the beginning of a
    larger one, and parts made with `start` join to the whole.

    Args:
        num_images: int.
        image_size: int, side of the images in pixels, at least 8.
        seed: int. Another seed gives other images of the same classes.
        start: int, index of the first image.
        placement: `"center"`, the glyph fills the image, or `"anywhere"`: it has two
            thirds of the image's side, and each place is equally likely.
        distractors: int, pieces of other glyphs, half as high and wide, that lie
            anywhere in the image: of some places the one that covers least of the
            glyph.

    Returns:
        Tuple of the images, uint8 of shape (num_images, image_size, image_size, 3) in
        0..255 with equal channels, and the labels, int32 of shape (num_images,),
        indices into `GLYPH_CLASSES`.
    """
    glyph_size = image_size
    if placement == "anywhere":
        glyph_size = max(round(image_size * 2 / 3), 8)
    layout = _Layout(image_size, glyph_size, placement, distractors)
    bank = glyph_bank()
    images = np.empty((num_images, image_size, image_size), "uint8")
    labels = np.empty((num_images,), "int32")
    done = 0
    while done < num_images:
        block, skip = divmod(start + done, _BLOCK)
        take = min(_BLOCK - skip, num_images - done)
        drawn = _draw_block(bank, layout, seed, block)
        for whole, part in zip((images, labels), drawn, strict=True):
            whole[done : done + take] = part[skip : skip + take]
        done += take
    return np.repeat(images[..., None], 3, axis=-1), labels


class _Layout(NamedTuple):
    """What lies where in an image; sizes in pixels."""

    image_size: int
    glyph_size: int
    placement: str
    distractors: int


# === Drawing ===


def _draw_block(bank, layout, seed, block):
    """(B, size, size) images and (B,) labels, B = `_BLOCK`."""
    rng = np.random.default_rng((seed, block))
    ink, labels = _draw_ink(bank, layout.glyph_size, rng)
    ink = _lay_out(bank, ink, layout, seed, block)
    ink = ink + _sometimes(rng, 0.2) * _uniform(rng, 0.0, 0.15)
    noise = rng.standard_normal(ink.shape, "float32")
    ink = ink + noise * (_sometimes(rng, 0.5) * _uniform(rng, 0.0, 0.1))
    return np.rint(np.clip(ink, 0, 1) * 255).astype("uint8"), labels


def _lay_out(bank, ink, layout, seed, block):
    """Glyphs and distractors on their canvas, (B, image size, image size)."""
    # Streams of their own: the glyphs are those that fill an image of their size.
    rng = np.random.default_rng((seed, block, 1))
    canvas = np.zeros((_BLOCK, layout.image_size, layout.image_size), ink.dtype)
    room = layout.image_size - layout.glyph_size
    corner = np.full((2, _BLOCK), room // 2)
    if layout.placement == "anywhere":
        corner = rng.integers(room + 1, size=(2, _BLOCK))
    _put(canvas, ink, corner)
    side = layout.glyph_size // 2
    for number in range(layout.distractors):
        others = np.random.default_rng((seed, block, 2 + number))
        whole, _ = _draw_ink(bank, layout.glyph_size, others)
        cut = rng.integers(layout.glyph_size - side + 1, size=(2, _BLOCK))
        piece = whole[_squares(cut, side)]
        _put(canvas, piece, _beside(corner, layout, side, rng))
    return canvas


def _beside(corner, layout, side, rng):
    """Corners of squares that cover little of the glyphs, `(2, B)`."""
    tries = rng.integers(layout.image_size - side + 1, size=(_TRIES, 2, _BLOCK))
    low = np.maximum(tries, corner)
    high = np.minimum(tries + side, corner + layout.glyph_size)
    covered = np.prod(np.maximum(high - low, 0), axis=1)
    return tries[covered.argmin(axis=0), :, np.arange(_BLOCK)].T


def _put(canvas, pictures, corner):
    """Draw a picture on each canvas, white over black."""
    squares = _squares(corner, pictures.shape[1])
    canvas[squares] = np.maximum(canvas[squares], pictures)


def _squares(corner, side):
    """Index of squares in a batch of pictures; `corner` `(2, B)`: top, left."""
    top, left = corner[..., None] + np.arange(side)
    return np.arange(_BLOCK)[:, None, None], top[:, :, None], left[:, None, :]


def _draw_ink(bank, image_size, rng):
    """(B, size, size) ink from 0 to 1 and (B,) labels."""
    labels = rng.integers(len(bank.first), size=_BLOCK).astype("int32")
    row = bank.first[labels] + rng.integers(bank.count[labels])
    uniform = functools.partial(_uniform, rng)

    # A pen of some radius along the centre line, or print that is at most fattened.
    # Radius and softness in bank pixels; a glyph is BOX of them high.
    pen = _sometimes(rng, 0.75)
    radius = np.where(pen, uniform(1.2, 5.5), uniform(0.0, 2.5))
    softness = uniform(1.5, 4.5)
    x, y = warped_grid(image_size, uniform, rng, _BLOCK)
    field = row + np.where(pen[:, 0, 0], 0, bank.fields.shape[1])
    distance = sample_fields(bank.fields, field, x, y) / STEPS - OFFSET
    ink = np.clip((radius - distance) / softness + 0.5, 0, 1)

    # (B, size, size)
    passage = _passages(image_size)[rng.integers(len(_COARSE), size=_BLOCK)]
    ink = passage @ ink @ np.swapaxes(passage, 1, 2)

    # Gains above 1 saturate: strokes that a coarse grid has dimmed come back to white.
    return np.minimum(ink * uniform(0.6, 1.6), 1), labels


def _uniform(rng, low, high):
    return rng.uniform(low, high, (_BLOCK, 1, 1)).astype("float32")


def _sometimes(rng, chance):
    return (rng.random((_BLOCK, 1, 1)) < chance).astype("float32")


@functools.cache
def _passages(image_size):
    """(choices, size, size): shrink to a coarse grid and enlarge again, as a matrix."""
    identity = np.eye(image_size, dtype="float32")
    return np.stack(
        [
            bilinear_matrix(image_size, side) @ area_matrix(side, image_size)
            if 0 < side < image_size
            else identity
            for side in _COARSE
        ]
    )


def bilinear_matrix(size, source):
    """Matrix `(size, source)` that enlarges, pixel centres aligned, edges held."""
    position = (np.arange(size) + 0.5) * source / size - 0.5
    position = np.clip(position, 0, source - 1)
    distance = np.abs(position[:, None] - np.arange(source))
    return np.clip(1 - distance, 0, None).astype("float32")


def area_matrix(size, source):
    """Matrix `(size, source)` that shrinks by averaging what each sample covers."""
    edges = np.arange(size + 1)[:, None] * source / size
    pixel = np.arange(source)
    end = np.minimum(edges[1:], pixel + 1)
    begin = np.maximum(edges[:-1], pixel)
    covered = np.clip(end - begin, 0, None)
    return (covered * size / source).astype("float32")
