import os
import sys

import numpy as np
import pytest

from experiments.synthetic import GLYPH_CLASSES, _resampling as resampling, glyphs
from keras_softmoe.datasets import digits
from tests.support.close import assert_near

# The package shows the function under the module's name.
module = sys.modules["experiments.synthetic._glyphs"]


def test_shapes_types_and_classes():
    images, labels = glyphs(3000, verbose=0)
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


@pytest.mark.parametrize("image_size", [8, 17, 64])
def test_any_image_size(image_size):
    images, _ = glyphs(5, image_size=image_size, verbose=0)
    assert images.shape == (5, image_size, image_size, 3)
    assert images.std() > 20


def test_brightness_is_that_of_the_digits():
    # White on black, filling the frame: a linear probe should not see another world.
    images, real = glyphs(2000, verbose=0)[0], digits()[0]
    assert abs(images.mean() - real.mean()) < 15
    assert abs(images.std() - real.std()) < 20


def test_image_depends_on_seed_and_index_only():
    images, labels = glyphs(600, seed=3, verbose=0)
    for start, number in ((0, 10), (250, 20), (256, 5), (300, 300), (599, 1)):
        part, part_labels = glyphs(number, seed=3, start=start, verbose=0)
        np.testing.assert_array_equal(part, images[start : start + number])
        np.testing.assert_array_equal(part_labels, labels[start : start + number])
    other, _ = glyphs(600, seed=4, verbose=0)
    assert not np.array_equal(other, images)
    # No block repeats another one.
    assert len(np.unique(images.reshape(600, -1), axis=0)) == 600


def test_classes_can_be_told_apart():
    # A ridge classifier on 22 images a class: 0.1, where guessing gets 0.006.
    train, train_labels = glyphs(4000, verbose=0)
    test, labels = glyphs(500, seed=1, verbose=0)
    train, test = (
        x[..., 0].reshape(len(x), -1).astype("float32") / 255 - 0.3
        for x in (train, test)
    )
    targets = np.eye(len(GLYPH_CLASSES), dtype="float32")[train_labels]
    gram = train.T @ train + 300 * np.eye(train.shape[1], dtype="float32")
    weights = np.linalg.solve(gram, train.T @ targets)
    assert np.mean((test @ weights).argmax(-1) == labels) > 0.05


ANYWHERE = {"image_size": 24, "placement": "anywhere", "glyph_size": 16}


def test_anywhere_is_the_same_glyph_somewhere():
    small, labels = (x[:300] for x in glyphs(300, image_size=16, seed=5, verbose=0))
    images, same = glyphs(300, seed=5, verbose=0, **ANYWHERE)
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


def test_two_thirds_of_the_image():
    default = glyphs(20, 24, placement="anywhere", verbose=0)[0]
    np.testing.assert_array_equal(glyphs(20, verbose=0, **ANYWHERE)[0], default)
    middle = glyphs(20, 24, glyph_size=16, verbose=0)[0]
    assert middle[:, :, 2].mean() < 30 < middle[:, :, 12].mean()


def test_distractors_lie_beside_the_glyph():
    clear, labels = glyphs(300, verbose=0, **ANYWHERE)
    images, same = glyphs(300, distractors=2, verbose=0, **ANYWHERE)
    np.testing.assert_array_equal(same, labels)
    added = images[..., 0] > clear[..., 0].astype(int) + 100
    # Two squares of a ninth of the image each, a third of it ink, partly on the glyph.
    assert 0.02 < added.mean() < 0.1
    assert np.mean(added.any((1, 2))) > 0.9
    hidden = (clear[..., 0] > 200) & (images[..., 0] < 100)
    assert hidden.mean() < 0.001
    part = glyphs(7, start=260, distractors=2, verbose=0, **ANYWHERE)[0]
    np.testing.assert_array_equal(part, images[260:267])


@pytest.mark.parametrize(
    "arguments, received",
    [
        ({"num_images": 0}, "num_images=0"),
        ({"num_images": 2.0}, "num_images=2.0"),
        ({"num_images": "many"}, "num_images='many'"),
        ({"num_images": 1, "image_size": 7}, "image_size=7"),
        ({"num_images": 1, "seed": -1}, "seed=-1"),
        ({"num_images": 1, "start": -1}, "start=-1"),
        ({"num_images": 1, "placement": "left"}, "placement='left'"),
        ({"num_images": 1, "distractors": -1}, "distractors=-1"),
        ({"num_images": 1, "glyph_size": 7}, "glyph_size=7"),
        ({"num_images": 1, "glyph_size": 33}, "glyph_size=33, image_size=32"),
    ],
)
def test_bad_arguments(arguments, received):
    with pytest.raises(ValueError, match=f"Received: {received}"):
        glyphs(**arguments)


def test_progress_bar(capsys):
    glyphs(300, verbose=0)
    assert capsys.readouterr().out == ""
    glyphs(300, verbose=1)
    assert "300/300" in capsys.readouterr().out


def test_cache_is_read_back(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "folder"
    images, labels = glyphs(30, cache_dir=folder, verbose=0)
    assert len(os.listdir(folder)) == 1

    def forbidden(*arguments):
        raise RuntimeError("drawn again")

    monkeypatch.setattr(module, "_draw_range", forbidden)
    again, labels_again = glyphs(30, cache_dir=folder, verbose=0)
    np.testing.assert_array_equal(again, images)
    np.testing.assert_array_equal(labels_again, labels)
    others = ({"seed": 1}, {"start": 1}, {"image_size": 16}, {"distractors": 1})
    for other in (*others, {"placement": "anywhere"}, {"glyph_size": 16}):
        with pytest.raises(RuntimeError, match="drawn again"):
            glyphs(30, cache_dir=folder, verbose=0, **other)
    monkeypatch.setattr(module, "_VERSION", module._VERSION + 1)
    with pytest.raises(RuntimeError, match="drawn again"):
        glyphs(30, cache_dir=folder, verbose=0)


@pytest.mark.parametrize("damage", ["empty", "half", "foreign", "flipped"])
def test_damaged_cache_is_replaced(tmp_path, damage):
    images, _ = glyphs(30, cache_dir=tmp_path, verbose=0)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    middle = len(good) // 2
    damaged = {
        "empty": b"",
        "half": good[:middle],
        "foreign": b"something else",
        "flipped": good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :],
    }
    path.write_bytes(damaged[damage])
    again, _ = glyphs(30, cache_dir=tmp_path, verbose=0)
    np.testing.assert_array_equal(again, images)
    assert path.read_bytes() == good


def test_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        glyphs(3, cache_dir=tmp_path, verbose=0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("source, size", [(8, 8), (8, 32), (10, 32), (3, 7)])
def test_resampling_matrices(source, size):
    up, down = (
        resampling.bilinear_matrix(size, source),
        resampling.area_matrix(source, size),
    )
    assert up.shape == (size, source)
    assert down.shape == (source, size)
    assert_near(up.sum(axis=1), 1, atol=1e-6)
    assert_near(down.sum(axis=1), 1, atol=1e-6)
    # Averaging keeps a ramp exactly: the mean place of what one sample covers.
    ramp = np.arange(size) + 0.5
    expected = (np.arange(source) + 0.5) * size / source
    if size % source == 0:
        np.testing.assert_allclose(down @ ramp, expected, rtol=1e-6)
