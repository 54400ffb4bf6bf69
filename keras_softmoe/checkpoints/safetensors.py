"""Reader of the safetensors format.

The package of that name is not used: it has no bfloat16 for NumPy, and it maps the file
into memory, so that truncating the file meanwhile crashes the process.
"""

import json
import math

import ml_dtypes
import numpy as np

from keras_softmoe.checkpoints.msgpack_stream import CheckpointError
from keras_softmoe.checkpoints.opening import open_file
from keras_softmoe.checkpoints.vmoe import Checkpoint, LazyArray
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

    The header is checked before anything is returned: every array must be complete at
    its offsets, and all of them together fill the file. Nothing in the file can be
    executed, and reading it takes a multiple of the header, of at most 1 MiB, and of
    one array at a time.

    Source: the format's documentation (version 0.8).
    """
    with open_file(path) as (file, size):
        length = int.from_bytes(file.read(_LENGTH), "little")
        if not 2 <= length <= min(size - _LENGTH, _MAX_HEADER):
            raise _error(path, f"a header of {length} bytes in {size}")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise _error(path, f"its header is no JSON ({str(error)[:80]})") from error
    if not isinstance(header, dict):
        raise _error(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    start = _LENGTH + length
    arrays, places = {}, []
    for name, entry in header.items():
        shape, dtype, begin, end = _checked_entry(path, name, entry)
        places.append((begin, end))
        arrays[name] = LazyArray(
            shape, dtype, _reader(path, shape, dtype, start, begin)
        )
    reached = 0
    for begin, end in sorted(places):
        if begin != reached:
            raise _error(path, f"arrays overlap or leave a gap at byte {begin}")
        reached = end
    if reached != size - start:
        raise _error(path, f"its arrays take {reached} of {size - start} bytes")
    return Checkpoint(arrays)


def _unique(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _checked_entry(path, name, entry):
    """Return shape, dtype, first byte and the byte after the last one of an array."""
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or set(entry) != keys:
        raise _error(path, f"{name[:80]!r} has not just {', '.join(sorted(keys))}")
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _error(path, f"{name[:80]!r} is of dtype {str(dtype)[:20]}")
    dtype = _DTYPES[dtype]
    for numbers, most in ((shape, _MAX_AXES), (entry["data_offsets"], 2)):
        if (
            not isinstance(numbers, list)
            or len(numbers) > most
            or not all(is_whole_number(number, 0) for number in numbers)
        ):
            raise _error(path, f"{name[:80]!r} has no shape or no place")
    shape, offsets = tuple(shape), entry["data_offsets"]
    taken = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != taken:
        raise _error(path, f"{name[:80]!r} does not take the bytes of its shape")
    return shape, dtype, *offsets


def _reader(path, shape, dtype, start, begin):
    count = math.prod(shape)

    def read():
        with open_file(path) as (file, _):
            file.seek(start + begin)
            content = file.read(count * dtype.itemsize)
        if len(content) != count * dtype.itemsize:
            raise _error(path, "it has become shorter")
        return np.frombuffer(content, dtype).reshape(shape)

    return read


def _error(path, problem):
    return CheckpointError(
        f"'{path}' cannot be read as a safetensors file: it is damaged, truncated, or "
        f"something else. Fetch it again. Reason: {problem}."
    )
