"""Checks of the backend, the devices and the shape of a mesh."""

import keras

from keras_softmoe.keras_adapter.distributions import backend_distributes

_INSTEAD = {
    "tensorflow": (
        "On TensorFlow train replicas of the whole model, with "
        "`tf.distribute.MirroredStrategy` around building, compiling and `fit`"
    ),
    "torch": (
        "On PyTorch train replicas of the whole model, with "
        "`torch.nn.parallel.DistributedDataParallel` around it and a process per device"
    ),
}


def check_backend(feature):
    """Raise unless Keras distributes models on the backend in use.

    Args:
        feature: str, name of the feature, as the beginning of a sentence.

    Raises:
        NotImplementedError: with an alternative.
    """
    backend = keras.backend.backend()
    if backend == "jax" or (backend == "torch" and backend_distributes()):
        return
    raise NotImplementedError(
        f"{feature} needs the JAX backend: Keras {keras.__version__} does not "
        f"distribute models on {backend!r}, and would silently run on one device. "
        "Start Python with KERAS_BACKEND=jax; presets are the same on all backends. "
        f"{_INSTEAD.get(backend, 'Or train on one device')} (shown in the guide "
        f"`placing_experts`). Received: backend={backend!r}."
    )


def check_two_axes():
    """Raise unless the backend can shard an axis of a tensor by two axes of a mesh."""
    backend = keras.backend.backend()
    if backend != "jax":
        raise NotImplementedError(
            "A mesh of batch times experts shards the batch by both of its axes, which "
            f"Keras {keras.__version__} does on JAX only. Shard the experts over all "
            f"devices instead: leave `mesh_shape` out. Received: backend={backend!r}."
        )


def check_devices(devices):
    """Return the devices to use, a list of str. Defaults to all.

    Raises:
        ValueError: if the list is empty, or has a device twice.
    """
    if devices is None:
        return keras.distribution.list_devices()
    devices = [devices] if isinstance(devices, str) else list(devices)
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(
            "`devices` must be names of different devices, at least one. See "
            f"`keras.distribution.list_devices()`. Received: devices={devices}."
        )
    return devices


def check_mesh_shape(mesh_shape, num_devices):
    """Return the sizes (batch, experts) of a mesh of two axes.

    Raises:
        ValueError: if they are not two positive integers with that product.
    """
    try:
        batch, experts = mesh_shape
    except (TypeError, ValueError):
        batch = experts = 0
    if not all(type(n) is int for n in (batch, experts)):
        batch = experts = 0
    if batch < 1 or experts < 1 or batch * experts != num_devices:
        counts = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        shapes = ", ".join(f"({num_devices // n}, {n})" for n in counts)
        raise ValueError(
            "`mesh_shape` must be a pair (batch, experts) of positive integers whose "
            f"product is the number of devices, {num_devices}. Accepted: "
            f"{shapes}, or `None` for one axis. Received: mesh_shape={mesh_shape!r}."
        )
    return batch, experts
