"""Preprocessed batches of any iterable, as data of `fit`."""

import itertools
import sys

import keras
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter


def number_of(batches):
    """Return the number of batches, or `None`. Would be replaced by: `len` of data."""
    if isinstance(batches, BatchesOf):
        return batches.num_batches
    number = int(batches.cardinality())
    # -1 is without end.
    return None if number < -1 else number


class BatchesOf(DataAdapter):
    """Data adapter for preprocessed batches of any iterable.

    An iterator gives one epoch, or several of `steps_per_epoch`. `preprocess` takes a
    batch and returns a tuple of NumPy arrays. Would be replaced by: `keras.Model.fit`
    with a public hook for each batch.
    """

    def __init__(self, data, preprocess, shuffle):
        self._data, self._preprocess = data, preprocess
        self._py_dataset = self._iterator = self._signature = None
        # The first batch that was preprocessed, for a look at the data after an epoch
        self.first = None
        if isinstance(data, keras.utils.PyDataset):
            self._py_dataset = PyDatasetAdapter(data, shuffle=shuffle)
        elif iter(data) is data:
            self._iterator = data
            # Drawn but not yet used: Keras inspects a batch before it begins.
            self._drawn = []

    def get_numpy_iterator(self):
        return map(self._preprocessed, self._batches())

    def _preprocessed(self, batch):
        is_packed = isinstance(batch, (tuple, list))
        batch = self._preprocess(tuple(batch) if is_packed else (batch,))
        if self.first is None:
            self.first = batch
        return batch

    def _batches(self):
        if self._py_dataset is not None:
            return self._py_dataset.get_numpy_iterator()
        return self._data if self._iterator is None else self._rest()

    def _rest(self):
        if not self._drawn:
            self._drawn = list(itertools.islice(self._iterator, 1))
        if not self._drawn:
            raise ValueError(
                "There are no batches left: a generator gives its batches once, so "
                "several runs need data that can be iterated again, such as a "
                "`keras.utils.PyDataset`, or an infinite generator and "
                f"`steps_per_epoch`. Received: {self._iterator!r}."
            )
        yield self._drawn[0]
        self._drawn = []
        yield from self._iterator

    def get_jax_iterator(self):
        return self.get_numpy_iterator()

    def get_torch_dataloader(self):
        return data_adapter_utils.get_torch_dataloader(self.get_numpy_iterator())

    def get_tf_dataset(self):
        import tensorflow as tf

        if self._signature is None:
            # Not from an iterator, which would start the workers.
            is_py_dataset = self._py_dataset is not None
            first = self._data[0] if is_py_dataset else next(iter(self._batches()))
            self._signature = keras.tree.map_structure(
                lambda x: tf.TensorSpec((None, *x.shape[1:]), x.dtype),
                self._preprocessed(first),
            )
        batches = tf.data.Dataset.from_generator(
            self.get_numpy_iterator, output_signature=self._signature
        )
        return batches.prefetch(tf.data.AUTOTUNE)

    @property
    def num_batches(self):
        if self._py_dataset is not None:
            return self._py_dataset.num_batches
        try:
            length = len(self._data)
        except TypeError:
            return None
        # The length of infinite datasets of grain
        return None if length >= sys.maxsize else length

    @property
    def batch_size(self):
        return None

    def on_epoch_begin(self):
        if self._py_dataset is not None:
            self._py_dataset.on_epoch_begin()

    def on_epoch_end(self):
        if self._py_dataset is not None:
            self._py_dataset.on_epoch_end()
