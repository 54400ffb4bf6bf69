"""Augmented batches from images and labels or captions, as a `tf.data` pipeline.

Runs on the CPU beside training, on every Keras backend. TensorFlow, a dependency of
KerasHub, is imported when a pipeline is made.
"""

from typing import NamedTuple

import keras
import numpy as np

from keras_softmoe.checks import check_finite, check_whole_numbers, received


class Augmentation(NamedTuple):
    """Changes of images for training.

    Attributes:
        crop: bool, whether a random part of the image is cut out (5 % to 100 % of its
            area, aspect ratio 3:4 to 4:3) and resized ("inception crop").
        flip: bool, whether half of the images are mirrored left to right.
        num_operations: int, operations that RandAugment applies one after the other.
        magnitude: float, their strength on the papers' scale, see `AUGMENTATIONS`.
        mixup_alpha: float, of the Beta distribution of MixUp's weights, 0 for none.

    Examples:
        >>> own = ksm.training.Augmentation(num_operations=2, magnitude=10)
        >>> changes = {"num_classes": 10, "augmentation": own}
        >>> recipe = ksm.training.recipe("finetuning", **changes)
    """

    crop: bool = True
    flip: bool = True
    num_operations: int = 0
    magnitude: float = 0.0
    mixup_alpha: float = 0.0


# V-MoE's released code ("randaug_light1", ...). Its "light0" draws operations of
# magnitude 0, some of which still act; here it draws none.
AUGMENTATIONS = {
    "none": Augmentation(crop=False, flip=False),
    "light0": Augmentation(),
    "light1": Augmentation(num_operations=2, magnitude=10, mixup_alpha=0.2),
    "medium1": Augmentation(num_operations=2, magnitude=15, mixup_alpha=0.2),
    "medium2": Augmentation(num_operations=2, magnitude=15, mixup_alpha=0.5),
    "strong1": Augmentation(num_operations=2, magnitude=20, mixup_alpha=0.5),
    "strong2": Augmentation(num_operations=2, magnitude=20, mixup_alpha=0.8),
    "extreme1": Augmentation(num_operations=4, magnitude=15, mixup_alpha=0.5),
    "extreme2": Augmentation(num_operations=4, magnitude=20, mixup_alpha=0.8),
}

# Keras has other operations than the papers' code, with strengths between 0 and a
# `factor`. Its default of 0.5 is used for the papers' strongest magnitude, 20.
_FACTOR_PER_MAGNITUDE = 0.5 / 20
_OPERATIONS = (
    "random_shear random_translation random_rotation random_brightness "
    "random_color_degeneration random_contrast random_sharpness random_posterization "
    "solarization auto_contrast equalization"
)

# Arguments of Keras' layers, whose defaults a user may have changed.
_LAYERS = {"dtype": "float32", "data_format": "channels_last"}


def named_augmentation(augmentation):
    """Return the `Augmentation` of a name; an `Augmentation` is returned unchanged."""
    if isinstance(augmentation, Augmentation):
        return augmentation
    if augmentation not in AUGMENTATIONS:
        raise ValueError(
            "`augmentation` must be an `Augmentation` or one of "
            f"{', '.join(map(repr, AUGMENTATIONS))}. "
            + received(augmentation=augmentation)
        )
    return AUGMENTATIONS[augmentation]


def training_batches(
    rows, target_of, image_size, batch_size, augmentation, shuffle_buffer, seed
):
    """Return shuffled, augmented batches without end, see `Recipe.training_data`.

    `rows` are pairs of an image and a label or caption, which `target_of` maps.
    """
    import tensorflow as tf

    num_rows = int(rows.cardinality())
    if num_rows > 0:
        shuffle_buffer = min(shuffle_buffer, num_rows)
    rows = rows.shuffle(shuffle_buffer, seed=seed).repeat()
    seeds = tf.data.Dataset.random(seed=seed).batch(2)
    rand_augment = _rand_augment(augmentation)
    mix_up = keras.layers.MixUp(augmentation.mixup_alpha, **_LAYERS)

    def augment(row, seed):
        image, target = row
        image = tf.cast(image, "float32")
        if augmentation.crop:
            begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
                tf.shape(image),
                tf.zeros((0, 0, 4)),
                seed,
                min_object_covered=0.0,
                area_range=(0.05, 1.0),
                aspect_ratio_range=(3 / 4, 4 / 3),
                use_image_if_no_bounding_boxes=True,
            )
            image = tf.slice(image, begin, size)
        image = _resize(image, image_size)
        if augmentation.flip:
            image = tf.image.stateless_random_flip_left_right(image, seed + 1)
        return rand_augment(image, seed + 2), target_of(target)

    def mix(images, labels):
        mixed = mix_up({"images": images, "labels": labels}, training=True)
        return mixed["images"], mixed["labels"]

    rows = tf.data.Dataset.zip((rows, seeds))
    rows = rows.map(augment, num_parallel_calls=tf.data.AUTOTUNE)
    batches = rows.batch(batch_size, drop_remainder=True)
    if augmentation.mixup_alpha:
        batches = batches.map(mix, num_parallel_calls=tf.data.AUTOTUNE)
    return batches.prefetch(tf.data.AUTOTUNE)


def evaluation_batches(
    rows, target_of, image_size, batch_size, central_crop, drop_remainder
):
    """Return batches of all images in their order, see `Recipe.evaluation_data`."""
    import tensorflow as tf

    def convert(image, target):
        image = tf.cast(image, "float32")
        if central_crop < 1.0:
            height, width = tf.shape(image)[0], tf.shape(image)[1]
            side = tf.cast(tf.minimum(height, width), "float32") * central_crop
            side = tf.maximum(tf.cast(tf.round(side), "int32"), 1)
            top, left = (height - side) // 2, (width - side) // 2
            image = image[top : top + side, left : left + side]
        return _resize(image, image_size), target_of(target)

    batches = rows.map(convert, num_parallel_calls=tf.data.AUTOTUNE)
    batches = batches.batch(batch_size, drop_remainder=drop_remainder)
    return batches.prefetch(tf.data.AUTOTUNE)


def _resize(image, size):
    import tensorflow as tf

    return tf.ensure_shape(tf.image.resize(image, (size, size)), (size, size, 3))


def _rand_augment(augmentation):
    """Return a function of image and seed, RandAugment with Keras' operations.

    `keras.layers.RandAugment` computes all operations to keep one, 24 times as slow.
    """
    if not augmentation.num_operations:
        return lambda image, seed: image
    import tensorflow as tf

    factor = augmentation.magnitude * _FACTOR_PER_MAGNITUDE
    layer = keras.layers.RandAugment(factor=factor, **_LAYERS)
    layer.equalization = _Equalization(**_LAYERS)
    operations = [getattr(layer, name) for name in _OPERATIONS.split()]

    def apply(image, seed):
        size = augmentation.num_operations
        choices = tf.random.stateless_uniform(
            (size,), seed, 0, len(operations), dtype="int32"
        )
        for choice in tf.unstack(choices):
            branches = [lambda o=o, x=image: o(x, training=True) for o in operations]
            image = tf.ensure_shape(tf.switch_case(choice, branches), image.shape)
        return image

    return apply


class _Equalization(keras.layers.Equalization):
    """Keras' layer with TensorFlow's histogram.

    With the JAX backend Keras counts each of 256 values in a loop, also in `tf.data`.
    """

    def _custom_histogram_fixed_width(self, values, value_range, nbins):
        import tensorflow as tf

        low, high = value_range
        bins = tf.cast((values - low) * ((nbins - 1) / (high - low)), "int32")
        bins = tf.reshape(tf.clip_by_value(bins, 0, nbins - 1), [-1])
        return tf.math.bincount(bins, minlength=nbins, maxlength=nbins)


def labelled_rows(data, num_classes):
    """Return a data set, and a function that makes its labels dense."""
    check_whole_numbers(1, num_classes=num_classes)
    rows, label = _rows(data)
    import tensorflow as tf

    rule = f"Labels must be from 0 to {num_classes - 1}."
    if rows is not data:
        labels = np.asarray(data[1])
        # A label that is no class would count as none of them.
        if labels.dtype.kind in "iu" and labels.ndim == 1:
            wrong = labels[(labels < 0) | (labels >= num_classes)][:5].tolist()
            if wrong:
                raise ValueError(f"{rule} {received(labels=wrong)}")
    if label.shape.rank == 1 and label.shape[0] == num_classes:
        return rows, lambda label: tf.cast(label, "float32")
    if label.shape.rank != 0 or not label.dtype.is_integer:
        raise ValueError(
            "A label must be an integer, or a vector with an entry for each class. "
            f"Received: labels of shape {tuple(label.shape)}, dtype "
            f"{label.dtype.name}, num_classes={num_classes}."
        )

    def one_hot(label):
        label = tf.cast(label, "int64")
        is_class = (label >= 0) & (label < num_classes)
        with tf.control_dependencies([tf.debugging.Assert(is_class, [rule, label])]):
            return tf.one_hot(label, num_classes)

    return rows, one_hot


def captioned_rows(data):
    """Return a data set of images and captions, and the identity."""
    rows, caption = _rows(data)
    import tensorflow as tf

    is_text = caption.dtype == tf.string and caption.shape.rank == 0
    if not (is_text or (caption.dtype.is_integer and caption.shape.rank == 1)):
        raise ValueError(
            "A caption must be a string, or a vector of int token ids. Received: "
            f"captions of shape {tuple(caption.shape)}, dtype {caption.dtype.name}."
        )
    return rows, lambda caption: caption


def _rows(data):
    """Return a data set of pairs of image and target, and the spec of a target."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            "The data of recipes are `tf.data` pipelines: `pip install tensorflow`."
        ) from error
    if isinstance(data, tuple | list) and len(data) == 2:
        images, others = data
        if len(images) != len(others) or not len(images):
            raise ValueError(
                "There must be an image or more, and one label or caption for each. "
                f"Received: {len(images)} images and {len(others)} labels or captions."
            )
        for name, array in (("Images", images), ("Labels", others)):
            check_finite(name, np.asarray(array), "number")
        data = tf.data.Dataset.from_tensor_slices(tuple(data))
    spec = getattr(data, "element_spec", None)
    if not isinstance(spec, tuple) or len(spec) != 2 or spec[0].shape.rank != 3:
        raise ValueError(
            "Data must be a pair (images, labels) or (images, captions), images of "
            "shape (number, height, width, 3), or a `tf.data.Dataset` of such single "
            f"pairs. Received: {spec or type(data)}. Take a batched data set apart "
            "with `.unbatch()`."
        )
    return data, spec[1]
