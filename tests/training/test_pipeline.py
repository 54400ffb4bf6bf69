"""Batches of images with labels or captions: shapes, order, augmentation, mistakes."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from keras_softmoe import training
from keras_softmoe.training import pipeline
from tests.support.close import assert_near

NUM_CLASSES = 4


def make_recipe(augmentation="none", **changes):
    recipe = training.recipe(
        "finetuning",
        num_classes=NUM_CLASSES,
        steps=10,
        image_size=8,
        batch_size=4,
        augmentation=augmentation,
    )
    return dataclasses.replace(recipe, **changes)


def make_data(num_images=6, height=8, width=8):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_images, height, width, 3)).astype("uint8")
    return images, np.arange(num_images) % NUM_CLASSES


def first(dataset, number=1):
    """Images and labels of the first batches, one after the other."""
    images, labels = zip(*dataset.take(number).as_numpy_iterator(), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def test_training_goes_over_all_images_again_and_again():
    images, labels = make_data(8)
    pairs = zip(images.astype("float32"), np.eye(NUM_CLASSES)[labels], strict=True)
    known = {(image.tobytes(), *label) for image, label in pairs}
    x, y = first(make_recipe().training_data((images, labels)), 4)
    assert (x.shape, x.dtype, y.dtype) == ((16, 8, 8, 3), "float32", "float32")
    for half in (slice(0, 8), slice(8, 16)):
        seen = {
            (image.tobytes(), *label)
            for image, label in zip(x[half], y[half], strict=True)
        }
        assert seen == known


def test_the_seed_repeats_order_crops_and_flips():
    data = make_data()
    recipe = make_recipe("light0")
    x, y = first(recipe.training_data(data, seed=3), 3)
    again_x, again_y = first(recipe.training_data(data, seed=3), 3)
    np.testing.assert_array_equal(again_x, x)
    np.testing.assert_array_equal(again_y, y)
    other, _ = first(recipe.training_data(data, seed=4), 3)
    assert (other != x).any()


def test_crops_and_flips_differ_from_image_to_image():
    image = make_data(1)[0][0]
    data = (np.stack([image] * 4), np.zeros(4, int))
    x, _ = first(make_recipe("light0").training_data(data))
    assert x.shape == (4, 8, 8, 3)
    assert x.min() >= 0 and x.max() <= 255
    assert len({one.tobytes() for one in x}) == 4
    flipping = training.Augmentation(crop=False)
    x, _ = first(make_recipe(flipping).training_data(data), 8)
    assert {one.tobytes() for one in x} == {
        one.astype("float32").tobytes() for one in (image, image[:, ::-1])
    }


def test_rand_augment_and_mixup():
    images, labels = make_data(4)
    augmentation = training.Augmentation(
        num_operations=1, magnitude=10, mixup_alpha=0.5
    )
    recipe = make_recipe(augmentation, batch_size=64)
    x, y = first(recipe.training_data((images, labels)))
    assert x.shape == (64, 8, 8, 3)
    assert np.isfinite(x).all() and x.min() >= 0 and x.max() <= 255.001
    # Mixed labels keep their sum; some are mixed, and not all by the same weight.
    np.testing.assert_allclose(y.sum(-1), 1.0, rtol=1e-5)
    assert len(np.unique(y.max(-1)[y.max(-1) < 0.999].round(3))) > 3


def test_rand_augment_differs_from_image_to_image():
    data = (np.stack([make_data(1)[0][0]] * 4), np.zeros(4, int))
    augmentation = training.Augmentation(
        crop=False, flip=False, num_operations=1, magnitude=10
    )
    x, _ = first(make_recipe(augmentation).training_data(data), 4)
    assert len({one.tobytes() for one in x}) > 8


def equalized(channel):
    """A channel with its brightnesses spread evenly, in NumPy."""
    below = np.cumsum(np.bincount(channel.astype(int).ravel(), minlength=256))
    least = below[below > 0][0]
    if below[-1] == least:
        return channel
    return np.round((below - least) * 255 / (below[-1] - least))[channel.astype(int)]


def test_equalization():
    images = make_data(3)[0].astype("float32")
    images[1] = images[1] // 4 + 100
    images[2] = 7.0
    dataset = tf.data.Dataset.from_tensor_slices(images)
    dataset = dataset.map(pipeline._Equalization(name="equalization"))
    for image, actual in zip(images, dataset.as_numpy_iterator(), strict=True):
        expected = np.stack([equalized(image[..., i]) for i in range(3)], axis=-1)
        assert_near(actual, expected, atol=1e-3)


def test_multi_hot_labels_are_kept():
    images, _ = make_data(4)
    labels = np.array([[1, 1, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]])
    _, y = first(make_recipe().evaluation_data((images, labels)))
    np.testing.assert_array_equal(y, labels)


def test_evaluation_takes_all_images_once():
    images, labels = make_data(6)
    batches = list(make_recipe().evaluation_data((images, labels)))
    assert [len(x) for x, _ in batches] == [4, 2]
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    np.testing.assert_array_equal(x, images)
    np.testing.assert_array_equal(y, np.eye(NUM_CLASSES)[labels])


def test_central_crop():
    images, labels = make_data(2, 10, 14)
    x, _ = first(make_recipe(central_crop=0.8).evaluation_data((images, labels)))
    np.testing.assert_array_equal(x, images[:, 1:9, 3:11])


def test_images_of_different_sizes():
    rng = np.random.default_rng(0)
    sizes = [(9, 8), (20, 30), (8, 40), (5, 5)]
    signature = (tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((), tf.int64))
    dataset = tf.data.Dataset.from_generator(
        lambda: ((rng.integers(0, 256, (*size, 3), "uint8"), 1) for size in sizes),
        output_signature=signature,
    )
    recipe = make_recipe("light0", central_crop=0.875)
    for batches in (recipe.training_data(dataset), recipe.evaluation_data(dataset)):
        x, _ = first(batches)
        assert x.shape == (4, 8, 8, 3)


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((4, 8, 8, 3)),
        (np.zeros((4, 8, 8)), np.zeros(4)),
        (np.zeros((4, 8, 8, 3)), np.zeros((4, 3))),
        (np.zeros((4, 8, 8, 3)), np.zeros((4, 1, 4))),
        tf.data.Dataset.from_tensors((np.zeros((4, 8, 8, 3)), np.zeros(4))),
        # Floats are no classes.
        (np.zeros((4, 8, 8, 3)), np.zeros(4)),
        (np.zeros((4, 8, 8, 3)), np.zeros(3, int)),
        (np.zeros((0, 8, 8, 3)), np.zeros(0, int)),
        (np.full((4, 8, 8, 3), np.nan), np.zeros(4, int)),
        (np.zeros((4, 8, 8, 3)), np.full((4, 4), np.inf)),
        (np.zeros((4, 8, 8, 3)), np.full(4, NUM_CLASSES)),
        (np.zeros((4, 8, 8, 3)), np.full(4, -1)),
    ],
)
def test_bad_data_are_named(data):
    for make in (make_recipe().training_data, make_recipe().evaluation_data):
        with pytest.raises(ValueError, match="Received"):
            make(data)


@pytest.mark.parametrize("label", [-1, NUM_CLASSES])
def test_labels_of_a_data_set_must_be_classes(label):
    """A vector of zeros would say that the image is of no class."""
    data = tf.data.Dataset.from_tensor_slices(
        (np.zeros((4, 8, 8, 3)), np.full(4, label, "int8"))
    )
    for make in (make_recipe().training_data, make_recipe().evaluation_data):
        with pytest.raises(tf.errors.InvalidArgumentError, match="from 0 to 3"):
            first(make(data))


def make_pair_recipe(augmentation="none"):
    return training.recipe(
        "limoe_pretraining",
        steps=40,
        warmup_steps=0,
        image_size=8,
        batch_size=4,
        augmentation=augmentation,
    )


def make_pairs(number):
    return make_data(number)[0], [f"caption {i}" for i in range(number)]


def test_pairs_stay_together():
    images, captions = make_pairs(8)
    x, y = first(make_pair_recipe().training_data((images, captions)), 4)
    assert (x.shape, x.dtype) == ((16, 8, 8, 3), "float32")
    for half in (slice(0, 8), slice(8, 16)):
        order = [int(caption.split()[1]) for caption in y[half]]
        assert sorted(order) == list(range(8))
        np.testing.assert_array_equal(x[half], images[order])


def test_images_are_augmented_and_captions_are_not():
    images, captions = make_pairs(4)
    x, y = first(make_pair_recipe("light0").training_data((images, captions)), 3)
    assert {caption.decode() for caption in y} == set(captions)
    known = {image.astype("float32").tobytes() for image in images}
    assert not known & {image.tobytes() for image in x}


def test_evaluation_leaves_out_pairs_that_fill_no_batch():
    images, captions = make_pairs(10)
    x, y = first(make_pair_recipe("light0").evaluation_data((images, captions)), 5)
    np.testing.assert_array_equal(x, images[:8])
    assert [caption.decode() for caption in y] == captions[:8]


def test_captions_of_token_ids():
    def rows():
        for height in (9, 12, 16, 20):
            yield np.full((height, 10, 3), height, "uint8"), np.full(16, height)

    dataset = tf.data.Dataset.from_generator(
        rows,
        output_signature=(
            tf.TensorSpec((None, None, 3), "uint8"),
            tf.TensorSpec((16,), "int32"),
        ),
    )
    for batches in (
        make_pair_recipe("light0").training_data(dataset),
        make_pair_recipe().evaluation_data(dataset),
    ):
        x, y = first(batches)
        assert (x.shape, y.shape) == ((4, 8, 8, 3), (4, 16))
        np.testing.assert_allclose(x[:, 0, 0, 0], y[:, 0], rtol=1e-5)


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((4, 8, 8, 3)),
        (np.zeros((4, 8, 8, 3)), np.zeros((4, 16))),
        (np.zeros((4, 8, 8, 3)), [["a", "b"]] * 4),
        (np.full((4, 8, 8, 3), np.nan), ["a"] * 4),
        (np.zeros((4, 8, 8, 3)), ["a"] * 3),
    ],
)
def test_bad_pairs_are_named(data):
    for make in (make_pair_recipe().training_data, make_pair_recipe().evaluation_data):
        with pytest.raises(ValueError, match="Received: "):
            make(data)
