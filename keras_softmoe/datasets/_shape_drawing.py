"""Synthetic scenes drawn with NumPy: anti-aliased shapes on a shaded background.

A shape is a signed distance to its edge, negative inside. Distances make
anti-aliasing one comparison, at any size and any rotation.
"""

import numpy as np

from keras_softmoe.datasets._scenes import COLOR_NAMES, MOST_THINGS, SHAPE_NAMES

# RGB, 0 to 1, in the order of `COLOR_NAMES`.
_PALETTE = {
    "red": (0.87, 0.08, 0.10),
    "orange": (1.00, 0.52, 0.03),
    "yellow": (0.98, 0.92, 0.12),
    "green": (0.10, 0.68, 0.18),
    "blue": (0.12, 0.32, 0.95),
    "purple": (0.55, 0.16, 0.75),
    "pink": (1.00, 0.58, 0.78),
    "white": (0.98, 0.98, 0.98),
}


def draw_scenes(things, image_size, rng):
    """uint8 images (N, image_size, image_size, 3) of the `Things` of N scenes."""
    number = len(things.labels)

    def uniform(low, high, *shape):
        return rng.uniform(low, high, (number, *shape)).astype("float32")

    palette = np.array([_PALETTE[name] for name in COLOR_NAMES], "float32")
    shape, color = np.divmod(things.labels, len(COLOR_NAMES))
    # (N, MOST_THINGS, 3)
    paint = palette[color] * uniform(0.88, 1.0, MOST_THINGS, 1)
    paint = np.clip(paint + uniform(-0.04, 0.04, MOST_THINGS, 3), 0, 1)
    # A square and a diamond differ by their rotation, so it stays small.
    angle = uniform(-0.15, 0.15, MOST_THINGS)

    line = ((np.arange(image_size) + 0.5) / image_size).astype("float32")
    images = _backgrounds(line, uniform)
    for slot in range(MOST_THINGS):
        for index, name in enumerate(SHAPE_NAMES):
            here = (shape[:, slot] == index) & (things.labels[:, slot] >= 0)
            rows = np.flatnonzero(here)
            if not len(rows):
                continue
            x, y, radius = (
                part[rows, slot].astype("float32")[:, None, None]
                for part in (things.x, things.y, things.radius)
            )
            turn = angle[rows, slot][:, None, None]
            # (rows, image_size, image_size), in radii, v upwards.
            u, v = (line - x) / radius, (y - line[:, None]) / radius
            u, v = (
                u * np.cos(turn) - v * np.sin(turn),
                u * np.sin(turn) + v * np.cos(turn),
            )
            distance = _SHAPES[name](u, v) * (radius * image_size)
            cover = np.clip(0.5 - distance, 0, 1)[..., None]
            images[rows] += cover * (paint[rows, slot][:, None, None] - images[rows])

    noise = rng.standard_normal(images.shape, "float32")
    images += noise * uniform(0.0, 0.03, 1, 1, 1)
    return np.rint(np.clip(images, 0, 1) * 255).astype("uint8")


def _backgrounds(line, uniform):
    """float32 (N, size, size, 3): greys, hardly tinted, that change across the image.

    Darker than any white and paler than any of the other colors.
    """
    grey = uniform(0.08, 0.52, 1) + uniform(-0.03, 0.03, 3)
    # (N, 1, 1), the slope along x and along y.
    slope_x, slope_y = (uniform(-0.12, 0.12, 1, 1) for _ in range(2))
    ramp = slope_x * (line - 0.5) + slope_y * (line[:, None] - 0.5)
    return grey[:, None, None] + ramp[..., None]


# === Signed distances, for shapes of about radius 1 ===


def _circle(u, v):
    return np.hypot(u, v) - 0.92


def _square(u, v):
    return np.maximum(abs(u), abs(v)) - 0.78


def _triangle(u, v):
    # Equilateral, one corner up; v from the middle of its box to its centre.
    v = v + 0.25
    side = np.float32(np.sqrt(0.75)) * abs(u) + v / 2
    return np.maximum(side, -v) - 0.5


def _star(u, v):
    # Five points: folded into half a point, that is one edge, from a tip at distance 1
    # (angle 0) to a notch (angle pi / 5).
    sector = 2 * np.pi / 5
    angle = np.arctan2(u, v)
    angle = abs(angle - sector * np.rint(angle / sector))
    length = np.hypot(u, v)
    notch = 0.44 * np.exp(1j * np.pi / 5)
    edge = (notch - 1) / abs(notch - 1)
    x, y = length * np.cos(angle) - 1, length * np.sin(angle)
    return x * np.float32(edge.imag) - y * np.float32(edge.real)


def _cross(u, v):
    u, v = abs(u), abs(v)
    return np.maximum(np.maximum(u, v) - 0.95, np.minimum(u, v) - 0.3)


def _ring(u, v):
    return abs(np.hypot(u, v) - 0.72) - 0.22


def _diamond(u, v):
    width, height = 0.68, 1.0
    return (abs(u) * height + abs(v) * width - width * height) / np.hypot(width, height)


def _heart(u, v):
    # A square on its corner, half diagonal d, and a circle on each upper side.
    d = 0.8
    u, v = abs(u), v + 0.1
    root = np.float32(np.sqrt(0.5))
    lobe = np.hypot(u - d / 2, v - d / 2) - d * root
    return np.minimum(lobe, (u + abs(v) - d) * root)


_SHAPES = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
    "diamond": _diamond,
    "heart": _heart,
}
