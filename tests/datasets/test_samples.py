"""Samples are parts of the bank of icons; digits come from scikit-learn."""

import sys

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from experiments import samples as program
from keras_softmoe.datasets import digits, sample
from tests.experiments.test_icon_study import small_bank
from tests.support.close import assert_near

NAMES = ("icons", "new_icons", "other_new_icons", "letters")


@pytest.mark.parametrize(
    ("name", "number", "size", "classes"),
    [
        ("icons", 1000, 32, 1229),
        ("new_icons", 3007, 32, 129),
        ("other_new_icons", 1949, 32, 129),
        ("letters", 512, 20, 2600),
    ],
)
def test_shapes_and_types(name, number, size, classes):
    images, labels, class_names, captions = sample(name)
    assert (images.shape, images.dtype) == ((number, size, size, 3), "uint8")
    assert (labels.shape, labels.dtype) == ((number,), "int32")
    assert len(set(class_names)) == classes > labels.max()
    assert len(captions) == number
    assert all(isinstance(caption, str) and caption for caption in captions)


def test_new_icons_are_of_other_concepts():
    known, new, other = map(sample, ("icons", "new_icons", "other_new_icons"))
    assert set(known.class_names).isdisjoint(new.class_names)
    assert new.class_names == other.class_names
    assert set(new.labels) == set(other.labels) == set(range(129))
    seen = {image.tobytes() for image in new.images}
    assert not seen & {image.tobytes() for image in other.images}


def test_the_program_writes_icons_and_their_attributions(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "DIRECTORY", tmp_path / "samples")
    bank = small_bank()
    program.banks.write(bank, tmp_path / "bank.npz")
    program.main(["icons", f"--bank={tmp_path / 'bank.npz'}"])
    with np.load(tmp_path / "samples" / "other_new_icons.npz") as file:
        # Six icons of three concepts by the other author
        assert file["images"].shape == (18, 32, 32, 1)
        assert file["class_names"].tolist() == [
            "concept 27",
            "concept 28",
            "concept 29",
        ]
        assert file["captions"][-1] == "name 29"
    with np.load(tmp_path / "samples" / "icons.npz") as file:
        rows, labels = program.measures.searched(bank)
        np.testing.assert_array_equal(255 - file["images"][..., 0], bank.pictures[rows])
        np.testing.assert_array_equal(file["labels"], labels)
    page = (tmp_path / "samples" / program.ATTRIBUTIONS).read_text(encoding="utf-8")
    assert "90 icons of 30 concepts" in page
    assert "| name | author | MIT | 90 |" in page


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
    assert len(sizes) == len(NAMES) + 1
    assert sum(sizes) < 1e6


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        (("digits",), "name='digits'"),
        (("icons", 0), "num_images=0"),
        (("icons", 1001), "num_images=1001"),
        (("letters", 2.5), "num_images=2.5"),
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
