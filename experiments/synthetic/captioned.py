"""Synthetic images of simple things with captions."""

from typing import NamedTuple

import keras
import numpy as np

from experiments.synthetic.captions import caption_scenes
from experiments.synthetic.scenes import Scenes, arrange, draw_scenes, sample_scenes
from keras_softmoe.checks import check_choice, check_whole_numbers

# Scenes are made in blocks, with three random streams each: of contents, drawing and
# captions. The images of a seed depend on this number.
_BLOCK = 256


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
