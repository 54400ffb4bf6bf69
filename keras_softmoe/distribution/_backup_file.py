"""The file of a backup: variables of a model, its optimizer and its metrics."""

import contextlib
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
