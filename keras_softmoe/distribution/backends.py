"""What the installed Keras can distribute, and what to do where it cannot."""

import keras

from keras_softmoe.keras_adapter import backend_distributes

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


def check_backend(what):
    """Raise unless Keras distributes models on the backend that is in use.

    Args:
        what: str, what was asked for, as the beginning of a sentence.

    Raises:
        NotImplementedError: with what can be done instead.
    """
    backend = keras.backend.backend()
    if backend == "jax" or (backend == "torch" and backend_distributes()):
        return
    raise NotImplementedError(
        f"{what} needs the JAX backend: Keras {keras.__version__} does not distribute "
        f"models on {backend!r}, it would run on one device without a word. Start "
        "Python with KERAS_BACKEND=jax; presets are the same on all backends. "
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
