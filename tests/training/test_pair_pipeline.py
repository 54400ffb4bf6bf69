"""Batches of images and captions: shapes, order, augmentation, mistakes."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from keras_softmoe import datasets, training


@pytest.fixture(scope="module")
def pairs():
    images, labels = datasets.digits(8, split="train")
    return images[:64], np.array([f"the digit {label}" for label in labels[:64]])


def make_recipe(augmentation="none", **changes):
    return training.recipe(
        "limoe_pretraining",
        **{
            "steps": 40,
            "warmup_steps": 0,
            "image_size": 8,
            "batch_size": 4,
            "augmentation": augmentation,
            **changes,
        },
    )


def first(dataset, number=1):
    batches = list(dataset.take(number).as_numpy_iterator())
    return tuple(np.concatenate(part) for part in zip(*batches, strict=True))


def test_pairs_stay_together(pairs):
    images, captions = pairs[0][:8], np.array([f"caption {i}" for i in range(8)])
    x, y = first(make_recipe().training_data((images, captions)), 4)
    assert (x.shape, x.dtype) == ((16, 8, 8, 3), "float32")
    for half in (slice(0, 8), slice(8, 16)):
        order = [int(caption.split()[1]) for caption in y[half]]
        assert sorted(order) == list(range(8))
        np.testing.assert_array_equal(x[half], images[order])
    again = first(make_recipe().training_data((images, captions)), 4)
    np.testing.assert_array_equal(again[1], y)


def test_images_are_augmented_and_captions_are_not(pairs):
    data = (pairs[0][:4], pairs[1][:4])
    x, y = first(make_recipe("light0").training_data(data), 3)
    assert {caption.decode() for caption in y} == set(data[1])
    known = {image.astype("float32").tobytes() for image in data[0]}
    assert not known & {image.tobytes() for image in x}


def test_evaluation_leaves_out_what_fills_no_batch(pairs):
    data = (pairs[0][:10], list(pairs[1][:10]))
    x, y = first(make_recipe("light0").evaluation_data(data), 5)
    np.testing.assert_array_equal(x, pairs[0][:8])
    assert [caption.decode() for caption in y] == data[1][:8]


def test_pipelines_of_images_of_any_size_and_of_token_ids():
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
        make_recipe("light0").training_data(dataset),
        make_recipe().evaluation_data(dataset),
    ):
        x, y = first(batches)
        assert (x.shape, y.shape) == ((4, 8, 8, 3), (4, 16))
        np.testing.assert_allclose(x[:, 0, 0, 0], y[:, 0], rtol=1e-5)


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((4, 8, 8, 3)),
        (np.zeros((4, 8, 8)), ["a"] * 4),
        (np.zeros((4, 8, 8, 3)), np.zeros((4, 16))),
        (np.zeros((4, 8, 8, 3)), [["a", "b"]] * 4),
        tf.data.Dataset.from_tensors((np.zeros((4, 8, 8, 3)), ["a"] * 4)),
        (np.full((4, 8, 8, 3), np.nan), ["a"] * 4),
        (np.zeros((4, 8, 8, 3)), ["a"] * 3),
    ],
)
def test_other_data_are_named(data):
    for make in (make_recipe().training_data, make_recipe().evaluation_data):
        with pytest.raises(ValueError, match="Received: "):
            make(data)


def test_a_copy_with_other_values_is_checked(pairs):
    recipe = dataclasses.replace(make_recipe(), batch_size=8, augmentation="light0")
    assert first(recipe.training_data(pairs))[0].shape == (8, 8, 8, 3)
    with pytest.raises(ValueError, match="Received"):
        dataclasses.replace(recipe, augmentation="strong1")
