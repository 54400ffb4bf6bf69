"""From images and captions to augmented batches, as a `tf.data` pipeline."""

from keras_softmoe.training._pipeline import augmented_rows, check_arrays, resize


def training_pairs(data, image_size, batch_size, augmentation, shuffle_buffer, seed):
    """Shuffled, augmented batches, see `ContrastiveRecipe.training_data`."""
    import tensorflow as tf

    pairs = augmented_rows(
        _pairs(data), data, image_size, augmentation, shuffle_buffer, seed
    )
    batches = pairs.batch(batch_size, drop_remainder=True)
    return batches.prefetch(tf.data.AUTOTUNE)


def evaluation_pairs(data, image_size, batch_size):
    """Whole batches in the order of the data, `ContrastiveRecipe.evaluation_data`."""
    import tensorflow as tf

    def convert(image, caption):
        return resize(tf.cast(image, "float32"), image_size), caption

    pairs = _pairs(data).map(convert, num_parallel_calls=tf.data.AUTOTUNE)
    batches = pairs.batch(batch_size, drop_remainder=True)
    return batches.prefetch(tf.data.AUTOTUNE)


def _pairs(data):
    """Dataset of `(image, caption)`."""
    import tensorflow as tf

    if isinstance(data, tuple | list) and len(data) == 2:
        check_arrays(*data)
        data = tf.data.Dataset.from_tensor_slices(tuple(data))
    spec = getattr(data, "element_spec", None)
    is_pair = isinstance(spec, tuple) and len(spec) == 2 and spec[0].shape.rank == 3
    if not is_pair:
        raise ValueError(
            "Data must be a pair (images, captions), images of shape (number, height, "
            "width, 3), or a `tf.data.Dataset` of single (image, caption) pairs. "
            f"Received: {spec or type(data)}. Take a batched data set apart with "
            "`.unbatch()`."
        )
    caption = spec[1]
    is_text = caption.dtype == tf.string and caption.shape.rank == 0
    if not (is_text or (caption.dtype.is_integer and caption.shape.rank == 1)):
        raise ValueError(
            "A caption must be a string, or a vector of int token ids. Received: "
            f"captions of shape {tuple(caption.shape)}, dtype {caption.dtype.name}."
        )
    return data
