"""How large a model may be: as its files say, and as the machine can hold."""

import contextlib
import contextvars
import os
from pathlib import Path

import keras

from keras_softmoe.layer_cost import ITEMSIZE

# Two weights of int4 share a byte.
_WEIGHTS_PER_BYTE = 2
# Weights that a file need not hold: positions are resampled for larger images.
_RESAMPLED = 1 << 25

_FILE_BYTES = contextvars.ContextVar("file_bytes", default=None)
_WEIGHTS_FOLLOW = contextvars.ContextVar("weights_follow", default=False)


@contextlib.contextmanager
def weights_from(directory):
    """Scope in which the weights of all models come from the files of a preset.

    A configuration of a few bytes can claim more weights than any memory holds. A
    model that the files cannot fill is refused before it is built.

    Args:
        directory: str, the directory of a preset; a handle, or `None` for a preset
            without weights, says nothing.
    """
    size = None
    if directory is not None and Path(directory).is_dir():
        files = Path(directory).glob("model*.weights.h5")
        size = sum(file.stat().st_size for file in files if file.is_file())
    bytes_token = _FILE_BYTES.set(size)
    follow_token = _WEIGHTS_FOLLOW.set(directory is not None)
    try:
        yield
    finally:
        _FILE_BYTES.reset(bytes_token)
        _WEIGHTS_FOLLOW.reset(follow_token)


def weights_follow():
    """Whether a backbone is made for which a preset has all weights.

    (Those of a new head it has not.)
    """
    return _WEIGHTS_FOLLOW.get()


def check_size(layers, name):
    """Raise if a model is too large to be built.

    Args:
        layers: its layers, as `architecture` makes them.
        name: str or `None`, of the model.

    Raises:
        ValueError: if the model has more weights than the files that are read have
            place for, or weights that exceed the memory of this machine (unless they
            lie on accelerators, or are sharded over several machines).
    """
    try:
        found = layers.cost(1)
    except ValueError:
        # A custom router may not implement `capacity`. Other errors surface in `build`.
        return
    weights = found.parameters
    file_bytes = _FILE_BYTES.get()
    if file_bytes is not None and weights > _WEIGHTS_PER_BYTE * file_bytes + _RESAMPLED:
        raise ValueError(
            f"The configuration of {name!r} is that of a model with {weights:,} "
            f"weights, for which its files with {file_bytes:,} bytes have no place: a "
            "file is damaged, or belongs to another model. Restore it, or pass "
            "`load_weights=False`."
        )
    size, memory = ITEMSIZE["float16"] * weights, _memory()
    if memory is not None and size > memory:
        raise ValueError(
            f"The model {name!r} has {weights:,} weights, which even in half precision "
            f"take {size / 1e9:,.0f} GB. Received: a machine with "
            f"{memory / 1e9:,.0f} GB of memory. Make the model smaller, or build it "
            "under `distribution.expert_parallel` on several devices; "
            "`evaluation.cost` counts it without building it."
        )


def _memory():
    """Bytes of memory of this machine; `None` if the weights lie elsewhere."""
    if keras.distribution.distribution() is not None or _has_accelerator():
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        # Not on every system
        return None


def _has_accelerator():
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.default_backend() != "cpu"
    if backend == "torch":
        import torch

        return torch.get_default_device().type != "cpu" or torch.cuda.is_available()
    import tensorflow as tf

    return any(d.device_type != "CPU" for d in tf.config.list_physical_devices())
