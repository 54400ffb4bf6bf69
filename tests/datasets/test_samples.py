"""Samples are the first images of the generators; digits come from scikit-learn."""

import sys

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from experiments.synthetic import __main__ as program
from keras_softmoe.datasets import digits, sample
from tests.support.close import assert_near

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
    known, new = sample("icons"), sample("new_icons")
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


def test_values_are_the_originals_in_0_to_255():
    images, labels = digits(image_size=8)
    small, expected = load_digits(return_X_y=True)
    assert images.shape == (1797, 8, 8, 3)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(labels, expected)
    expected = np.rint(small.reshape(-1, 8, 8) * 255 / 16)
    for channel in range(3):
        np.testing.assert_array_equal(images[..., channel], expected)


def test_enlarging_is_bilinear_with_aligned_centres():
    small, _ = digits(image_size=8)
    large, _ = digits(image_size=30)
    assert large.shape == (1797, 30, 30, 3)
    expected = keras.ops.image.resize(
        small[:50].astype("float32"), (30, 30), data_format="channels_last"
    )
    expected = keras.ops.convert_to_numpy(expected)
    assert_near(large[:50], expected, atol=1.0)


def test_halves_are_disjoint_complete_and_stratified():
    everything, train, test = (digits(8, split) for split in ("all", "train", "test"))
    rows = {
        name: sorted(image.tobytes() for image in images)
        for name, (images, _) in zip("atv", (everything, train, test), strict=True)
    }
    # The originals are all different, so equal lists mean no image twice or lost.
    assert len(set(rows["a"])) == 1797
    assert sorted(rows["t"] + rows["v"]) == rows["a"]
    difference = np.bincount(train[1]) - np.bincount(test[1])
    assert set(difference) <= {0, 1}


def test_split_depends_on_the_seed_only():
    first, again, other = (digits(8, "test", seed=seed)[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_nearest_neighbour_reads_the_other_half():
    (train, train_labels), (test, labels) = digits(8, "train"), digits(8, "test")
    train, test = (x[..., 0].reshape(len(x), -1) / 255.0 for x in (train, test))
    distance = np.sum(train**2, -1) - 2 * test @ train.T
    assert np.mean(train_labels[distance.argmin(-1)] == labels) > 0.97


@pytest.mark.parametrize(
    "arguments, received",
    [
        ({"image_size": 7}, "image_size=7"),
        ({"image_size": 32.5}, "image_size=32.5"),
        ({"split": "validation"}, "split='validation'"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_arguments_of_digits(arguments, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        digits(**arguments)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"keras-softmoe\[datasets\]"):
        digits()
