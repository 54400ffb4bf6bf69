"""Synthetic scenes: names, held-out combinations, sampling.

All lengths are fractions of the side of the image, x to the right and y downwards.
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
# Hues that have one name each, and white: no background comes near any of them.
COLOR_NAMES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white")
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

# Things in one picture, at most.
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
    """`Things` that make the scenes true; no two touch, none leaves the picture."""
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
