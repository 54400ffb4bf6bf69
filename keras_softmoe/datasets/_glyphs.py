"""Synthetic pictures of letters and signs: an upstream task that needs no network."""

import functools
import hashlib
import importlib
import os
import zipfile

import keras
import numpy as np

from keras_softmoe.datasets._glyph_bank import (
    BOX,
    FIELD,
    OFFSET,
    STEPS,
    glyph_bank,
    import_matplotlib,
)
from keras_softmoe.datasets._resampling import area_matrix, bilinear_matrix
from keras_softmoe.datasets.checks import check_whole_numbers
from keras_softmoe.files import replaced_file

# Raise with any change to the pictures: old caches are then left alone.
_VERSION = 1
# Images are drawn in blocks, one random stream each. Part of what a seed means.
_BLOCK = 256
# Smooth warps are sums of the first cosines, this many along each axis.
_WAVES = 4
# Sides, in pixels, of the coarse grids that a picture may have passed through.
# (0: none.) All are equally likely, so the commonest is listed most often.
_COARSE = (0, 0, 0, 8, 8, 8, 8, 10, 12, 16)


def glyphs(num_images, image_size=32, seed=0, start=0, cache_dir=None, verbose=1):
    """Synthetic images of letters and signs, `len(GLYPH_CLASSES)` classes.

    Latin, Greek, Cyrillic, Armenian, Georgian and Hebrew letters, punctuation and
    mathematical signs, white on black. They are drawn from the fonts that ship inside
    matplotlib, as print or as the path of a pen along the centre lines, in random
    weight, sharpness and contrast, under rotation, scaling, shear, perspective and a
    smooth warp, at random resolution (down to 8 x 8, then enlarged) and with noise.

    No digit of any script is a class. Latin letters are kept even where they resemble
    a digit (O, I, S, Z, B, q); letters of other scripts that do are left out.

    Image `i` depends on `seed` and `i` alone: a smaller set is the beginning of a
    larger one, and parts made with `start` join to the whole. The pictures are the
    same as long as the versions of matplotlib, Pillow and NumPy are; another processor
    may round a grey value up instead of down.

    Args:
        num_images: int, number of images, at least 1.
        image_size: int, side of the images in pixels, at least 8.
        seed: int, at least 0. Another seed gives other images of the same classes.
        start: int, index of the first image, at least 0.
        cache_dir: optional path of a directory. The set is stored there once
            complete and read from there the next time.
        verbose: int, 0 for silence, 1 for a progress bar.

    Returns:
        Tuple of the images, uint8 of shape (num_images, image_size, image_size, 3) in
        0..255 with equal channels, and the labels, int32 of shape (num_images,),
        indices into `GLYPH_CLASSES`.

    Raises:
        ValueError: If a number is out of range.
        ImportError: If matplotlib is missing (the extra `viz`).

    Example:

    ```python
    images, labels = glyphs(28_000, image_size=32, cache_dir="cache")
    GLYPH_CLASSES[labels[0]]
    ```
    """
    check_whole_numbers(1, num_images=num_images)
    check_whole_numbers(8, image_size=image_size)
    check_whole_numbers(0, seed=seed, start=start)
    arguments = (num_images, image_size, seed, start)
    path = cache_dir and _cache_path(cache_dir, *arguments)
    drawn = _read_cache(path) if path else None
    if drawn is None:
        drawn = _draw_range(*arguments, verbose)
        if path:
            _write_cache(path, *drawn)
    images, labels = drawn
    return np.repeat(images[..., None], 3, axis=-1), labels


# === Drawing ===


def _draw_range(num_images, image_size, seed, start, verbose):
    """One-channel images `start` to `start + num_images`, and their labels."""
    bank = glyph_bank()
    images = np.empty((num_images, image_size, image_size), "uint8")
    labels = np.empty((num_images,), "int32")
    bar = keras.utils.Progbar(num_images, unit_name="image") if verbose else None
    done = 0
    while done < num_images:
        block, skip = divmod(start + done, _BLOCK)
        take = min(_BLOCK - skip, num_images - done)
        drawn = _draw_block(bank, image_size, np.random.default_rng((seed, block)))
        for whole, part in zip((images, labels), drawn, strict=True):
            whole[done : done + take] = part[skip : skip + take]
        done += take
        if bar:
            bar.update(done)
    return images, labels


def _draw_block(bank, image_size, rng):
    """(B, size, size) images and (B,) labels, B = `_BLOCK`."""
    labels = rng.integers(len(bank.first), size=_BLOCK).astype("int32")
    row = bank.first[labels] + rng.integers(bank.count[labels])

    def uniform(low, high):
        return rng.uniform(low, high, (_BLOCK, 1, 1)).astype("float32")

    def sometimes(chance):
        return (rng.random((_BLOCK, 1, 1)) < chance).astype("float32")

    # A pen of some radius along the centre line, or print that is at most fattened.
    # Radius and softness in bank pixels; a glyph is BOX of them high.
    pen = sometimes(0.75)
    radius = np.where(pen, uniform(1.2, 5.5), uniform(0.0, 2.5))
    softness = uniform(1.5, 4.5)
    x, y = _warped_grid(image_size, uniform, rng)
    field = row + np.where(pen[:, 0, 0], 0, bank.fields.shape[1])
    distance = _sample(bank.fields, field, x, y) / STEPS - OFFSET
    ink = np.clip((radius - distance) / softness + 0.5, 0, 1)

    # (B, size, size)
    passage = _passages(image_size)[rng.integers(len(_COARSE), size=_BLOCK)]
    ink = passage @ ink @ np.swapaxes(passage, 1, 2)

    # Gains above 1 saturate: strokes that a coarse grid has dimmed come back to white.
    ink = np.minimum(ink * uniform(0.6, 1.6), 1) + sometimes(0.2) * uniform(0.0, 0.15)
    noise = rng.standard_normal(ink.shape, "float32")
    ink = ink + noise * (sometimes(0.5) * uniform(0.0, 0.1))
    return np.rint(np.clip(ink, 0, 1) * 255).astype("uint8"), labels


def _warped_grid(image_size, uniform, rng):
    """For every pixel the place in the glyph's field to look at: x, y (B, size, size).

    From the frame inwards: coordinates run from -1 to 1 in both frame and glyph box.
    """
    line = ((np.arange(image_size) + 0.5) * 2 / image_size - 1).astype("float32")
    x, y = line[None, None, :], line[None, :, None]

    x, y = x + uniform(-0.12, 0.12), y + uniform(-0.12, 0.12)
    depth = 1 + uniform(-0.2, 0.2) * x + uniform(-0.2, 0.2) * y
    angle = uniform(-0.35, 0.35)
    cos, sin = np.cos(angle) / depth, np.sin(angle) / depth
    x, y = x * cos + y * sin, y * cos - x * sin
    x = x + uniform(-0.35, 0.35) * y
    # Heights near the frame's, widths from narrow to full, as writers' digits are.
    height = uniform(0.85, 1.15)
    width = height * np.exp(uniform(-0.5, 0.15))

    # (waves, size)
    frequency = np.arange(_WAVES, dtype="float32")
    waves = np.cos(np.pi / 2 * frequency[:, None] * (line + 1))
    decay = 1 + frequency[:, None] + frequency
    bend = rng.standard_normal((2, _BLOCK, _WAVES, _WAVES), "float32") / decay
    bend_x, bend_y = waves.T @ (bend * uniform(0.0, 0.15)) @ waves

    centre = (FIELD - 1) / 2
    x = centre + BOX / 2 * (x / width + bend_x)
    y = centre + BOX / 2 * (y / height + bend_y)
    return x, y


def _sample(fields, field, x, y):
    """Bilinear values of field `field` (B,) at x, y (B, size, size); edges held."""
    x, y = (np.clip(place, 0, FIELD - 1.001) for place in (x, y))
    left, top = x.astype("int32"), y.astype("int32")
    x, y = x - left, y - top
    index = (field[:, None, None] * FIELD + top) * FIELD + left
    fields = fields.reshape(-1)
    upper = fields[index] * (1 - x) + fields[index + 1] * x
    index += FIELD
    lower = fields[index] * (1 - x) + fields[index + 1] * x
    return upper * (1 - y) + lower * y


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


def _cache_path(cache_dir, *arguments):
    """Name that changes with the arguments and all else that the bytes depend on."""
    libraries = (import_matplotlib(), importlib.import_module("PIL"), np)
    versions = (_VERSION, *(library.__version__ for library in libraries))
    words = "/".join(map(str, versions))
    digest = hashlib.sha256(words.encode()).hexdigest()[:12]
    num_images, image_size, seed, start = arguments
    name = f"glyphs_{num_images}x{image_size}_seed{seed}_from{start}_{digest}.npz"
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
    with replaced_file(path) as aside, open(aside, "wb") as file:
        np.savez(file, images=images, labels=labels)
