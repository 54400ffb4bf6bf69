"""Arrays of a checkpoint, read on access, and errors of its files."""

import collections.abc
import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class CheckpointError(ValueError):
    """Error of a checkpoint that is missing, damaged or of another kind.

    Examples:
        >>> try:
        ...     ksm.converters.read_checkpoint("nothing/here")
        ... except ksm.converters.CheckpointError as error:
        ...     print(error)
    """


class LazyArray(NamedTuple):
    """Array that is not read yet; `read` is a callable that returns it."""

    shape: tuple
    dtype: np.dtype
    read: Any


class Checkpoint(collections.abc.Mapping):
    """Arrays of a checkpoint by name, each read on access.

    A mapping from flat name (`Encoder/encoder_norm/scale`) to NumPy array. Nothing is
    cached: a second access reads again. `dict(checkpoint)` reads all.

    Attributes:
        shapes: dict from name to shape, known without reading the arrays.
        dtypes: dict from name to dtype.
        settings: dict of a backbone's arguments that follow from the format or a file.

    Examples:
        >>> checkpoint = ksm.converters.read_checkpoint("vmoe_tiny/ckpt")
        >>> checkpoint["head/kernel"].shape
        (16, 10)
        >>> head = checkpoint.below("head/")
    """

    def __init__(self, arrays: Mapping, settings: Mapping | None = None):
        self._arrays = dict(arrays)
        self.settings = dict(settings or {})
        self.shapes = {name: array.shape for name, array in self._arrays.items()}
        self.dtypes = {name: array.dtype for name, array in self._arrays.items()}

    @property
    def nbytes(self) -> int:
        """Size of all arrays together, in bytes."""
        arrays = self._arrays.values()
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)

    def below(self, prefix: str) -> "Checkpoint":
        """Return the arrays whose names begin with `prefix`, without the prefix."""
        found = {n: a for n, a in self._arrays.items() if n.startswith(prefix)}
        found = {name.removeprefix(prefix): array for name, array in found.items()}
        return Checkpoint(found, self.settings)

    def without(self, prefix: str) -> "Checkpoint":
        """Return all arrays except those whose names begin with `prefix`."""
        found = {n: a for n, a in self._arrays.items() if not n.startswith(prefix)}
        return Checkpoint(found, self.settings)

    def __getitem__(self, name):
        return self._arrays[name].read()

    # That of `Mapping` would read the array.
    def __contains__(self, name):
        return name in self._arrays

    def __iter__(self):
        return iter(self._arrays)

    def __len__(self):
        return len(self._arrays)

    def __repr__(self):
        return f"<Checkpoint of {len(self)} arrays, {self.nbytes / 1e6:,.1f} MB>"


def without_repetition(pairs):
    """Return a dict of pairs of a name and content; raise if a name comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs) or not all(isinstance(key, str) for key in found):
        raise ValueError("a name comes twice, or is no text")
    return found


@contextlib.contextmanager
def open_file(path, kind):
    """Open a file on this machine, and yield it and its size.

    `kind` is a noun, such as "an .npz file", for the `CheckpointError` of any error.
    """
    try:
        # Reading a pipe or a device could block forever.
        if not os.path.isfile(path):
            raise FileNotFoundError("no such file")
        with open(path, "rb") as file:
            yield file, os.path.getsize(path)
    except CheckpointError:
        raise
    # Formats and their libraries fail in a dozen ways.
    except Exception as error:
        reason = str(error)[:300].removesuffix(".")
        if type(error) is not ValueError:
            reason = f"{type(error).__name__}: {reason}"
        raise CheckpointError(
            f"'{path}' cannot be read as {kind}: it is missing, damaged, truncated, or "
            f"something else; fetch it again. Reason: {reason}."
        ) from error
