"""Synthetic images of simple things with captions in varied but plain English.

A caption is true, and seldom complete: the attributes that it mentions and its wording
are drawn at random.
"""

from typing import NamedTuple

import keras
import numpy as np

from experiments.synthetic.scenes import (
    COLOR_NAMES,
    PLACE_NAMES,
    RELATION_NAMES,
    SHAPE_NAMES,
    SIZE_NAMES,
    Scenes,
    arrange,
    draw_scenes,
    sample_scenes,
)
from keras_softmoe.checks import check_choice, check_whole_numbers

# Scenes are made in blocks, with three random streams each: of contents, drawing and
# captions. The images of a seed depend on this number.
_BLOCK = 256
# Uniform numbers for one caption. More than any caption uses.
_DRAWS = 24

_SIZE_WORDS = {"small": ("small", "little", "tiny"), "large": ("large", "big", "huge")}
_PLACE_WORDS = {
    "left": ("on the left", "on the left side", "at the left"),
    "right": ("on the right", "on the right side", "at the right"),
    "top": ("at the top", "near the top", "at the upper edge"),
    "bottom": ("at the bottom", "near the bottom", "at the lower edge"),
    "center": ("in the center", "in the middle", "at the center"),
}
_CORNER_WORDS = ("in the {} corner", "in the {}", "at the {}")
_RELATION_WORDS = {
    "left of": ("to the left of", "left of", "on the left of"),
    "right of": ("to the right of", "right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under", "beneath"),
}
_CONVERSE = {
    "left of": "right of",
    "right of": "left of",
    "above": "below",
    "below": "above",
}
_NUMBER_WORDS = {2: ("two", "2"), 3: ("three", "3")}
_QUANTITY_WORDS = {
    2: ("two", "two", "2", "a pair of"),
    3: ("three", "three", "3", "a group of three"),
}

# Around any phrase that names things; the most frequent one is nothing.
_FRAMES = (
    *("{}",) * 4,
    "a picture of {}",
    "picture of {}",
    "an image of {}",
    "a drawing of {}",
    "{this} {}",
    "here {is} {}",
    "there {is} {}",
    "we see {}",
)


class CaptionedShapes(NamedTuple):
    """Result of `captioned_shapes`: arrays with one entry for each of N scenes.

    Attributes are int32 arrays of shape (N,), -1 where a scene has no such attribute.

    Args:
        images: uint8 of shape (N, image_size, image_size, 3), 0 to 255.
        captions: array of N str.
        labels: the thing (of a pair the first), index into `class_names` of
            `datasets.sample("shapes")`: of 8 shapes and 8 colors, `labels // 8` is the
            shape and `labels % 8` the color.
        sizes: its size, index into `SIZE_NAMES`.
        counts: how many of it there are, 1 to 3; of either thing of a pair, 1.
        places: where a lone thing is, index into `PLACE_NAMES`.
        relations: where the first thing of a pair is, seen from the second one, index
            into `RELATION_NAMES`.
        second_labels: the second thing of a pair, as in `labels`.
        second_sizes: its size, index into `SIZE_NAMES`.
    """

    images: np.ndarray
    captions: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    counts: np.ndarray
    places: np.ndarray
    relations: np.ndarray
    second_labels: np.ndarray
    second_sizes: np.ndarray


def captioned_shapes(
    num_images: int,
    image_size: int = 32,
    seed: int = 0,
    start: int = 0,
    combinations: str = "train",
    verbose: int = 1,
) -> CaptionedShapes:
    """Draw synthetic scenes of colored shapes, each with a caption.

    A scene shows a lone thing in one of nine places, two or three like things, or two
    different things side by side or one above the other: 8 shapes in 8 colors, small
    or large, on a shaded and noisy background. A caption is plain English in many
    wordings, and mentions all or a part of the scene: "a small red star in the upper
    left corner", "two green rings", "the square is over the blue heart".

    A quarter of the combinations of shape and color, with each shape and each color
    twice, is held out of training scenes and captions.

    Image and caption `i` depend on `seed`, `combinations` and `i` alone (the image on
    its size as well). Another processor or version of NumPy may round differently.

    Args:
        num_images: int, number of scenes N, at least 1.
        image_size: int, side of the images in pixels, at least 16.
        seed: int, at least 0.
        start: int, index of the first scene, at least 0.
        combinations: `"train"`, scenes without the held-out combinations;
            `"held_out"`, lone and like things of exactly those combinations; or
            `"all"`, scenes of any combinations.
        verbose: int, 0 for silence, 1 for a progress bar.

    Returns:
        `CaptionedShapes`.

    Raises:
        ValueError: if a number is out of range or `combinations` unknown.

    Examples:
        >>> images, captions, *_ = synthetic.captioned_shapes(20)
    """
    check_whole_numbers(1, num_images=num_images)
    check_whole_numbers(16, image_size=image_size)
    check_whole_numbers(0, seed=seed, start=start)
    check_choice("combinations", combinations, ("train", "held_out", "all"))
    images = np.empty((num_images, image_size, image_size, 3), "uint8")
    captions, scenes = [], []
    bar = keras.utils.Progbar(num_images, unit_name="image") if verbose else None
    done = 0
    while done < num_images:
        block, skip = divmod(start + done, _BLOCK)
        take = min(_BLOCK - skip, num_images - done)
        part = slice(skip, skip + take)
        drawn, described, shown = _make_block(image_size, combinations, seed, block)
        images[done : done + take] = drawn[part]
        captions += described[part]
        scenes.append([attribute[part] for attribute in shown])
        done += take
        if bar:
            bar.update(done)
    scenes = Scenes(*map(np.concatenate, zip(*scenes, strict=True)))
    return CaptionedShapes(images, np.array(captions), **scenes._asdict())


def _make_block(image_size, combinations, seed, block):
    """Return images, a list of captions and `Scenes` of block number `block`."""
    contents, drawing, wording = (
        np.random.default_rng((seed, block, stream)) for stream in range(3)
    )
    scenes = sample_scenes(_BLOCK, combinations, contents)
    images = draw_scenes(arrange(scenes, contents), image_size, drawing)
    return images, caption_scenes(scenes, wording), scenes


# === Captions ===


def caption_scenes(scenes, rng):
    """List of N captions for `Scenes`; one row of random numbers each."""
    draws = rng.random((len(scenes.labels), _DRAWS))
    return [
        _caption(Wording(row), *attributes)
        for row, *attributes in zip(
            draws, *(part.tolist() for part in scenes), strict=True
        )
    ]


class Wording:
    """Choices made by a row of uniform numbers, used up one by one."""

    def __init__(self, draws):
        self._draws = iter(draws)

    def one_of(self, options):
        """One of the options, all equally likely."""
        return options[int(next(self._draws) * len(options))]

    def chance(self, probability):
        """True with the given probability."""
        return next(self._draws) < probability


def _caption(wording, label, size, count, place, relation, second, second_size):
    if relation >= 0:
        return _pair(wording, (label, size), (second, second_size), relation)
    if count > 1:
        return _group(wording, label, size, count)
    return _lone(wording, label, size, place)


# === One thing ===


def _lone(wording, label, size, place):
    color, shape = _names(label)
    place = _place(wording, PLACE_NAMES[place])
    style = wording.one_of(range(12))
    if style == 0:
        thing = _noun(wording, label, size, 0.5, 0.0)
        return f"the {thing} {wording.one_of(('is', 'is', 'looks'))} {color}"
    if style == 1:
        thing = _noun(wording, label, size, 0.0, 0.9)
        return f"the {thing} is {_size(wording, size)}"
    if style == 2:
        thing = _noun(wording, label, size, 0.3, 0.9)
        return f"{wording.one_of(('the', _article(thing)))} {thing} is {place}"
    if style == 3:
        thing = _noun(wording, label, size, 0.3, 0.9)
        return f"{place} {wording.one_of(('is', 'there is'))} {_one(thing)}"
    if style == 4:
        thing = _noun(wording, label, size, 0.3, 1.0)
        return wording.one_of((thing, f"{thing} {place}"))
    if style == 5:
        noun = wording.one_of(("thing", "shape"))
        thing = wording.one_of((f"something {color}", _one(f"{color} {noun}")))
        return _framed(wording, f"{thing} {place}")
    thing = _one(_noun(wording, label, size, 0.5, 0.92))
    if wording.chance(0.5):
        thing = f"{thing} {place}"
    return _framed(wording, thing)


# === Two or three of a kind ===


def _group(wording, label, size, count):
    color, _ = _names(label)
    number = wording.one_of(_NUMBER_WORDS[count])
    style = wording.one_of(range(8))
    if style == 0:
        things = _noun(wording, label, size, 0.3, 0.0, plural=True)
        return f"the {number} {things} are {color}"
    if style == 1:
        things = _noun(wording, label, size, 0.3, 0.92, plural=True)
        return f"{things}, {number} of them"
    if style == 2:
        things = _noun(wording, label, size, 0.0, 0.92, plural=True)
        return f"the {number} {things} are {_size(wording, size)}"
    things = _noun(wording, label, size, 0.4, 0.92, plural=True)
    things = f"{wording.one_of(_QUANTITY_WORDS[count])} {things}"
    return _framed(wording, things, plural=True)


# === Two different things ===


def _pair(wording, first, second, relation):
    relation = RELATION_NAMES[relation]
    if wording.chance(0.5):
        first, second, relation = second, first, _CONVERSE[relation]
    (color, shape), (other_color, other_shape) = _names(first[0]), _names(second[0])
    relation = wording.one_of(_RELATION_WORDS[relation])
    style = wording.one_of(range(10))
    if style == 0 and color != other_color:
        return _framed(wording, f"something {color} {relation} something {other_color}")
    # Colors tell things of one shape apart.
    with_color = 0.92 if shape != other_shape else 1.0
    a, b = (
        _noun(wording, label, size, 0.25, with_color) for label, size in (first, second)
    )
    if style == 1:
        return _framed(wording, f"{_one(a)} and {_one(b)}")
    if style == 2:
        return f"the {a} is {relation} the {b}"
    if style == 3:
        return f"{_one(a)} is {relation} {_one(b)}"
    if style == 4:
        return f"{a} {relation} {b}"
    return _framed(wording, f"{_one(a)} {relation} {_one(b)}")


# === Words ===


def _names(label):
    shape, color = divmod(label, len(COLOR_NAMES))
    return COLOR_NAMES[color], SHAPE_NAMES[shape]


def _noun(wording, label, size, with_size, with_color, plural=False):
    """A noun such as "small red star", its adjectives with the given chances."""
    color, shape = _names(label)
    words = []
    if wording.chance(with_size):
        words.append(_size(wording, size))
    if wording.chance(with_color):
        words.append(color)
    if plural:
        shape = shape + ("es" if shape.endswith("s") else "s")
    return " ".join([*words, shape])


def _size(wording, size):
    return wording.one_of(_SIZE_WORDS[SIZE_NAMES[size]])


def _place(wording, place):
    if place in _PLACE_WORDS:
        return wording.one_of(_PLACE_WORDS[place])
    edge, side = place.split()
    if wording.chance(0.5):
        edge = {"top": "upper", "bottom": "lower"}[edge]
        return f"in the {edge} {side} corner"
    return wording.one_of(_CORNER_WORDS).format(f"{edge} {side}")


def _article(phrase):
    return "an" if phrase[0] in "aeiou" else "a"


def _one(phrase):
    return f"{_article(phrase)} {phrase}"


def _framed(wording, phrase, plural=False):
    this, verb = ("these are", "are") if plural else ("this is", "is")
    frame = wording.one_of(_FRAMES).replace("{this}", this).replace("{is}", verb)
    return frame.format(phrase)
