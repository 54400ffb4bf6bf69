"""Data of all kinds, checked and preprocessed for `fit`, `evaluate` and `predict`.

KerasHub's tasks preprocess arrays, `tf.data` and some of grain, and refuse the rest.
Here arrays and `tf.data` go through a `tf.data` pipeline, on every backend. The batches
of a `keras.utils.PyDataset`, a PyTorch `DataLoader`, a grain dataset or loader, a
generator or any other iterable are preprocessed one by one.
"""

import sys
import threading
from typing import Any

import keras
import numpy as np

from keras_softmoe.checks import (
    check_whole_numbers,
    first_not_finite,
    is_number,
    is_whole_number,
    quote,
)
from keras_softmoe.keras_adapter.data import BatchesOf
from keras_softmoe.models.arguments import check_finite_images
from keras_softmoe.sharding.variables import num_processes

# Keras' preprocessing layers compute with TensorFlow while a thread traces them.
# Another thread that has finished would change them back too early.
_tracing = threading.Lock()


def gives_batches(x):
    """Whether `x` is an iterable of batches, not an array or a list of rows."""
    is_array = isinstance(x, (str, list, tuple, dict)) or hasattr(x, "shape")
    return not is_array and (
        isinstance(x, keras.utils.PyDataset) or hasattr(x, "__iter__")
    )


def prepare(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    drop_remainder: bool = False,
    class_weight: dict | None = None,
) -> Any:
    """Return data as `keras.Model.fit` takes them, preprocessed by a task.

    Args:
        model: task with three methods: `check_input(x)` of arrays, or of the
            `tf.TensorSpec` of a dataset's batches before anything is traced;
            `check_labels(y)` of arrays; `preprocess_samples(x, y, sample_weight)`.
        x: arrays, or batches of `x`, `(x, y)` or `(x, y, sample_weight)`.
        y: array, or `None` with batches.
        sample_weight: as `y`.
        batch_size: int. Defaults to 32. `None` with batches.
        shuffle: bool, whether rows of arrays, and batches of a `PyDataset`, are
            shuffled before each epoch.
        drop_remainder: bool, whether the last incomplete batch of arrays is dropped.
        class_weight: dict from all classes to weights, or `None`. Keras applies it to
            arrays and `tf.data`.

    Raises:
        ValueError: if arrays differ in length, there are none or no batches, images or
            weights are not finite, labels are not classes, labels and weights are given
            beside batches, or several processes cannot share the batches. (Elements of
            `tf.data` are not checked.)
    """
    # KerasHub has imported TensorFlow already.
    import tensorflow as tf

    if batch_size is not None:
        check_whole_numbers(1, batch_size=batch_size)
    if gives_batches(x):
        extra = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        extra = [name for name, value in extra.items() if value is not None]
        if extra:
            raise ValueError(
                "Batches must already contain labels and sample weights. "
                f"Received: x={type(x).__name__} together with "
                f"{', '.join(extra)}. Leave that out, and let x give (images, labels)."
            )
    elif x is not None:
        x = _rows(model, x, y, sample_weight, shuffle)
        x = x.batch(batch_size or 32, drop_remainder=drop_remainder)
    _check_batches(x)
    if isinstance(x, tf.data.Dataset):
        inputs, *_ = keras.utils.unpack_x_y_sample_weight(x.element_spec)
        model.check_input(inputs)
        with _tracing:
            batches = x.map(
                model.preprocess_samples, num_parallel_calls=tf.data.AUTOTUNE
            )
        return batches.prefetch(tf.data.AUTOTUNE)
    if x is None:
        raise ValueError("There are no data. Received: x=None. Pass images or batches.")
    distribution = keras.distribution.distribution()
    if num_processes() > 1 and getattr(distribution, "auto_shard_dataset", False):
        raise ValueError(
            "Several processes share the rows of arrays and of `tf.data` datasets only."
            f" Received: x={type(x).__name__}. Pass one of those; or, if each process "
            "gives rows of its own, `expert_parallel(auto_shard_dataset=False)`."
        )

    def preprocess(batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        x, y, weight = (None if a is None else as_arrays(a) for a in (x, y, weight))
        _check_samples(model, x, y, weight)
        if class_weight is not None:
            weight = _weights(y, weight, class_weight)
        data = model.preprocess_samples(x, y, weight)
        data = keras.utils.unpack_x_y_sample_weight(data)
        data = [part for part in data if part is not None]
        return tuple(keras.tree.map_structure(keras.ops.convert_to_numpy, data))

    return BatchesOf(x, preprocess, shuffle)


def _rows(model, x, y, sample_weight, shuffle):
    """Return arrays as `tf.data` rows, shuffled again in each iteration."""
    import tensorflow as tf

    x, y, weight = (None if a is None else as_arrays(a) for a in (x, y, sample_weight))
    _check_samples(model, x, y, weight)
    arrays = tuple(a for a in (x, y, weight) if a is not None)
    rows = tf.data.Dataset.from_tensor_slices(arrays)
    return rows.shuffle(num_rows(x)) if shuffle else rows


def num_rows(arrays):
    """Return the number of rows of an array, or of a structure of arrays."""
    return len(keras.tree.flatten(arrays)[0])


def is_empty(x):
    """Whether `x` is an array or a list without rows, or a dict with one."""
    if isinstance(x, dict):
        return any(map(is_empty, x.values()))
    if isinstance(x, (list, tuple)):
        return not x
    return tuple(getattr(x, "shape", ()))[:1] == (0,)


def _check_samples(model, x, y=None, weight=None):
    """Raise unless arrays are equally long, finite and of the model.

    One NaN among images, labels or sample weights makes all weights of a model NaN.
    """
    model.check_input(x)
    arrays = [array for part in (x, y, weight) for array in keras.tree.flatten(part)]
    arrays = [array for array in arrays if array is not None]
    if not all(np.ndim(array) for array in arrays):
        raise ValueError(
            "Images, labels and sample weights are arrays, with a row for each image. "
            f"Received: arrays of shapes {', '.join(str(np.shape(a)) for a in arrays)}."
        )
    counts = [len(array) for array in arrays]
    if len(set(counts)) > 1:
        raise ValueError(
            "Images, labels and sample weights must be equally many. Received: "
            f"{', '.join(map(str, counts))}."
        )
    if not counts[0]:
        raise ValueError("There are no images. Received: 0 of them. Pass one or more.")
    for array in keras.tree.flatten(x):
        check_finite_images(array)
    if y is not None:
        model.check_labels(y)
    if weight is not None:
        _check_weights(weight)


def check_finite_labels(y):
    """Raise if labels that need not be classes, as smoothed ones, are not finite."""
    for array in keras.tree.flatten(y):
        wrong = first_not_finite(array)
        if wrong is not None:
            raise ValueError(
                "Labels must be finite numbers. Received: NaN or infinity, first in "
                f"the label {wrong} of {len(array)}. Leave such images out, or give "
                "them another label and the weight 0."
            )


def _check_weights(weight):
    """Raise unless sample weights are one finite number for each sample."""
    for array in keras.tree.flatten(weight):
        if array.dtype.kind in "OSUcmM" or array.shape[1:] not in ((), (1,)):
            raise ValueError(
                "Sample weights must be numbers, one for each image, of shape (N,). "
                f"Received: sample_weight of shape {array.shape}, dtype {array.dtype}."
            )
        wrong = first_not_finite(array)
        if wrong is not None:
            raise ValueError(
                "Sample weights must be finite numbers. Received: NaN or infinity, "
                f"first in the weight {wrong} of {len(array)}. To leave an image out, "
                "give it the weight 0."
            )


def without_column(x):
    """Squeeze an array or tensor `(N, 1)` to `(N,)`; return anything else unchanged."""
    shape = getattr(x, "shape", None)
    if shape is None or getattr(shape, "rank", 0) is None:
        return x
    return x[:, 0] if len(shape) == 2 and shape[1] == 1 else x


def no_outputs(model):
    """Return the outputs of a model for an empty batch, as `predict` does."""
    empty = keras.tree.map_structure(
        lambda x: keras.ops.zeros((0, *x.shape[1:]), x.dtype), model.output
    )
    return keras.tree.map_structure(keras.ops.convert_to_numpy, empty)


def _check_batches(x):
    """Raise if an iterable has a length, and it is 0."""
    try:
        is_empty = x is not None and len(x) == 0
    except TypeError:
        # The length is unknown or infinite.
        return
    if is_empty:
        raise ValueError(
            f"There are no batches. Received: x={type(x).__name__} of length 0. Give "
            "it one or more: `drop_remainder=True` leaves out one that is not full."
        )


def checked_class_weight(class_weight, num_classes):
    """Return a dict with the weights of all classes; the default is 1.

    Keras needs a weight for every class, and ignores keys that are no classes.

    Args:
        class_weight: dict from int to float, or `None`, which is returned.
        num_classes: int.

    Raises:
        ValueError: if it is no dict from classes to finite numbers.
    """
    if class_weight is None:
        return None
    # With one output there are two classes.
    classes = range(max(num_classes, 2))
    if not isinstance(class_weight, dict) or not all(
        is_whole_number(label, 0) and label in classes and is_number(weight)
        for label, weight in class_weight.items()
    ):
        raise ValueError(
            "`class_weight` must be a dict from classes, whole numbers from 0 to "
            f"{classes[-1]}, to weights, finite numbers. Received: class_weight="
            f"{quote(class_weight)}."
        )
    return {label: float(class_weight.get(label, 1.0)) for label in classes}


def _weights(labels, weights, class_weight):
    if labels is None or weights is not None:
        raise ValueError(
            "`class_weight` turns labels into sample weights. Received: batches "
            + ("without labels" if labels is None else "with weights of their own")
            + ". Leave `class_weight` out."
        )
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    found = [class_weight.get(int(label), 1.0) for label in labels]
    return np.array(found, "float32")


# === Images of all kinds ===


def as_arrays(data):
    """Convert numbers, strings or images to NumPy arrays.

    Args:
        data: array or tensor of any library; PIL image, which becomes a batch of one;
            list of them; or a dict of all this.

    Raises:
        ValueError: if the images of a list differ in size.
    """
    if isinstance(data, dict):
        return {name: as_arrays(value) for name, value in data.items()}
    if _is_pil(data):
        return as_arrays([data])
    if isinstance(data, (list, tuple)):
        return _stacked(data)
    return _array(data)


def _stacked(values):
    pictures = [value for value in values if _is_pil(value)]
    if pictures:
        # Grey images stay grey unless some have colours.
        is_grey = all(picture.mode in ("1", "L") for picture in pictures)
        mode = "L" if is_grey else "RGB"
        values = [v.convert(mode) if _is_pil(v) else v for v in values]
    values = [_array(value) for value in values]
    shapes = list(dict.fromkeys(value.shape for value in values))
    if len(shapes) > 1:
        raise ValueError(
            "The items of a list are put into one array and must have the same shape. "
            f"Received: shapes {', '.join(map(str, shapes[:4]))}. Resize images first, "
            "for example `image.resize((224, 224))` of PIL."
        )
    array = np.stack(values) if values else np.zeros(0, "float32")
    return array[..., None] if pictures and is_grey else array


def _array(value):
    is_torch = type(value).__module__.partition(".")[0] == "torch"
    if is_torch:
        value = value.detach().cpu()
    array = np.asarray(value)
    # `tf.data` takes strings of this dtype.
    return array.astype(object) if array.dtype.kind == "U" else array


def _is_pil(value):
    # Unless PIL is imported, there are no such images.
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def without_pil(images):
    """Convert a PIL image, or those in a list, to arrays; return others unchanged."""
    if _is_pil(images):
        return as_arrays(images)[0]
    if isinstance(images, (list, tuple)) and any(map(_is_pil, images)):
        return [without_pil(image) for image in images]
    return images


def repeat_grey(images, channels):
    """Repeat the channel of grey images; return others unchanged.

    Args:
        images: array or tensor, also of TensorFlow in a pipeline on another backend.
        channels: int.
    """
    shape = getattr(images, "shape", ())
    if channels == 1 or len(shape) != 4 or shape[-1] != 1:
        return images
    if isinstance(images, np.ndarray):
        return np.repeat(images, channels, axis=-1)
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.is_tensor(images):
        return tf.repeat(images, channels, axis=-1)
    return keras.ops.repeat(images, channels, axis=-1)
