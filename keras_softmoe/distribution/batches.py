"""Placement of the rows of a batch on devices and processes."""

import keras

from keras_softmoe.keras_adapter.distributions import (
    lay_out_each_batch,
    share_datasets,
)
from keras_softmoe.sharding.variables import process_index


class EachBatch:
    """Mixin of distributions that choose the layout of each batch by its size.

    A batch is sharded over the devices if they divide its rows. Any other batch,
    usually the last, is replicated: every device computes all of it, which is slower
    but gives the same result, and nothing is dropped or padded.

    Several processes share the batches of a `tf.data.Dataset`: each takes its rows of
    every batch. If each process already has its own rows, pass
    `auto_shard_dataset=False`. Then all processes must feed equally many rows in each
    step.
    """

    # The axes of the mesh that shard a batch.
    batch_axes = None

    # The number of rows of the next batch, if every process feeds all of them.
    _replicated_rows = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        lay_out_each_batch(_layout_of_batch)
        share_datasets(_share_of_process)

    @property
    def num_devices(self):
        """Int, number of devices over which a batch is sharded."""
        return int(self.device_mesh.devices.size)

    @property
    def process_id(self):
        """Int, the index of this process."""
        return process_index()

    def get_data_layout(self, data_shape):
        """Return the `TensorLayout` of data by the shape of this process' array."""
        others = [None] * (len(data_shape) - 1)
        replicated = self._layout([None] * len(data_shape), self.device_mesh)
        if not data_shape or data_shape[0] == self._replicated_rows:
            return replicated
        if data_shape[0] % (self.num_devices // self.num_processes) == 0:
            return self._layout([self.batch_axes, *others], self.device_mesh)
        if self.num_processes == 1:
            return replicated
        # Each device of a process gets all rows of the process.
        devices = self.device_mesh.devices.reshape(self.num_processes, -1)
        mesh = keras.distribution.DeviceMesh(
            devices.shape, ["process", "device"], devices
        )
        return self._layout(["process", *others], mesh)

    def distribute_dataset(self, dataset):
        """Return the share of this process of all batches.

        Args:
            dataset: `tf.data.Dataset` of whole batches, the same in all processes.

        Returns:
            An iterable like it. The dataset itself, for a single process or with
            `auto_shard_dataset=False`.
        """
        if self.num_processes == 1 or not self.auto_shard_dataset:
            return dataset
        return SharedDataset(dataset, self)

    def _layout(self, axes, mesh):
        raise NotImplementedError


class SharedDataset:
    """Dataset of one process' rows of each batch.

    Args:
        dataset: `tf.data.Dataset` of whole batches, the same in all processes.
        distribution: an `EachBatch`.
    """

    def __init__(self, dataset, distribution):
        self._dataset = dataset
        self._distribution = distribution

    def __iter__(self):
        count, index = self._distribution.num_processes, self._distribution.process_id
        for batch in self._dataset:
            rows = int(keras.tree.flatten(batch)[0].shape[0])
            share = rows // count
            if share * count == rows:
                self._distribution._replicated_rows = None
                start = index * share
                yield keras.tree.map_structure(
                    lambda x, start=start, share=share: x[start : start + share], batch
                )
            else:
                # Keras chooses the layout of a batch right after drawing it.
                self._distribution._replicated_rows = rows
                yield batch
        self._distribution._replicated_rows = None

    def __getattr__(self, name):
        # Cardinality and element specification are those of the whole dataset.
        return getattr(self._dataset, name)


def _layout_of_batch(shape):
    distribution = keras.distribution.distribution()
    is_ours = isinstance(distribution, EachBatch)
    return distribution.get_data_layout(shape) if is_ours else None


def _share_of_process(dataset, distribution):
    is_ours = isinstance(distribution, EachBatch)
    return distribution.distribute_dataset(dataset) if is_ours else None
