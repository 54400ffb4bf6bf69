"""Reader of the safetensors format.

The package of that name is not used: it has no bfloat16 for NumPy, and it maps the file
into memory, so that truncating the file meanwhile crashes the process.
"""

import functools
import json
import math

import ml_dtypes
import numpy as np

from keras_softmoe.checkpoints.checkpoint import Checkpoint, LazyArray, open_file
from keras_softmoe.checks import is_whole_number

# A thousand arrays need about a tenth of it.
_MAX_HEADER = 1 << 20
_MAX_AXES = 8
_LENGTH = 8
_DTYPES = {
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(bool),
}


def read_safetensors(path):
    """Open a file in the safetensors format, see `read_checkpoint`.

    The header is checked first: every array must be complete at its offsets, and all of
    them together fill the file. Source: the format's documentation (version 0.8).
    """
    arrays, places = {}, []
    with _open(path) as (file, size):
        length = int.from_bytes(file.read(_LENGTH), "little")
        if not 2 <= length <= min(size - _LENGTH, _MAX_HEADER):
            raise ValueError(f"a header of {length} bytes in {size}")
        header = json.loads(file.read(length), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        header.pop("__metadata__", None)
        start = _LENGTH + length
        for name, entry in header.items():
            shape, dtype, begin, end = _checked_entry(name, entry)
            places.append((begin, end))
            read = functools.partial(_read, path, shape, dtype, start + begin)
            arrays[name] = LazyArray(shape, dtype, read)
        reached = 0
        for begin, end in sorted(places):
            if begin != reached:
                raise ValueError(f"arrays overlap or leave a gap at byte {begin}")
            reached = end
        if reached != size - start:
            raise ValueError(f"its arrays take {reached} of {size - start} bytes")
    return Checkpoint(arrays)


def _open(path):
    return open_file(path, "a safetensors file")


def _unique(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _checked_entry(name, entry):
    """Return shape, dtype, first byte and the byte after the last one of an array."""
    name = repr(name[:80])
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or set(entry) != keys:
        raise ValueError(f"{name} has not just {', '.join(sorted(keys))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{name} is of dtype {str(dtype)[:20]}")
    dtype = _DTYPES[dtype]
    for numbers, most in ((shape, _MAX_AXES), (offsets, 2)):
        if (
            not isinstance(numbers, list)
            or len(numbers) > most
            or not all(is_whole_number(number, 0) for number in numbers)
        ):
            raise ValueError(f"{name} has no shape or no place")
    nbytes = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"{name} does not take the bytes of its shape")
    return tuple(shape), dtype, *offsets


def _read(path, shape, dtype, start):
    with _open(path) as (file, _):
        file.seek(start)
        # An error if the file has become shorter
        content = file.read(math.prod(shape) * dtype.itemsize)
        return np.frombuffer(content, dtype).reshape(shape)
