"""Synthetic glyphs: the bank of their shapes, and the images."""

import unicodedata

import numpy as np

from experiments.synthetic import GLYPH_CLASSES, glyphs


def test_shapes_types_and_classes():
    images, labels = glyphs(3000)
    assert images.shape == (3000, 32, 32, 3)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(images[..., 0], images[..., 1])
    np.testing.assert_array_equal(images[..., 0], images[..., 2])
    # 3000 draws from 179 classes: 17 each, standard deviation 4.
    counts = np.bincount(labels, minlength=len(GLYPH_CLASSES))
    assert len(counts) == len(GLYPH_CLASSES)
    assert counts.min() > 0
    assert counts.max() < 40


def test_image_depends_on_seed_and_index_only():
    images, labels = glyphs(600, seed=3)
    for start, number in ((0, 10), (250, 20), (256, 5), (300, 300), (599, 1)):
        part, part_labels = glyphs(number, seed=3, start=start)
        np.testing.assert_array_equal(part, images[start : start + number])
        np.testing.assert_array_equal(part_labels, labels[start : start + number])
    other, _ = glyphs(600, seed=4)
    assert not np.array_equal(other, images)
    # No block repeats another one.
    assert len(np.unique(images.reshape(600, -1), axis=0)) == 600


ANYWHERE = {"image_size": 24, "placement": "anywhere"}


def test_anywhere_is_the_same_glyph_somewhere():
    small, labels = (x[:300] for x in glyphs(300, image_size=16, seed=5))
    images, same = glyphs(300, seed=5, **ANYWHERE)
    np.testing.assert_array_equal(same, labels)
    assert images.shape == (300, 24, 24, 3)
    places = set()
    for picture, image in zip(small[..., 0] > 128, images[..., 0] > 128, strict=True):
        # Noise is drawn anew, so some grey pixels fall on the other side.
        different = {
            (top, left): np.mean(picture != image[top : top + 16, left : left + 16])
            for top in range(9)
            for left in range(9)
        }
        place = min(different, key=different.get)
        assert different[place] < 0.15
        places.add(place)
    # All 81 places are equally likely.
    assert len(places) > 60


def test_classes_hold_no_digit_of_any_script():
    assert len(set(GLYPH_CLASSES)) == len(GLYPH_CLASSES) == 179
    for character in GLYPH_CLASSES:
        # NFKC turns wide, circled, superscript and other digits into plain ones.
        for plain in unicodedata.normalize("NFKC", character):
            assert unicodedata.category(plain)[0] != "N", character
            assert unicodedata.numeric(plain, None) is None, character
