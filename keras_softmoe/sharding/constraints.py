"""Layouts of tensors inside a layer under an active distribution.

A distribution of Keras may define layouts for tensors inside a layer by a path, as for
variables. Our layers use some, so that tokens are sent to the experts and not experts
to the tokens. Without a layout for the path these functions return their input.
"""

import math

import keras
from keras import ops


def is_distributed():
    """Return whether a distribution is active, so that tensors may be sharded.

    Some functions of `ops` then compute the same result in a way (`sharded=True`) that
    shows the compiler that no data of other devices are needed.
    """
    return keras.distribution.distribution() is not None


def constrain(tensor, path):
    """Return a tensor of a known shape, sharded by the active distribution.

    `path` finds its layout: the path of the layer, a slash and a name. An axis that is
    not divisible by its devices is replicated.
    """
    layout = layout_of(path)
    if layout is None or not all(isinstance(n, int) for n in tensor.shape):
        return tensor
    axes = [
        axis if size % num_shards(layout.device_mesh, axis) == 0 else None
        for size, axis in zip(tensor.shape, layout.axes, strict=True)
    ]
    if axes != list(layout.axes):
        layout = type(layout)(axes, layout.device_mesh)
    return keras.distribution.distribute_tensor(tensor, layout)


def replicate(tensor, axis, path):
    """Replicate a tensor that is sharded along an axis, by a sum instead of a gather.

    Each device adds its own shard to zeros. That moves twice the bytes of a gather, but
    an all-gather in a compiled step then always means that something is wrong. The
    tensor is small, of a known shape; `path` is that of the layout of the result.
    """
    if layout_of(path) is None:
        return tensor
    size = tensor.shape[axis]
    # A sum of products, not a matrix product, which rounds on some devices.
    shape = [1] * (len(tensor.shape) + 1)
    shape[axis] = shape[axis + 1] = size
    identity = ops.reshape(ops.eye(size, dtype=tensor.dtype), shape)
    tensor = ops.sum(ops.expand_dims(tensor, axis + 1) * identity, axis=axis)
    return constrain(tensor, path)


def layout_of(path):
    """Return the `TensorLayout` of the active distribution for a path, or `None`."""
    distribution = keras.distribution.distribution()
    return None if distribution is None else distribution.get_tensor_layout(path)


def num_shards(device_mesh, axis):
    """Return the number of shards along an axis of a tensor.

    `axis` is the axis of the mesh that shards it, a tuple of several, or `None`.
    """
    names = axis if isinstance(axis, tuple) else (axis,)
    sizes = dict(zip(device_mesh.axis_names, device_mesh.shape, strict=True))
    return math.prod(1 if name is None else sizes[name] for name in names)


def check_placement(method, argument):
    """Call a check of the active distribution; those of Keras have none.

    `"check_divides_experts"` takes a number of experts before they are built,
    `"check_layer"` a newly built layer, `"check_model"` a model before it runs.
    """
    check = getattr(keras.distribution.distribution(), method, None)
    if check is not None:
        check(argument)
