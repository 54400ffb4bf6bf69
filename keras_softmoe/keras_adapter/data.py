"""Data of `fit`: preprocessed batches of any iterable, and their distribution."""

import itertools
import sys

import keras
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter


def number_of(batches):
    """Return the number of batches, or `None`. Would be replaced by: `len` of data."""
    if isinstance(batches, BatchesOf):
        return batches.num_batches
    number = int(batches.cardinality())
    # -1 is without end.
    return None if number < -1 else number


class BatchesOf(DataAdapter):
    """Data adapter for preprocessed batches of any iterable.

    An iterator gives one epoch, or several of `steps_per_epoch`. `preprocess` maps a
    batch to a tuple of arrays. Would be replaced by: a hook of `keras.Model.fit`.
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


# === Distributions of `keras.distribution` ===


def backend_distributes():
    """Return whether Keras distributes tensors on the backend in use.

    Otherwise `keras.distribution` silently does nothing or fails.
    Would be replaced by: a public `keras.distribution.is_supported()`.
    """
    from keras.src.backend import distribution_lib

    # `None` for a backend without it
    return hasattr(distribution_lib, "distribute_tensor")


def layout_map_of(distribution):
    """Return the rules, or `None`. Would be replaced by: `ModelParallel.layout_map`."""
    return getattr(distribution, "_layout_map", None)


def ask_for_each_batch():
    """Let distributions choose the layout of each batch and the rows of a process.

    Asked are those with `is_asked_for_each_batch`: `get_data_layout` by the shape of a
    process' rows, and `distribute_dataset`. Keras asks for the layout of the first
    batch only, and from version 3.16 on it chooses the rows itself.
    Would be replaced by: Keras asking all distributions for each batch.
    """
    if keras.backend.backend() == "torch":
        from keras.src.backend.torch import trainer as module
    else:
        from keras.src.backend import distribution_lib as module

    distribute = module.distribute_data_input
    if getattr(distribute, "asks_distributions", False):
        return

    def is_asked(distribution):
        return getattr(distribution, "is_asked_for_each_batch", False)

    # On JAX Keras also passes the name of the axis of the batch.
    def distribute_data_input(per_process_batch, layout, **others):
        distribution = keras.distribution.distribution()
        if per_process_batch is not None and is_asked(distribution):
            layout = distribution.get_data_layout(per_process_batch.shape)
        return distribute(per_process_batch, layout, **others)

    distribute_data_input.asks_distributions = True
    module.distribute_data_input = distribute_data_input
    share = getattr(TFDatasetAdapter, "_distribute_dataset", None)

    def _distribute_dataset(self, dataset, distribution):
        if is_asked(distribution):
            return distribution.distribute_dataset(dataset)
        return share(self, dataset, distribution)

    if share is not None:
        TFDatasetAdapter._distribute_dataset = _distribute_dataset
