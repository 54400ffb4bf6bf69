"""Synthetic scenes: names, held-out combinations, sampling, drawing with NumPy.

All lengths are fractions of the side of the image, x to the right and y downwards. A
shape is a signed distance to its edge, negative inside: anti-aliasing is then one
comparison, at any size and any rotation.
"""

from typing import NamedTuple

import numpy as np

SHAPE_NAMES = (
    "circle",
    "square",
    "triangle",
    "star",
    "cross",
    "ring",
    "diamond",
    "heart",
)
# Hues that have one name each, and white: no background comes near any of them. RGB,
# 0 to 1.
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
COLOR_NAMES = tuple(_PALETTE)
SIZE_NAMES = ("small", "large")
PLACE_NAMES = (
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
RELATION_NAMES = ("left of", "right of", "above", "below")

# Shape-major, so that a class is `shape * len(COLOR_NAMES) + color`.
SHAPE_COLOR_CLASSES = tuple(
    f"{color} {shape}" for shape in SHAPE_NAMES for color in COLOR_NAMES
)


def _is_held_out(shape, color):
    """Two colors of every shape and two shapes of every color."""
    # `3 * shape` runs through all colors once, because 3 is odd.
    return (color - 3 * shape) % len(COLOR_NAMES) in (1, 5)


HELD_OUT_COMBINATIONS = tuple(
    name
    for index, name in enumerate(SHAPE_COLOR_CLASSES)
    if _is_held_out(*divmod(index, len(COLOR_NAMES)))
)

# Things in one image, at most.
MOST_THINGS = 3

# Radii (of the circle around a shape, nearly). A lone thing has more room; among
# several, large ones must still fit three times.
_LONE_RADII = np.array([[0.12, 0.15], [0.20, 0.25]])
_SHARED_RADII = np.array([[0.11, 0.135], [0.16, 0.18]])
# No shape reaches further than one radius along an axis, but the corners of a square
# or a triangle reach this many.
_REACH = 1.15
# Between things, and between a thing and the frame, at least.
_GAP = 0.02
# Radians by which a thing may leave its even place around the middle of its group.
_SWAY = 0.15


class Scenes(NamedTuple):
    """Attributes of N scenes: int32 arrays of shape (N,), -1 where there is none.

    A scene is a lone thing (`counts` 1, `places` known), a group of two or three like
    things (`counts` 2 or 3), or a pair of different ones (`relations` and the
    `second_` attributes known).

    The attributes are those of `CaptionedShapes`.
    """

    labels: np.ndarray
    sizes: np.ndarray
    counts: np.ndarray
    places: np.ndarray
    relations: np.ndarray
    second_labels: np.ndarray
    second_sizes: np.ndarray


class Things(NamedTuple):
    """The things of N scenes: arrays of shape (N, MOST_THINGS).

    Args:
        labels: index into `SHAPE_COLOR_CLASSES`, -1 for no thing.
        x: float, middle.
        y: float, middle.
        radius: float.
    """

    labels: np.ndarray
    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray


def allowed_classes(combinations):
    """Sorted indices into `SHAPE_COLOR_CLASSES` of a part: train, held_out or all."""
    held_out = np.isin(SHAPE_COLOR_CLASSES, HELD_OUT_COMBINATIONS)
    if combinations == "all":
        return np.arange(len(SHAPE_COLOR_CLASSES))
    return np.flatnonzero(held_out == (combinations == "held_out"))


def sample_scenes(number, combinations, rng):
    """`Scenes` of `number` scenes: half of them lone things, then pairs, then groups.

    Of held-out combinations there are no pairs.
    """
    classes = allowed_classes(combinations)
    shares = (0.7, 1.0) if combinations == "held_out" else (0.5, 0.7)
    kind = np.digitize(rng.random(number), shares)
    group, pair = kind == 1, kind == 2

    def index(names):
        return rng.integers(len(names), size=number)

    first = rng.integers(len(classes), size=number)
    second = (first + rng.integers(1, len(classes), size=number)) % len(classes)
    scenes = Scenes(
        labels=classes[first],
        sizes=index(SIZE_NAMES),
        counts=np.where(group, rng.integers(2, MOST_THINGS + 1, size=number), 1),
        places=np.where(group | pair, -1, index(PLACE_NAMES)),
        relations=np.where(pair, index(RELATION_NAMES), -1),
        second_labels=np.where(pair, classes[second], -1),
        second_sizes=np.where(pair, index(SIZE_NAMES), -1),
    )
    return Scenes(*(attribute.astype("int32") for attribute in scenes))


def arrange(scenes, rng):
    """`Things` that make the scenes true; no two touch, none leaves the image."""
    number = len(scenes.labels)
    share = rng.random((number, MOST_THINGS))
    lone, pair = scenes.places >= 0, scenes.relations >= 0
    slot = np.arange(MOST_THINGS)

    labels = np.where(slot < scenes.counts[:, None], scenes.labels[:, None], -1)
    labels[pair, 1] = scenes.second_labels[pair]
    sizes = np.repeat(scenes.sizes[:, None], MOST_THINGS, axis=1)
    sizes[pair, 1] = scenes.second_sizes[pair]
    # Things of a group are equally large.
    share = np.where((scenes.counts > 1)[:, None], share[:, :1], share)
    # (number, MOST_THINGS, 2)
    radii = np.where(lone[:, None, None], _LONE_RADII[sizes], _SHARED_RADII[sizes])
    radius = radii[..., 0] + share * (radii[..., 1] - radii[..., 0])

    # (number, MOST_THINGS, 2), the last axis x and y.
    middle = np.full((number, MOST_THINGS, 2), 0.5)
    group = ~(lone | pair)
    middle[lone] = _lone_middles(scenes.places[lone], radius[lone], rng)
    middle[pair] = _pair_middles(scenes.relations[pair], radius[pair], rng)
    middle[group] = _group_middles(scenes.counts[group], radius[group], rng)
    return Things(labels, middle[..., 0], middle[..., 1], radius)


def _lone_middles(places, radius, rng):
    """(N, 1, 2), in a row and column of three."""
    room = 0.5 - _GAP - radius[:, :1]
    towards = np.stack([places % 3 - 1, places // 3 - 1], axis=-1)
    depth = rng.uniform(0.85, 1.0, (len(places), 2))
    aside = rng.uniform(-0.05, 0.05, (len(places), 2))
    return (0.5 + np.where(towards == 0, aside, towards * depth * room))[:, None]


def _pair_middles(relations, radius, rng):
    """(N, MOST_THINGS, 2), first and second thing along the axis of their relation."""
    number = len(relations)
    radius = radius[:, :2]
    total = radius.sum(axis=1)
    # Along the axis: from the one that is further left or up to the other.
    least = _REACH * total + _GAP
    distance = rng.uniform(least, np.minimum(1 - 2 * _GAP - total, least + 0.2))
    near = np.where(relations % 2 == 0, 0, 1)
    begin = rng.uniform(_GAP, 1 - _GAP - total - distance)
    begin = begin + np.take_along_axis(radius, near[:, None], axis=1)[:, 0]
    along = np.stack([begin, begin + distance], axis=1)
    along = np.take_along_axis(along, np.stack([near, 1 - near], axis=1), axis=1)

    # Across it: on one line, nearly.
    margin = radius.max(axis=1) + _GAP
    across = rng.uniform(margin, 1 - margin)[:, None]
    across = across + rng.uniform(-0.06, 0.06, (number, 2))
    across = np.clip(across, margin[:, None], 1 - margin[:, None])

    horizontal = (relations < 2)[:, None, None]
    middle = np.full((number, MOST_THINGS, 2), 0.5)
    middle[:, :2] = np.where(
        horizontal,
        np.stack([along, across], axis=-1),
        np.stack([across, along], axis=-1),
    )
    return middle


def _group_middles(counts, radius, rng):
    """(N, MOST_THINGS, 2), evenly around a point, with some sway."""
    number = len(counts)
    radius = radius[:, 0]
    # So far from the point that swaying neighbours do not touch...
    chord = 2 * np.sin(np.pi / counts - np.where(counts > 2, _SWAY, 0))
    least = (2 * _REACH * radius + _GAP) / chord
    # ...and no further than the frame allows.
    room = 0.5 - _GAP - radius
    distance = rng.uniform(least, room)
    point = 0.5 + rng.uniform(-1, 1, (number, 2)) * (room - distance)[:, None]

    angle = rng.uniform(0, 2 * np.pi, number)[:, None]
    angle = angle + 2 * np.pi * np.arange(MOST_THINGS) / counts[:, None]
    angle = angle + rng.uniform(-_SWAY, _SWAY, (number, MOST_THINGS))
    direction = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return point[:, None] + distance[:, None, None] * direction


# === Drawing ===


def draw_scenes(things, image_size, rng):
    """uint8 images (N, image_size, image_size, 3) of the `Things` of N scenes."""
    number = len(things.labels)

    def uniform(low, high, *shape):
        return rng.uniform(low, high, (number, *shape)).astype("float32")

    palette = np.array(list(_PALETTE.values()), "float32")
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
