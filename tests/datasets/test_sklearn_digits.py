import sys

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from keras_softmoe.datasets import digits
from tests.support.close import assert_near


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
    assert first.shape == other.shape
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
def test_bad_arguments(arguments, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        digits(**arguments)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"keras-softmoe\[datasets\]"):
        digits()
