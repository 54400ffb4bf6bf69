import re
import sys

import numpy as np
import pytest

from keras_softmoe.datasets import captioned_digits, digits
from keras_softmoe.datasets._captioned_digits import DIGIT_NAMES


def _digits_named(caption):
    """The digits that a caption names, as a word or a numeral."""
    words = caption.split()
    return [
        label
        for label, name in enumerate(DIGIT_NAMES)
        for word in words
        if word in (name, str(label))
    ]


@pytest.mark.parametrize("split", ["train", "test", "all"])
def test_images_and_labels_are_those_of_digits(split):
    data = captioned_digits(16, split, seed=2)
    images, labels = digits(16, split, seed=2)
    np.testing.assert_array_equal(data.images, images)
    np.testing.assert_array_equal(data.labels, labels)
    assert data.captions.shape == labels.shape
    assert data.captions.dtype.kind == "U"


def test_captions_name_the_digit_and_no_other():
    images, captions, labels = captioned_digits(8)
    for caption, label in zip(captions, labels, strict=True):
        assert _digits_named(caption) == [label], caption
        for article, digit in re.findall(r"\b(an?) (\w+)$", caption):
            if digit in (*DIGIT_NAMES, *"0123456789"):
                assert article == ("an" if label == 8 else "a"), caption


def test_captions_vary():
    captions = captioned_digits(8).captions.tolist()
    assert len(set(captions)) > 400
    numerals = np.mean([any(c.isdigit() for c in caption) for caption in captions])
    assert 0.4 < numerals < 0.6


def test_an_image_has_one_caption_in_all_splits():
    def pairs(split, seed=0):
        images, captions, _ = captioned_digits(8, split, seed)
        return {
            (image.tobytes(), caption)
            for image, caption in zip(images, captions.tolist(), strict=True)
        }

    assert pairs("train") | pairs("test") == pairs("all")
    assert pairs("all") == pairs("all")
    assert len(pairs("all", seed=1) & pairs("all")) < 300


@pytest.mark.parametrize(
    "arguments, received",
    [
        ({"image_size": 7}, "image_size=7"),
        ({"split": "validation"}, "split='validation'"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_arguments(arguments, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        captioned_digits(**arguments)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"keras-softmoe\[datasets\]"):
        captioned_digits()
