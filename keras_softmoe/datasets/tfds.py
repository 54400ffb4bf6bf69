"""Image classification data sets of TensorFlow Datasets, ready for `model.fit`."""

import os
from collections.abc import Sequence
from typing import Any

import keras

from keras_softmoe.checks import check_whole_numbers


def from_tfds(
    name: str,
    split: str | Sequence[str],
    image_size: int,
    batch_size: int,
    shuffle: bool = False,
    seed: int | None = None,
    shuffle_buffer: int = 10_000,
    crop_to_aspect_ratio: bool = False,
    drop_remainder: bool = False,
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
) -> Any:
    """Load an image classification data set as batches of images and labels.

    `fit`, `evaluate` and `predict` accept the `tf.data.Dataset` on every Keras backend.
    Pass `shuffle=False` to `fit`, which otherwise warns that it keeps the order.

    Args:
        name: str, name of the data set, e.g. `"cifar10"` or `"oxford_iiit_pet:4.*.*"`.
        split: str, e.g. `"train[:90%]"`, or a list or tuple of them.
        image_size: int, side of the square images in pixels.
        batch_size: int, images per batch.
        shuffle: bool, shuffle files and images, anew in every epoch.
        seed: optional int, makes the shuffling repeatable.
        shuffle_buffer: int, images (at their original size) in the shuffle buffer.
        crop_to_aspect_ratio: bool, crop the middle square instead of squeezing.
        drop_remainder: bool, leave out a last, smaller batch.
        data_dir: optional path, the directory of TensorFlow Datasets.
        download: bool, download and prepare missing data.

    Returns:
        A `tf.data.Dataset` of (images, labels), or a list of them for several splits.
        Images: uint8 of shape (batch, image_size, image_size, 3). Labels: int32.

    Raises:
        ImportError: if TensorFlow Datasets is missing (the extra `datasets`).
        ValueError: if a split is unknown, or there are no (image, label) pairs.

    Examples:
        >>> train, test = ksm.datasets.from_tfds("cifar10", ["train", "test"], 32, 128)
        >>> images, labels = next(iter(train))
    """
    check_whole_numbers(
        1, image_size=image_size, batch_size=batch_size, shuffle_buffer=shuffle_buffer
    )
    if not isinstance(split, str | list | tuple) or not split:
        raise ValueError(
            f"`split` must be a str ('train[:90%]'), or a list. Received: {split=}."
        )
    try:
        import tensorflow as tf
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(
            "`from_tfds` needs TensorFlow and TensorFlow Datasets: "
            "`pip install 'keras-softmoe[datasets,tensorflow]'`."
        ) from error

    builder = tfds.builder(name, data_dir=data_dir)
    keys, features = builder.info.supervised_keys, builder.info.features
    kinds = [features[key] for key in keys] if keys and len(keys) == 2 else []
    wanted = (tfds.features.Image, tfds.features.ClassLabel)
    if len(kinds) != 2 or not all(map(isinstance, kinds, wanted)):
        raise ValueError(
            "The data set must offer supervised (image, label) pairs. Received: "
            f"name={name!r}, whose supervised keys are {keys} among the features "
            f"{list(features)}."
        )
    if download:
        builder.download_and_prepare()
    parts = [split] if isinstance(split, str) else list(split)
    # A data set that is not prepared has no splits; TFDS then raises an error.
    splits = builder.info.splits
    for part in parts if splits else ():
        try:
            splits[part]
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"`split` must name parts of the data set {name!r}: {sorted(splits)}, "
                f"or slices of them. Received: split={part!r}."
            ) from error

    style = {"crop_to_aspect_ratio": crop_to_aspect_ratio, "antialias": True}
    style |= {"data_format": "channels_last", "dtype": "float32"}
    resize = keras.layers.Resizing(image_size, image_size, **style)
    channels = kinds[0].shape[-1]

    def prepare(image, label):
        image = tf.image.grayscale_to_rgb(image) if channels == 1 else image[..., :3]
        image = tf.round(resize(image))
        return tf.saturate_cast(image, tf.uint8), tf.cast(label, tf.int32)

    def load(part):
        config = tfds.ReadConfig(shuffle_seed=seed)
        dataset = builder.as_dataset(
            split=part, as_supervised=True, shuffle_files=shuffle, read_config=config
        )
        if shuffle:
            dataset = dataset.shuffle(shuffle_buffer, seed=seed)
        dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = dataset.batch(batch_size, drop_remainder=drop_remainder)
        return dataset.prefetch(tf.data.AUTOTUNE)

    datasets = [load(part) for part in parts]
    return datasets[0] if isinstance(split, str) else datasets
