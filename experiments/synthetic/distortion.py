"""Distortions of glyphs, and resizing as matrix products."""

import numpy as np

from experiments.synthetic.fonts import BOX, FIELD

# Smooth warps are sums of the first cosines, this many along each axis.
_WAVES = 4


def warped_grid(image_size, uniform, rng, count):
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
    bend = rng.standard_normal((2, count, _WAVES, _WAVES), "float32") / decay
    bend_x, bend_y = waves.T @ (bend * uniform(0.0, 0.15)) @ waves

    centre = (FIELD - 1) / 2
    x = centre + BOX / 2 * (x / width + bend_x)
    y = centre + BOX / 2 * (y / height + bend_y)
    return x, y


def sample_fields(fields, field, x, y):
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


# === Resizing, `rows @ image @ columns.T` ===


def bilinear_matrix(size, source):
    """Return (size, source) float32: enlarging with aligned centres, edges held."""
    position = (np.arange(size) + 0.5) * source / size - 0.5
    position = np.clip(position, 0, source - 1)
    distance = np.abs(position[:, None] - np.arange(source))
    return np.clip(1 - distance, 0, None).astype("float32")


def area_matrix(size, source):
    """Return (size, source) float32: shrinking by averages of the covered samples."""
    edges = np.arange(size + 1)[:, None] * source / size
    pixel = np.arange(source)
    end = np.minimum(edges[1:], pixel + 1)
    begin = np.maximum(edges[:-1], pixel)
    covered = np.clip(end - begin, 0, None)
    return (covered * size / source).astype("float32")
