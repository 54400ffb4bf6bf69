"""Scenes of colored shapes and their captions.

The images are compared with drawn ones in `tests/datasets/test_samples.py`.
"""

import functools

import numpy as np
import pytest

from experiments.synthetic import (
    COLOR_NAMES,
    HELD_OUT_COMBINATIONS,
    SHAPE_COLOR_CLASSES,
    captioned_shapes,
)
from experiments.synthetic.captions import CaptionedShapes
from experiments.synthetic.scenes import SHAPE_NAMES
from tests.support.caption_reader import is_true, read_caption, scene_of

HELD_OUT = [SHAPE_COLOR_CLASSES.index(name) for name in HELD_OUT_COMBINATIONS]


@functools.cache
def some(combinations="train", image_size=16):
    return captioned_shapes(
        2000, image_size=image_size, combinations=combinations, verbose=0
    )


def test_shapes_types_and_names():
    data = some()
    assert isinstance(data, CaptionedShapes)
    assert data.images.shape == (2000, 16, 16, 3)
    assert data.images.dtype == np.uint8
    assert data.captions.shape == (2000,)
    assert data.captions.dtype.kind == "U"
    for name, attribute in list(data._asdict().items())[2:]:
        assert attribute.shape == (2000,), name
        assert attribute.dtype == np.int32, name
    assert len(SHAPE_COLOR_CLASSES) == len(SHAPE_NAMES) * len(COLOR_NAMES) == 64
    for index, name in enumerate(SHAPE_COLOR_CLASSES):
        shape, color = divmod(index, len(COLOR_NAMES))
        assert name == f"{COLOR_NAMES[color]} {SHAPE_NAMES[shape]}"


def test_parts_hold_their_combinations():
    for combinations, expected in (
        ("train", set(range(64)) - set(HELD_OUT)),
        ("held_out", set(HELD_OUT)),
        ("all", set(range(64))),
    ):
        data = some(combinations)
        assert set(data.labels) == expected
        second = set(data.second_labels) - {-1}
        assert second == (set() if combinations == "held_out" else expected)


@pytest.mark.parametrize("combinations", ["train", "held_out", "all"])
def test_captions_are_true(combinations):
    data = some(combinations)
    for index, caption in enumerate(data.captions):
        scene = scene_of(data, index)
        assert is_true(read_caption(caption), scene), (caption, scene)
    # The reader overlooks little: captions of other scenes are false.
    wrong = [
        is_true(read_caption(caption), scene_of(data, index - 1))
        for index, caption in enumerate(data.captions)
    ]
    assert np.mean(wrong) < 0.03 or combinations == "held_out"


def test_scene_depends_on_seed_and_index_only():
    def make(number, start=0, seed=3):
        return captioned_shapes(number, 16, seed=seed, start=start, verbose=0)

    whole = make(600)
    for start, number in ((0, 10), (250, 20), (256, 5), (300, 300), (599, 1)):
        for part, everything in zip(make(number, start), whole, strict=True):
            np.testing.assert_array_equal(part, everything[start : start + number])
    other = make(600, seed=4)
    assert not np.array_equal(other.images, whole.images)
    assert not np.array_equal(other.captions, whole.captions)
    # No block repeats another one.
    assert len(np.unique(whole.images.reshape(600, -1), axis=0)) == 600


@pytest.mark.parametrize(
    "arguments, received",
    [
        ({"num_images": 0}, "num_images=0"),
        ({"num_images": 2.0}, "num_images=2.0"),
        ({"num_images": 1, "image_size": 15}, "image_size=15"),
        ({"num_images": 1, "seed": -1}, "seed=-1"),
        ({"num_images": 1, "start": -1}, "start=-1"),
        ({"num_images": 1, "combinations": "test"}, "combinations='test'"),
        ({"num_images": 1, "combinations": None}, "combinations=None"),
    ],
)
def test_bad_arguments(arguments, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        captioned_shapes(**arguments)
