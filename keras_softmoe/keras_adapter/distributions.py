"""Distributions of `keras.distribution`."""


def backend_distributes():
    """Return whether Keras distributes tensors on the backend in use.

    Otherwise `keras.distribution` silently does nothing or fails.
    Would be replaced by: a public `keras.distribution.is_supported()`.
    """
    from keras.src.backend import distribution_lib

    # `None` for a backend without it
    return hasattr(distribution_lib, "distribute_tensor")


def layout_map_of(distribution):
    """Return the `LayoutMap` of any `keras.distribution.ModelParallel`, else `None`.

    Would be replaced by: a public `ModelParallel.layout_map`.
    """
    return getattr(distribution, "_layout_map", None)


def lay_out_each_batch(layout_of):
    """Let distributions choose the layout of every batch, instead of the first only.

    On JAX Keras reuses the layout of the first batch of an epoch for all, which fails
    at the last one if its size is not divisible by the devices. No public method can
    intervene. Only the first call has an effect.
    Would be replaced by: Keras calling `Distribution.get_data_layout` for each batch.

    Args:
        layout_of: callable that takes the shape of a process' rows of a batch and
            returns a `keras.distribution.TensorLayout`, or `None` for that of Keras.
    """
    from keras.src.backend import distribution_lib

    distribute = distribution_lib.distribute_data_input
    if getattr(distribute, "lays_out_each_batch", False):
        return

    def distribute_data_input(per_process_batch, layout, batch_dim_name):
        if per_process_batch is not None:
            layout = layout_of(per_process_batch.shape) or layout
        return distribute(per_process_batch, layout, batch_dim_name)

    distribute_data_input.lays_out_each_batch = True
    distribution_lib.distribute_data_input = distribute_data_input
