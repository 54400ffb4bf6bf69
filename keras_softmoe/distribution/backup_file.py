"""The file of a backup: variables of a model, its optimizer and its metrics."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import h5py
import keras
import ml_dtypes
import numpy as np

FILE = "training.h5"

# Of the directories in which a file is written before it is put in place.
PREFIX = ".backup."


class Kept(NamedTuple):
    """What a file holds.

    Attributes:
        done: pair of int, see `write`.
        optimizer: str, its `optimizer_name`.
        datasets: dict from a kind, see `variables_of`, to a list of `h5py.Dataset`.
    """

    done: tuple
    optimizer: str
    datasets: dict


def variables_of(model):
    """Dict of the lists of variables that a backup keeps, by their kind."""
    optimizer = model.optimizer.variables if model.optimizer is not None else []
    return {
        "model": model.variables,
        "optimizer": optimizer,
        "metrics": model.metrics_variables,
    }


def optimizer_name(optimizer):
    """The class of an optimizer, and of one that it wraps: str."""
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    return name if inner is None else f"{name} of {optimizer_name(inner)}"


def of_variable(variable):
    """What a value has to have to be that of a variable: its shape and dtype."""
    return tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)


def of_dataset(dataset):
    """Shape and dtype of the variable that was written to a file."""
    return tuple(dataset.shape), str(dataset.attrs["dtype"])


def write(file, done, model):
    """Write all variables of a model to an open file.

    Args:
        file: `h5py.File`.
        done: pair of int, how many epochs are done, and batches of the next.
        model: `keras.Model`.
    """
    file.attrs["done"] = done
    file.attrs["optimizer"] = optimizer_name(model.optimizer)
    for kind, variables in variables_of(model).items():
        file.create_group(kind)
        for index, variable in enumerate(variables):
            _write(file, f"{kind}/{index}", variable)


def _write(file, name, variable):
    file[name] = keras.ops.convert_to_numpy(variable)
    file[name].attrs["dtype"] = keras.backend.standardize_dtype(variable.dtype)
    file[name].attrs["path"] = variable.path


def read(dataset):
    """The value of a variable in a file, an array."""
    value = np.asarray(dataset)
    if dataset.attrs["dtype"] == "bfloat16":
        value = value.view(ml_dtypes.bfloat16)
    return value


@contextlib.contextmanager
def opened(path):
    """Open a backup, and give what is in it as `Kept`.

    Raises:
        ValueError: if it is damaged or none.
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
            kept = Kept((epoch, batches), str(file.attrs["optimizer"]), datasets)
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"The backup in '{path}' cannot be read: it is damaged, or not a file "
                "of this callback. Remove it to start from the beginning, or pass "
                f"another directory. Received: {error}"
            ) from error
        yield kept


@contextlib.contextmanager
def replaced_file(path):
    """A directory to write a file to, which is put in place when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=PREFIX) as directory:
        yield directory
        os.replace(Path(directory, path.name), path)
