"""Synthetic images of letters and signs: an upstream task that needs no network."""

import functools
import hashlib
import importlib
import os
import zipfile
from typing import NamedTuple

import keras
import numpy as np

from experiments.synthetic.distortion import (
    area_matrix,
    bilinear_matrix,
    sample_fields,
    warped_grid,
)
from experiments.synthetic.fonts import OFFSET, STEPS, import_matplotlib
from experiments.synthetic.glyph_bank import glyph_bank
from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.files import atomic_file

# Raise with any change to the images: old caches are then left alone.
_VERSION = 1
# Images are drawn in blocks, one random stream each. Part of what a seed means.
_BLOCK = 256
# Sides, in pixels, of the coarse grids that an image may have passed through.
# (0: none.) All are equally likely, so the commonest is listed most often.
_COARSE = (0, 0, 0, 8, 8, 8, 8, 10, 12, 16)
# Places that are tried for a distractor.
_TRIES = 4


def glyphs(
    num_images: int,
    image_size: int = 32,
    seed: int = 0,
    start: int = 0,
    cache_dir: str | os.PathLike | None = None,
    verbose: int = 1,
    placement: str = "center",
    distractors: int = 0,
    glyph_size: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw synthetic images of letters and signs, `len(GLYPH_CLASSES)` classes.

    Latin, Greek, Cyrillic, Armenian, Georgian and Hebrew letters, punctuation and
    mathematical signs, white on black, from the fonts inside matplotlib: as print or as
    the path of a pen, in random weight, sharpness and contrast, distorted, at random
    resolution (down to 8 x 8, then enlarged) and with noise. No digit of any script,
    and no letter that resembles one, except Latin letters (O, I, S, Z, B, q).

    Image `i` depends on `seed` and `i` alone. Other versions of matplotlib, Pillow and
    NumPy, and other processors, may round grey values differently.

    Args:
        num_images: int, number of images, at least 1.
        image_size: int, side of the images in pixels, at least 8.
        seed: int, at least 0.
        start: int, index of the first image, at least 0.
        cache_dir: optional path of a directory, where the set is stored.
        verbose: int, 0 for silence, 1 for a progress bar.
        placement: `"center"`, or `"anywhere"`: each place within the image is equally
            likely.
        distractors: int, pieces of other glyphs, half as high and wide, that lie
            anywhere in the image: of some places the one that covers least of the
            glyph.
        glyph_size: int from 8 to `image_size`, side in pixels of the square in which
            the glyph is drawn. If `None` the whole image for `"center"`, two thirds
            of its side for `"anywhere"`.

    Returns:
        Tuple of the images, uint8 of shape (num_images, image_size, image_size, 3) with
        equal channels, and the labels, int32 of shape (num_images,).

    Raises:
        ValueError: if a number is out of range, or there is no such placement.

    Examples:
        >>> images, labels = glyphs(28, image_size=32, cache_dir="cache")
    """
    check_whole_numbers(1, num_images=num_images)
    check_whole_numbers(8, image_size=image_size)
    check_whole_numbers(0, seed=seed, start=start, distractors=distractors)
    layout = _layout(image_size, placement, distractors, glyph_size)
    path = cache_dir and _cache_path(cache_dir, num_images, layout, seed, start)
    drawn = _read_cache(path) if path else None
    if drawn is None:
        drawn = _draw_range(num_images, layout, seed, start, verbose)
        if path:
            _write_cache(path, *drawn)
    images, labels = drawn
    return np.repeat(images[..., None], 3, axis=-1), labels


class _Layout(NamedTuple):
    """What lies where in an image; sizes in pixels."""

    image_size: int
    glyph_size: int
    placement: str
    distractors: int


def _layout(image_size, placement, distractors, glyph_size):
    if placement not in ("center", "anywhere"):
        raise ValueError(
            f"Accepted: 'center', 'anywhere'. Received: placement={placement!r}."
        )
    if glyph_size is None:
        glyph_size = image_size
        if placement == "anywhere":
            glyph_size = max(round(image_size * 2 / 3), 8)
    check_whole_numbers(8, glyph_size=glyph_size)
    if glyph_size > image_size:
        raise ValueError(
            "A glyph has to fit into the image. Received: "
            f"glyph_size={glyph_size}, image_size={image_size}."
        )
    return _Layout(image_size, glyph_size, placement, distractors)


# === Drawing ===


def _draw_range(num_images, layout, seed, start, verbose):
    """One-channel images `start` to `start + num_images`, and their labels."""
    bank = glyph_bank()
    image_size = layout.image_size
    images = np.empty((num_images, image_size, image_size), "uint8")
    labels = np.empty((num_images,), "int32")
    bar = keras.utils.Progbar(num_images, unit_name="image") if verbose else None
    done = 0
    while done < num_images:
        block, skip = divmod(start + done, _BLOCK)
        take = min(_BLOCK - skip, num_images - done)
        drawn = _draw_block(bank, layout, seed, block)
        for whole, part in zip((images, labels), drawn, strict=True):
            whole[done : done + take] = part[skip : skip + take]
        done += take
        if bar:
            bar.update(done)
    return images, labels


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


def _put(canvas, images, corner):
    """Draw an image on each canvas, white over black."""
    squares = _squares(corner, images.shape[1])
    canvas[squares] = np.maximum(canvas[squares], images)


def _squares(corner, side):
    """Index of squares in a batch of images; `corner` `(2, B)`: top, left."""
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


# === Cache ===


def _cache_path(cache_dir, num_images, layout, seed, start):
    """Name that changes with the arguments and all else that the bytes depend on."""
    libraries = (import_matplotlib(), importlib.import_module("PIL"), np)
    versions = (_VERSION, *(library.__version__ for library in libraries))
    words = "/".join(map(str, versions))
    digest = hashlib.sha256(words.encode()).hexdigest()[:12]
    name = f"glyphs_{num_images}x{layout.image_size}_seed{seed}_from{start}"
    if layout != _layout(layout.image_size, "center", 0, None):
        name += "_" + "-".join(map(str, layout[1:]))
    name += f"_{digest}.npz"
    return os.path.join(cache_dir, name)


def _read_cache(path):
    """(images, labels), or None if there is no such file or it is damaged."""
    try:
        with open(path, "rb") as file:
            stored = np.load(file)
            return stored["images"], stored["labels"]
    except (OSError, EOFError, LookupError, ValueError, zipfile.BadZipFile):
        # It is only a cache: the images are drawn again and the file replaced.
        return None


def _write_cache(path, images, labels):
    with atomic_file(path) as aside, open(aside, "wb") as file:
        np.savez(file, images=images, labels=labels)
