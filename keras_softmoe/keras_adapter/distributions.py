"""Distributions of `keras.distribution`."""

import keras


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


def lay_out_each_batch(layout_of):
    """Let distributions choose the layout of every batch, instead of the first only.

    `layout_of` takes the shape of a process' rows and returns a `TensorLayout` or
    `None`. Would be replaced by: Keras calling `Distribution.get_data_layout` for each
    batch.
    """
    if keras.backend.backend() == "torch":
        from keras.src.backend.torch import trainer as module
    else:
        from keras.src.backend import distribution_lib as module

    distribute = module.distribute_data_input
    if getattr(distribute, "lays_out_each_batch", False):
        return

    # On JAX Keras also passes the name of the axis of the batch.
    def distribute_data_input(per_process_batch, layout, **others):
        if per_process_batch is not None:
            layout = layout_of(per_process_batch.shape) or layout
        return distribute(per_process_batch, layout, **others)

    distribute_data_input.lays_out_each_batch = True
    module.distribute_data_input = distribute_data_input


def share_datasets(share):
    """Let distributions choose the rows of a process, as before Keras 3.16.

    `share` takes a `tf.data.Dataset` and the distribution.
    Would be replaced by: `Distribution.distribute_dataset`, as Keras 3.15 has it.
    """
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    distribute = getattr(TFDatasetAdapter, "_distribute_dataset", None)
    if distribute is None or getattr(distribute, "asks_distributions", False):
        return

    def _distribute_dataset(self, dataset, distribution):
        shared = share(dataset, distribution)
        return distribute(self, dataset, distribution) if shared is None else shared

    _distribute_dataset.asks_distributions = True
    TFDatasetAdapter._distribute_dataset = _distribute_dataset
