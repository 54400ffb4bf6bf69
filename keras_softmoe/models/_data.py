"""Data as users have them, for `fit`, `evaluate` and `predict` of the tasks.

KerasHub's tasks preprocess arrays, `tf.data` and some of grain, and refuse the rest.
Here whatever gives batches is taken on every backend: arrays and `tf.data` go through a
pipeline of `tf.data`; the batches of a `keras.utils.PyDataset`, a PyTorch `DataLoader`,
a grain dataset or loader, a generator or any other iterable are preprocessed one by
one.
"""

import threading

import keras
import numpy as np

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.keras_adapter import BatchesOf
from keras_softmoe.models._pictures import as_arrays

# While one thread traces them, Keras' preprocessing layers compute with TensorFlow: in
# another thread, that is done with it, they would change back too early.
_tracing = threading.Lock()


def gives_batches(x):
    """Whether something gives batches one after the other, and is no array of them."""
    is_array = isinstance(x, (str, list, tuple, dict)) or hasattr(x, "shape")
    return not is_array and (
        isinstance(x, keras.utils.PyDataset) or hasattr(x, "__iter__")
    )


def prepare(
    model,
    x,
    y=None,
    sample_weight=None,
    *,
    batch_size=None,
    shuffle=False,
    drop_remainder=False,
    class_weight=None,
):
    """What `keras.Model.fit` takes, with the preprocessing of a task.

    Args:
        model: task with `preprocess_samples(x, y, sample_weight)` and `check_input(x)`,
            which is given arrays, or the `tf.TensorSpec` of a dataset's batches, and
            raises an error before anything is traced.
        x: arrays, or batches of `x`, `(x, y)` or `(x, y, sample_weight)`.
        y: array, or `None` with batches.
        sample_weight: as `y`.
        batch_size: int, 32 if `None`; `None` with batches.
        shuffle: bool, whether rows of arrays, and batches of a `PyDataset`, come in
            another order in each epoch.
        drop_remainder: bool, whether rows of arrays that fill no batch are left out.
        class_weight: dict from classes to weights, or `None`. Of `tf.data` Keras itself
            takes care.

    Raises:
        ValueError: if arrays differ in length or there are none, images are not finite
            or labels are no classes, or batches are given together with what they
            should contain. (The batches of `tf.data` are not looked at.)
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
                "What gives batches gives them whole, labels and weights with the "
                f"images. Received: x={type(x).__name__} together with "
                f"{', '.join(extra)}. Leave that out, and let x give (images, labels)."
            )
    elif x is not None:
        x = _rows(model, x, y, sample_weight, shuffle)
        x = x.batch(batch_size or 32, drop_remainder=drop_remainder)
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

    def preprocess(batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        x, y, weight = (None if a is None else as_arrays(a) for a in (x, y, weight))
        _check_numbers(model, x, y)
        if class_weight is not None:
            weight = _weights(y, weight, class_weight)
        data = model.preprocess_samples(x, y, weight)
        data = keras.utils.unpack_x_y_sample_weight(data)
        data = [part for part in data if part is not None]
        return tuple(keras.tree.map_structure(keras.ops.convert_to_numpy, data))

    return BatchesOf(x, preprocess, shuffle)


def _rows(model, x, y, sample_weight, shuffle):
    """`tf.data` rows of arrays, in another order every time they are iterated."""
    import tensorflow as tf

    arrays = [as_arrays(a) for a in (x, y, sample_weight) if a is not None]
    model.check_input(arrays[0])
    counts = [len(array) for array in keras.tree.flatten(arrays)]
    if len(set(counts)) > 1:
        raise ValueError(
            "Images, labels and sample weights must be equally many. Received: "
            f"{', '.join(map(str, counts))}."
        )
    if not counts[0]:
        raise ValueError("There are no images. Received: 0 of them. Pass one or more.")
    _check_numbers(model, *arrays[: 1 if y is None else 2])
    rows = tf.data.Dataset.from_tensor_slices(tuple(arrays))
    return rows.shuffle(counts[0]) if shuffle else rows


def _check_numbers(model, x, y=None):
    """Raise unless arrays hold numbers that can be learned from.

    One NaN among the images makes all weights NaN.
    """
    for array in keras.tree.flatten(x):
        is_float = getattr(array.dtype, "kind", None) == "f"
        if is_float and not np.isfinite(array).all():
            wrong = np.argwhere(~np.isfinite(array))[0]
            raise ValueError(
                "Images must be finite numbers. Received: NaN or infinity, first in "
                f"image {wrong[0]} of {len(array)}. Leave such images out, or mend "
                "what made them: `numpy.isfinite(images).all()` tells."
            )
    if y is not None and hasattr(model, "check_labels"):
        model.check_labels(y)


def no_outputs(model):
    """What a model predicts for no inputs: its outputs, with an empty batch."""
    empty = keras.tree.map_structure(
        lambda x: keras.ops.zeros((0, *x.shape[1:]), x.dtype), model.output
    )
    return keras.tree.map_structure(keras.ops.convert_to_numpy, empty)


def _weights(labels, weights, class_weight):
    if labels is None or weights is not None:
        raise ValueError(
            "`class_weight` makes weights of labels. Received: batches "
            + ("without labels" if labels is None else "with weights of their own")
            + ". Leave `class_weight` out."
        )
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    found = [class_weight.get(int(label), 1.0) for label in labels]
    return np.array(found, "float32")
