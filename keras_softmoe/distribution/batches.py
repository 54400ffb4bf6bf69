"""Which rows of a batch go to which device and come from which process."""

import keras


class EachBatch:
    """Mixin of distributions that lay out each batch by its own size.

    A batch whose rows the devices divide is cut among them. One that they do not, most
    often the last, is given to all of them as a whole and computed by each: slower, but
    what comes out is the same, and nothing is dropped or padded.

    With several processes a `tf.data.Dataset` of whole batches is shared out: each
    process takes its rows of every batch. Where each process has rows of its own
    already, pass `auto_shard_dataset=False`. Then all processes must feed equally many
    rows in each step.
    """

    # The axes of the mesh that cut a batch.
    batch_axes = None

    # Rows of the batch to come, where all processes are about to feed all of them.
    _rows_for_all = None

    @property
    def num_devices(self):
        """Int, the devices among which a batch is divided."""
        return int(self.device_mesh.devices.size)

    def get_data_layout(self, data_shape):
        """The `TensorLayout` of data of which this process has an array of a shape."""
        others = [None] * (len(data_shape) - 1)
        whole = self._layout([None] * len(data_shape), self.device_mesh)
        if not data_shape or data_shape[0] == self._rows_for_all:
            return whole
        if data_shape[0] % (self.num_devices // self.num_processes) == 0:
            return self._layout([self.batch_axes, *others], self.device_mesh)
        if self.num_processes == 1:
            return whole
        # Each device of a process is given all the rows of the process.
        devices = self.device_mesh.devices.reshape(self.num_processes, -1)
        mesh = keras.distribution.DeviceMesh(
            devices.shape, ["process", "device"], devices
        )
        return self._layout(["process", *others], mesh)

    def distribute_dataset(self, dataset):
        """The batches of which this process feeds its share.

        Args:
            dataset: `tf.data.Dataset` of whole batches, the same in all processes.

        Returns:
            An iterable like it. The dataset itself, if there is one process only or
            `auto_shard_dataset` is `False`.
        """
        if self.num_processes == 1 or not self.auto_shard_dataset:
            return dataset
        return SharedDataset(dataset, self)

    def _layout(self, axes, mesh):
        raise NotImplementedError


class SharedDataset:
    """The rows of each batch of a dataset that one of several processes feeds.

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
                self._distribution._rows_for_all = None
                start = index * share
                yield keras.tree.map_structure(
                    lambda x, start=start, share=share: x[start : start + share], batch
                )
            else:
                # Keras lays out a batch right after it has asked for it.
                self._distribution._rows_for_all = rows
                yield batch
        self._distribution._rows_for_all = None

    def __getattr__(self, name):
        # Cardinality and element specification are those of the whole.
        return getattr(self._dataset, name)


def lay_out_each_batch():
    """Let `EachBatch` distributions see the size of every batch, not of the first only.

    On JAX Keras asks a distribution for the layout of the first batch of an epoch and
    keeps it, which fails at the last one if the devices do not divide that. There is no
    public place between the two. For all other distributions nothing changes.
    """
    from keras.src.backend import distribution_lib

    keras_function = distribution_lib.distribute_data_input
    if getattr(keras_function, "lays_out_each_batch", False):
        return

    def distribute_data_input(per_process_batch, layout, batch_dim_name):
        distribution = keras.distribution.distribution()
        if isinstance(distribution, EachBatch) and per_process_batch is not None:
            layout = distribution.get_data_layout(per_process_batch.shape)
        return keras_function(per_process_batch, layout, batch_dim_name)

    distribute_data_input.lays_out_each_batch = True
    distribution_lib.distribute_data_input = distribute_data_input
