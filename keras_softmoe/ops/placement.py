"""Where tensors lie while a model is spread over devices.

A distribution of `keras.distribution` may name layouts for tensors inside a layer by a
path, as it names those of variables. The layers of this library ask for some, so that
tokens travel to the experts and not the experts to the tokens. Without a distribution,
or where it names no layout, nothing here does anything.
"""

import keras
from keras import ops


def is_distributed():
    """Whether a distribution is active, so that axes of tensors may be cut.

    Some operations are then done in another way, with the same result: one of which the
    compiler knows that it needs nothing from other devices.
    """
    return keras.distribution.distribution() is not None


def constrain(tensor, path):
    """Lay a tensor out over the devices as the active distribution says.

    Args:
        tensor: tensor of a known shape.
        path: str, the path of the layer, a slash and the name of the tensor. The layout
            of this path is that of the tensor. An axis that the devices do not divide
            is kept whole.

    Returns:
        The tensor.
    """
    layout = layout_of(path)
    if layout is None or not all(isinstance(n, int) for n in tensor.shape):
        return tensor
    axes = [
        axis if size % num_parts(layout.device_mesh, axis) == 0 else None
        for size, axis in zip(tensor.shape, layout.axes, strict=True)
    ]
    if axes != list(layout.axes):
        layout = type(layout)(axes, layout.device_mesh)
    return keras.distribution.distribute_tensor(tensor, layout)


def assemble(tensor, axis, path):
    """Put a tensor together whose axis is cut, by a sum and not by a gather.

    Each device adds its own part to zeros. For small tensors only: it moves twice the
    bytes of a gather. But it is an all-reduce, like the sums of gradients, and so an
    all-gather in a compiled step always means that something is wrong.

    Args:
        tensor: tensor of a known shape.
        axis: int, the axis that is cut, not a negative one.
        path: str, the path for which the active distribution names the layout of the
            whole.

    Returns:
        A tensor equal to the one given.
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
    """The `TensorLayout` that the active distribution names for a path, or `None`."""
    distribution = keras.distribution.distribution()
    return None if distribution is None else distribution.get_tensor_layout(path)


def num_parts(device_mesh, axis):
    """Into how many parts an axis of a mesh cuts; several cut into the product.

    Args:
        device_mesh: `keras.distribution.DeviceMesh`.
        axis: str, tuple of str or `None`.
    """
    names = axis if isinstance(axis, tuple) else (axis,)
    sizes = dict(zip(device_mesh.axis_names, device_mesh.shape, strict=True))
    parts = 1
    for name in names:
        parts *= 1 if name is None else sizes[name]
    return parts


def check_num_experts(num_experts):
    """Let the active distribution refuse a number of experts, before they are made."""
    _ask("check_num_experts", num_experts)


def report_built(layer):
    """Let the active distribution look at the variables of a layer just built."""
    _ask("check_layer", layer)


def report_model(model):
    """Let the active distribution look at a model that is about to be used."""
    _ask("check_model", model)


def _ask(method, argument):
    # Only those of this library have such methods.
    check = getattr(keras.distribution.distribution(), method, None)
    if check is not None:
        check(argument)
