"""The file of a backup, and the states of random generators in it."""

import contextlib
import random
from typing import NamedTuple

import h5py
import keras
import ml_dtypes
import numpy as np

_GENERATORS = ("epoch", "now")


class BackupFile(NamedTuple):
    """Content of the file of a backup.

    Attributes:
        done: pair of int, see `write`.
        optimizer: str, its `optimizer_name`.
        datasets: dict from a kind, see `variables_of`, to a list of `h5py.Dataset`.
        generators: pair of dicts, see `write`; `None` in older files.
    """

    done: tuple
    optimizer: str
    datasets: dict
    generators: tuple | None


def variables_of(model):
    """Return the variables of a backup, a dict of lists by kind."""
    optimizer = model.optimizer.variables if model.optimizer is not None else []
    return {
        "model": model.variables,
        "optimizer": optimizer,
        "metrics": model.metrics_variables,
    }


def optimizer_name(optimizer):
    """Return the class names of an optimizer and of the one it wraps, a str."""
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    return name if inner is None else f"{name} of {optimizer_name(inner)}"


def shape_and_dtype(variable):
    """Return shape and dtype of a variable, or of the variable in a dataset.

    Args:
        variable: `keras.Variable` or `h5py.Dataset`.
    """
    if isinstance(variable, h5py.Dataset):
        return tuple(variable.shape), str(variable.attrs["dtype"])
    return tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)


def write(file, done, model, generators):
    """Write all variables of a model to an open file.

    Args:
        file: `h5py.File`.
        done: pair of int: completed epochs, and completed batches of the next one.
        model: `keras.Model`.
        generators: pair of dicts, `generator_states` at the start of the epoch and now.
    """
    file.attrs["done"] = done
    for when, states in zip(_GENERATORS, generators, strict=True):
        for name, state in states.items():
            file[f"generators/{when}/{name}"] = state
    file.attrs["optimizer"] = optimizer_name(model.optimizer)
    for kind, variables in variables_of(model).items():
        file.create_group(kind)
        for index, variable in enumerate(variables):
            _write(file, f"{kind}/{index}", variable)


def _write(file, name, variable):
    file[name] = keras.ops.convert_to_numpy(variable)
    file[name].attrs["dtype"] = keras.backend.standardize_dtype(variable.dtype)
    file[name].attrs["path"] = variable.path
    file[name].attrs["trainable"] = variable.trainable


def read(dataset):
    """Return the value of a variable in a file, an array."""
    value = np.asarray(dataset)
    if dataset.attrs["dtype"] == "bfloat16":
        value = value.view(ml_dtypes.bfloat16)
    return value


@contextlib.contextmanager
def open_backup(path):
    """Open the file of a backup.

    Yields:
        `BackupFile`.

    Raises:
        ValueError: if it is damaged or not a backup.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(h5py.File(path))
            epoch, batches = (int(n) for n in file.attrs["done"])
            datasets = {
                kind: [file[f"{kind}/{index}"] for index in range(len(file[kind]))]
                for kind in ("model", "optimizer", "metrics")
            }
            for dataset in sum(datasets.values(), start=[]):
                if not {"dtype", "path"} <= set(dataset.attrs):
                    raise KeyError(f"{dataset.name} has no dtype or no path")
            generators = None
            if "generators" in file:
                generators = tuple(
                    {n: np.asarray(s) for n, s in file[f"generators/{when}"].items()}
                    for when in _GENERATORS
                )
            optimizer = str(file.attrs["optimizer"])
            backup = BackupFile((epoch, batches), optimizer, datasets, generators)
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"The backup in '{path}' cannot be read: it is damaged, or not a file "
                "of this callback. Remove it to start from the beginning, or pass "
                f"another directory. Received: {error}"
            ) from error
        yield backup


# === States of random generators ===


def generator_states():
    """Return the states of the generators of Python, of NumPy and of the backend.

    (JAX has none. Layers with a seed keep their state in a variable of the model.)

    Returns:
        dict from names to arrays.
    """
    version, words, gauss = random.getstate()
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    found = {
        "python": np.array([version, *words], "int64"),
        "python_gauss": np.array([np.nan if gauss is None else gauss]),
        "numpy": state["state"]["key"],
        "numpy_position": np.array([state["state"]["pos"], state["has_gauss"]]),
        "numpy_gauss": np.array([state["gauss"]]),
    }
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        found["torch"] = torch.get_rng_state().numpy()
        for index, cuda in enumerate(torch.cuda.get_rng_state_all()):
            found[f"torch_cuda_{index}"] = cuda.numpy()
    elif backend == "tensorflow":
        import tensorflow as tf

        found["tensorflow"] = tf.random.get_global_generator().state.numpy()
    return found


def set_generator_states(states):
    """Restore the states of generators from `generator_states`.

    States of another backend, and of missing accelerators, are ignored.

    Args:
        states: dict from names to arrays.
    """
    _set_host_states(states)
    set_backend_states(states)


def _set_host_states(states):
    version, *words = (int(word) for word in states["python"])
    gauss = float(states["python_gauss"][0])
    random.setstate((version, tuple(words), None if np.isnan(gauss) else gauss))
    position, has_gauss = (int(n) for n in states["numpy_position"])
    np.random.set_state(  # noqa: NPY002 (the one that users' code may draw from)
        {
            "bit_generator": "MT19937",
            "state": {"key": states["numpy"], "pos": position},
            "has_gauss": has_gauss,
            "gauss": float(states["numpy_gauss"][0]),
        }
    )


def set_backend_states(states):
    """Restore the states of the generators of the backend only."""
    backend = keras.backend.backend()
    if backend == "torch" and "torch" in states:
        import torch

        torch.set_rng_state(torch.from_numpy(states["torch"]))
        for index in range(torch.cuda.device_count()):
            if f"torch_cuda_{index}" in states:
                cuda = torch.from_numpy(states[f"torch_cuda_{index}"])
                torch.cuda.set_rng_state(cuda, index)
    elif backend == "tensorflow" and "tensorflow" in states:
        import tensorflow as tf

        tf.random.get_global_generator().state.assign(states["tensorflow"])
