import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from keras_softmoe.datasets import from_tfds

# Three classes, told by the grey of the left half; the right half is white.
GREYS = (0, 60, 120)


class GreyStripes(tfds.core.GeneratorBasedBuilder):
    """Twelve training and six test images, 20 high and 40 wide, one channel."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(20, 40, 1)),
                    "label": tfds.features.ClassLabel(num_classes=3),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._images(12), "test": self._images(6)}

    def _generate_examples(self):
        raise NotImplementedError

    def _images(self, number):
        for index in range(number):
            image = np.full((20, 40, 1), 255, "uint8")
            image[:, :20] = GREYS[index % 3]
            yield index, {"image": image, "label": index % 3}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("tfds"))


def collect(dataset):
    images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
    return np.concatenate(images), np.concatenate(labels)


@pytest.mark.parametrize("name", ["mnist", "cifar10", "imagenet2012"])
def test_mock_data(name):
    # Grey, coloured, and of varying size.
    with tfds.testing.mock_data(num_examples=10):
        dataset = from_tfds(name, "train", image_size=16, batch_size=4)
        assert isinstance(dataset, tf.data.Dataset)
        batches = list(dataset.as_numpy_iterator())
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    for images, labels in batches:
        assert images.shape == (len(labels), 16, 16, 3)
        assert images.dtype == np.uint8
        assert labels.dtype == np.int32
        assert images.std() > 5


def test_fit_evaluate_predict_on_this_backend():
    with tfds.testing.mock_data(num_examples=10):
        train, test = from_tfds("cifar10", ["train", "test"], 8, 4, shuffle=True)
        model = keras.Sequential(
            [
                keras.layers.Rescaling(1 / 255),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"])
        history = model.fit(
            train, validation_data=test, epochs=2, shuffle=False, verbose=0
        )
        assert np.isfinite(history.history["val_loss"]).all()
        assert model.predict(test, verbose=0).shape == (10, 10)


def test_prepared_data(data_dir):
    train, test = from_tfds(
        "grey_stripes", ["train", "test[:50%]"], 10, 5, data_dir=data_dir
    )
    images, labels = collect(train)
    assert images.shape == (12, 10, 10, 3)
    np.testing.assert_array_equal(np.bincount(labels), [4, 4, 4])
    # Squeezed to a square: the left edge is the class, the right edge white.
    np.testing.assert_array_equal(images[:, 4, 0, 1], np.take(GREYS, labels))
    np.testing.assert_array_equal(images[:, 4, -1], 255)
    np.testing.assert_array_equal(images[..., 0], images[..., 2])
    assert len(collect(test)[1]) == 3


def test_crop_to_aspect_ratio(data_dir):
    options = {"crop_to_aspect_ratio": True, "data_dir": data_dir}
    images, labels = collect(from_tfds("grey_stripes", "test", 20, 6, **options))
    # Of 40 columns the middle 20 stay at their size: 10 of the class, 10 white.
    np.testing.assert_array_equal(
        images[:, 0, :, 0],
        np.stack([np.repeat([GREYS[label], 255], 10) for label in labels]),
    )


def test_order(data_dir):
    def labels(**options):
        dataset = from_tfds("grey_stripes", "train", 8, 5, data_dir=data_dir, **options)
        return [collect(dataset)[1].tolist() for _ in range(2)]

    plain, again = labels()
    assert plain == again
    first, second = labels(shuffle=True, seed=0)
    assert labels(shuffle=True, seed=0) == [first, second]
    assert sorted(first) == sorted(second) == sorted(plain)
    assert first != second
    short, _ = labels(drop_remainder=True)
    assert len(short) == 10


@pytest.mark.parametrize(
    "arguments, received",
    [
        ({"image_size": 0}, "image_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"shuffle_buffer": 0}, "shuffle_buffer=0"),
        ({"split": []}, r"split=\[\]"),
        ({"split": None}, "split=None"),
        ({"split": "validation"}, "split='validation'"),
        ({"split": ["test", "dev"]}, "split='dev'"),
    ],
)
def test_bad_arguments(arguments, received, data_dir):
    good = {"split": "train", "image_size": 8, "batch_size": 2}
    with pytest.raises(ValueError, match=f"Received: {received}"):
        from_tfds("grey_stripes", data_dir=data_dir, **{**good, **arguments})


def test_data_set_without_images():
    with tfds.testing.mock_data():
        with pytest.raises(ValueError, match=r"\(image, label\) pairs.*imdb_reviews"):
            from_tfds("imdb_reviews", "train", 8, 2)


def test_missing_tfds_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"keras-softmoe\[datasets,tensorflow\]"):
        from_tfds("cifar10", "train", 8, 2)
