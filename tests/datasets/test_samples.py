"""Samples in the wheel are the first images of the generators."""

import numpy as np
import pytest

from experiments.synthetic import __main__ as program
from keras_softmoe.datasets import sample

NAMES = ("glyphs", "letters", "shapes", "new_shapes")


# Drawing letters takes long: that a preset knows them is tested with the presets.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "letters"])
def test_it_is_what_the_generator_draws(name):
    found, expected = sample(name), program.SAMPLES[name]()
    # Another processor may round a grey value up instead of down.
    difference = found.images.astype(int) - expected["images"]
    assert np.abs(difference).max() <= 1
    assert np.mean(difference != 0) < 1e-3
    np.testing.assert_array_equal(found.labels, expected["labels"])
    np.testing.assert_array_equal(found.captions, expected["captions"])
    assert found.class_names == expected["class_names"].tolist()


@pytest.mark.parametrize(
    ("name", "number", "size", "classes"),
    [
        ("glyphs", 512, 32, 179),
        ("letters", 512, 20, 2600),
        ("shapes", 256, 32, 64),
        ("new_shapes", 256, 32, 64),
    ],
)
def test_shapes_and_types(name, number, size, classes):
    images, labels, class_names, captions = sample(name)
    assert (images.shape, images.dtype) == ((number, size, size, 3), "uint8")
    assert (labels.shape, labels.dtype) == ((number,), "int32")
    assert len(set(class_names)) == classes > labels.max()
    assert len(captions) == number
    assert all(isinstance(caption, str) and caption for caption in captions)


def test_combinations_that_are_new():
    known, new = sample("shapes"), sample("new_shapes")
    assert set(known.labels).isdisjoint(new.labels)
    assert len(set(new.labels)) == 16


@pytest.mark.parametrize("name", NAMES)
def test_the_first_of_them(name):
    whole, part = sample(name), sample(name, 5)
    for all_of_it, first in zip(whole, part, strict=True):
        if isinstance(first, np.ndarray):
            np.testing.assert_array_equal(first, all_of_it[:5])
        else:
            assert first == all_of_it
    # Arrays of its own.
    part.images[:] = 0
    assert sample(name, 5).images.any()


def test_the_files_are_small():
    sizes = [path.stat().st_size for path in program.DIRECTORY.iterdir()]
    assert len(sizes) == len(NAMES)
    assert sum(sizes) < 1.5e6


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        (("digits",), "name='digits'"),
        (("glyphs", 0), "num_images=0"),
        (("glyphs", 513), "num_images=513"),
        (("shapes", 2.5), "num_images=2.5"),
    ],
)
def test_bad_arguments_are_named(arguments, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        sample(*arguments)
