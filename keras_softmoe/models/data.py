"""Data of all kinds, checked and preprocessed for `fit`, `evaluate` and `predict`.

KerasHub's tasks preprocess arrays, `tf.data` and some of grain, and refuse the rest.
Here arrays and `tf.data` go through a `tf.data` pipeline, on every backend. The batches
of a `keras.utils.PyDataset`, PyTorch `DataLoader`, grain dataset or any other iterable
are preprocessed one by one; so are those of arrays where TensorFlow is not installed.
"""

import random
import sys
import threading
from typing import Any

import keras
import numpy as np

from keras_softmoe import checks
from keras_softmoe.keras_adapter.data import BatchesOf
from keras_softmoe.sharding.variables import num_processes

# Keras' preprocessing layers compute with TensorFlow while a thread traces them.
# Another thread that has finished would change them back too early.
_tracing = threading.Lock()
# The remedy where targets or weights of images are not finite.
LEAVE_OUT = " To leave an image out, give it the weight 0."


def gives_batches(x):
    """Return whether `x` is an iterable of batches, not an array or a list of rows."""
    if isinstance(x, (str, list, tuple, dict)) or hasattr(x, "shape"):
        return False
    return isinstance(x, keras.utils.PyDataset) or hasattr(x, "__iter__")


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
    """Return data for `keras.Model.fit`, preprocessed by a task.

    Args:
        model: task with three methods: `check_input(x)` of arrays, or of the
            `tf.TensorSpec` of a dataset's batches before anything is traced;
            `check_labels(y)` of arrays; `preprocess_samples(x, y, sample_weight)`.
        x: arrays, or batches of `x`, `(x, y)` or `(x, y, sample_weight)`.
        y: array, or `None` with batches.
        sample_weight: as `y`.
        batch_size: int. Defaults to 32. `None` with batches.
        shuffle: bool, whether rows of arrays (batches of a `PyDataset`) are shuffled.
        drop_remainder: bool, whether the last incomplete batch of arrays is dropped.
        class_weight: dict from classes to weights, or `None` (where Keras applies it).
    """
    # KerasHub has imported TensorFlow, where it is installed.
    tf = sys.modules.get("tensorflow")
    if batch_size is not None:
        checks.check_whole_numbers(1, batch_size=batch_size)
    if gives_batches(x):
        extra = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        extra = [name for name, value in extra.items() if value is not None]
        if extra:
            raise ValueError(
                "Batches must already contain labels and sample weights. "
                f"Received: x={type(x).__name__} together with {', '.join(extra)}."
            )
    elif x is not None:
        data = [None if a is None else as_arrays(a) for a in (x, y, sample_weight)]
        _check_samples(model, *data)
        rows = tuple(array for array in data if array is not None)
        if tf is None:
            x = _BatchesOfRows(rows, batch_size or 32, shuffle, drop_remainder)
        else:
            x = tf.data.Dataset.from_tensor_slices(rows)
            if shuffle:
                x = x.shuffle(len(x))
            x = x.batch(batch_size or 32, drop_remainder=drop_remainder)
    else:
        raise ValueError("There are no data. Received: x=None.")
    try:
        is_empty = len(x) == 0
    except TypeError:
        # The length is unknown or infinite.
        is_empty = False
    if is_empty:
        raise ValueError(
            f"There are no batches. Received: x={type(x).__name__} of length 0. "
            "`drop_remainder=True` leaves out a batch that is not full."
        )
    if tf is not None and isinstance(x, tf.data.Dataset):
        inputs, *_ = keras.utils.unpack_x_y_sample_weight(x.element_spec)
        model.check_input(inputs)
        with _tracing:
            batches = x.map(model.preprocess_samples, tf.data.AUTOTUNE)
        return batches.prefetch(tf.data.AUTOTUNE)
    distribution = keras.distribution.distribution()
    if num_processes() > 1 and getattr(distribution, "auto_shard_dataset", False):
        raise ValueError(
            "Several processes share the rows of arrays and of `tf.data` datasets only."
            f" Received: x={type(x).__name__}. If each process gives rows of its own, "
            "use `expert_parallel(auto_shard_dataset=False)`."
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


class _BatchesOfRows:
    """Iterable of batches of equally long arrays, in a new order each time or not."""

    def __init__(self, arrays, size, shuffle, drop_remainder):
        self._arrays, self._size, self._shuffle = arrays, size, shuffle
        self._number = len(keras.tree.flatten(arrays)[0])
        self._length = (self._number + (0 if drop_remainder else size - 1)) // size

    def __len__(self):
        return self._length

    def __iter__(self):
        order = list(range(self._number))
        if self._shuffle:
            # From the seed of `keras.utils.set_random_seed`
            random.shuffle(order)
        for start in range(0, self._length * self._size, self._size):
            rows = order[start : start + self._size]
            yield keras.tree.map_structure(lambda a, rows=rows: a[rows], self._arrays)


def _weights(labels, weights, class_weight):
    """Return the sample weights of a batch, from the weights of classes."""
    if labels is None or weights is not None:
        raise ValueError(
            "`class_weight` turns labels into sample weights. Received: batches "
            + ("without labels" if labels is None else "with weights of their own")
            + ". Leave `class_weight` out."
        )
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    return np.array([class_weight.get(int(label), 1.0) for label in labels], "float32")


def is_empty(x):
    """Return whether `x` is an array or a list without rows, or a dict with one."""
    if isinstance(x, dict):
        return any(map(is_empty, x.values()))
    if isinstance(x, (list, tuple)):
        return not x
    return tuple(getattr(x, "shape", ()))[:1] == (0,)


# === Checks ===


def _check_samples(model, x, y=None, weight=None):
    """Raise unless arrays are equally long, finite and of the model.

    One NaN among images, labels or sample weights makes all weights of a model NaN.
    """
    model.check_input(x)
    images = keras.tree.flatten(x)
    arrays = [*images, *keras.tree.flatten(y), *keras.tree.flatten(weight)]
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
        raise ValueError("There are no images. Received: 0 of them.")
    for array in images:
        # Integers are finite.
        if array.dtype.kind not in "iu":
            checks.check_finite("Images", array, "image")
    if y is not None:
        model.check_labels(y)
    # Of masks, also one for each pixel
    size = getattr(y, "shape", ())[1:3]
    shapes = [(), (1,), *([size, (*size, 1)] if len(size) == 2 else [])]
    for array in [] if weight is None else keras.tree.flatten(weight):
        if array.dtype.kind in "OSUcmM" or array.shape[1:] not in shapes:
            of_masks = f", or of each pixel of a mask, {('N', *size)}"
            raise ValueError(
                "Sample weights must be numbers, one for each image, of shape (N,)"
                f"{of_masks if len(size) == 2 else ''}. "
                f"Received: sample_weight of shape {array.shape}, dtype {array.dtype}."
            )
        checks.check_finite("Sample weights", array, "the weight", LEAVE_OUT)


def checked_class_weight(class_weight, num_classes):
    """Return a dict with the weights of all classes, 1 unless given, or raise.

    Keras needs a weight for every class, and ignores other keys.
    """
    # With one output there are two classes.
    classes = range(max(num_classes, 2))
    if not isinstance(class_weight, dict) or not all(
        checks.is_whole_number(label, 0) and label in classes and checks.is_number(x)
        for label, x in class_weight.items()
    ):
        raise ValueError(
            "`class_weight` must be a dict from classes, whole numbers from 0 to "
            f"{classes[-1]}, to weights, finite numbers. Received: class_weight="
            f"{checks.quote(class_weight)}."
        )
    return {label: float(class_weight.get(label, 1.0)) for label in classes}


# === Images of all kinds ===


def as_arrays(data):
    """Convert numbers, strings or images to NumPy arrays.

    `data` is an array, tensor or PIL image (a batch of one), a list or a dict of them.
    """
    if type(data) is np.ndarray and data.dtype.kind != "U":
        return data
    if isinstance(data, dict):
        return {name: as_arrays(value) for name, value in data.items()}
    if _is_pil(data):
        data = [data]
    if not isinstance(data, (list, tuple)):
        return _array(data)
    images = [value for value in data if _is_pil(value)]
    if images:
        # Grey images stay grey unless some have colours.
        is_grey = all(image.mode in ("1", "L") for image in images)
        mode = "L" if is_grey else "RGB"
        data = [value.convert(mode) if _is_pil(value) else value for value in data]
    values = [_array(value) for value in data]
    shapes = list(dict.fromkeys(value.shape for value in values))
    if len(shapes) > 1:
        raise ValueError(
            "The items of a list are put into one array and must have the same shape. "
            f"Received: shapes {', '.join(map(str, shapes[:4]))}. Resize images first, "
            "for example `image.resize((224, 224))` of PIL."
        )
    array = np.stack(values) if values else np.zeros(0, "float32")
    return array[..., None] if images and is_grey else array


def _array(value):
    if type(value).__module__.partition(".")[0] == "torch":
        value = value.detach().cpu()
    array = np.asarray(value)
    # `tf.data` needs strings of this dtype.
    return array.astype(object) if array.dtype.kind == "U" else array


def _is_pil(value):
    # Without PIL there are no such images.
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def without_pil(images):
    """Convert a PIL image, or those in a list, to arrays; return others unchanged."""
    if _is_pil(images):
        return as_arrays(images)[0]
    if isinstance(images, (list, tuple)) and any(map(_is_pil, images)):
        return [without_pil(image) for image in images]
    return images


def without_column(x):
    """Squeeze an array or tensor `(N, 1)` to `(N,)`; return anything else unchanged."""
    shape = getattr(x, "shape", None)
    if shape is None or getattr(shape, "rank", 0) is None:
        return x
    return x[:, 0] if len(shape) == 2 and shape[1] == 1 else x


def repeat_grey(images, channels):
    """Repeat the channel of grey images; return others unchanged."""
    shape = getattr(images, "shape", ())
    if channels == 1 or len(shape) != 4 or shape[-1] != 1:
        return images
    if isinstance(images, np.ndarray):
        return np.repeat(images, channels, axis=-1)
    # In a pipeline tensors are TensorFlow's on every backend.
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.is_tensor(images):
        return tf.repeat(images, channels, axis=-1)
    return keras.ops.repeat(images, channels, axis=-1)
