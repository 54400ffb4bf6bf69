"""Reader of the sharded format of the released V-MoE models."""

import collections.abc
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_softmoe.checkpoints.msgpack_stream import Stream
from keras_softmoe.checkpoints.opening import open_file
from keras_softmoe.checkpoints.vmoe_index import (
    NDARRAY,
    SLICE_ND,
    data_path,
    read_box,
    read_dtype,
    read_index,
)

# The key that marks a data file.
_MARKER = "__msgpack_array_chunk_a87ca2__"
# The writer splits chunks into pieces of at most this size, so a chunk has few.
_MAX_PIECE = 1 << 30
_MAX_PIECES = 4096


class LazyArray(NamedTuple):
    """Array that is not read yet.

    Attributes:
        shape: tuple of int.
        dtype: `np.dtype`.
        read: callable without arguments that returns the array.
    """

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
        settings: dict of arguments of a backbone that follow from the format or a file
            beside it, and not from the parameters.

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
        return sum(
            math.prod(array.shape) * array.dtype.itemsize
            for array in self._arrays.values()
        )

    def below(self, prefix: str) -> "Checkpoint":
        """Return the arrays whose names begin with `prefix`, without the prefix."""
        return Checkpoint(
            {
                name.removeprefix(prefix): array
                for name, array in self._arrays.items()
                if name.startswith(prefix)
            },
            self.settings,
        )

    def without(self, prefix: str) -> "Checkpoint":
        """Return all arrays except those whose names begin with `prefix`."""
        return Checkpoint(
            {
                name: array
                for name, array in self._arrays.items()
                if not name.startswith(prefix)
            },
            self.settings,
        )

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


def read_sharded(prefix):
    """Open a checkpoint in the sharded format, see `read_checkpoint`.

    All of it is checked before anything is returned: every array of the index must
    exist completely, once, and with its dtype. The memory for a damaged or hostile file
    is bounded by its size plus that of an index (at most 16 MiB, 131,072 names, 65,536
    slices). The format has no checksums: a flipped bit inside an array is a wrong
    value, which no reader can detect.

    Source: V-MoE's released code (format of its checkpoints, version 20220622).
    """
    prefix = os.fspath(prefix)
    entries, shard_count = read_index(prefix)
    # Data file -> number of the array -> its boxes according to the index
    promised = collections.defaultdict(lambda: collections.defaultdict(set))
    for number, entry in enumerate(entries):
        for box, shard in entry.chunks.items():
            promised[shard][number].add(box)
    places = [{} for _ in entries]
    for shard, boxes in sorted(promised.items()):
        path = data_path(prefix, shard, shard_count)
        with open_file(path) as (file, size):
            stream = Stream(file, size, path)
            for number, box, offset in _find_chunks(stream, entries, boxes):
                places[number][box] = (path, offset)
    return Checkpoint(
        {entry.name: _lazy(entry, places[i]) for i, entry in enumerate(entries)}
    )


def _lazy(entry, places):
    def read():
        return _read_array(entry, places)

    return LazyArray(entry.shape, entry.dtype, read)


def _find_chunks(stream, entries, promised):
    """Yield array number, box and offset of each chunk in a data file.

    Args:
        stream: `Stream` of the file.
        entries: list of `IndexEntry`.
        promised: dict from array number to the boxes that must be found.
    """
    seen = set()
    for _ in range(stream.map_length()):
        key = stream.value(str)
        if key in seen:
            raise stream.error(f"The key {key!r} comes twice")
        seen.add(key)
        if key == _MARKER:
            if not stream.value(bool):
                raise stream.error(f"{_MARKER} is not set")
            continue
        number = _array_number(stream, key, promised)
        missing = promised[number]
        for _ in range(stream.array_length()):
            stream.array_length(2)
            offset = stream.tell()
            nbytes = 0
            for piece in _pieces(stream, entries[number]):
                nbytes += piece
                stream.seek(stream.tell() + piece)
            end = stream.enter_extension(SLICE_ND)
            box = read_box(stream)
            stream.check_end(end)
            if box not in missing:
                raise stream.error(
                    f"The slice {box} of {entries[number].name!r} is not in the "
                    "index, or comes twice"
                )
            missing.remove(box)
            _check_nbytes(stream, entries[number], box, nbytes)
            yield number, box, offset
        if missing:
            raise stream.error(f"Slices of {entries[number].name!r} are missing")
    stream.check_end(stream.size)
    absent = [entries[i].name for i in promised if str(i) not in seen]
    if absent or _MARKER not in seen:
        raise stream.error(f"Arrays are missing: {', '.join(absent[:5]) or 'all'}")


def _array_number(stream, key, promised):
    # Plain decimal digits: `int` alone would take " 7", "٧" and "0_7" as well.
    if not (len(key) <= 6 and key.isascii() and key.isdigit() and key == str(int(key))):
        raise stream.error(f"{key[:40]!r} is no number of an array")
    if int(key) not in promised:
        raise stream.error(f"Array {key} is not in the index")
    return int(key)


def _check_nbytes(stream, entry, box, nbytes):
    extent = math.prod(stop - start for start, stop in box)
    if nbytes != extent * entry.dtype.itemsize:
        raise stream.error(
            f"The slice {box} of {entry.name!r} takes {extent} values of "
            f"{entry.dtype}, found {nbytes} bytes"
        )


def _pieces(stream, entry):
    """Enter the pieces of a chunk one by one and yield their sizes in bytes.

    The caller must move past the bytes of a piece before the next one.
    """
    count = stream.array_length()
    if count > _MAX_PIECES:
        raise stream.error(f"A slice of {entry.name!r} in {count} pieces")
    for _ in range(count):
        end = stream.enter_extension(NDARRAY)
        stream.array_length(3)
        stream.array_length(1)
        length = stream.value(int)
        if read_dtype(stream) != entry.dtype:
            raise stream.error(f"{entry.name!r} is of dtype {entry.dtype} by the index")
        data_end = stream.enter_binary()
        nbytes = data_end - stream.tell()
        if nbytes != length * entry.dtype.itemsize or not 0 < nbytes <= _MAX_PIECE:
            raise stream.error(
                f"A piece of {length} values of {entry.dtype} in {nbytes} bytes"
            )
        yield nbytes
        stream.check_end(data_end)
        stream.check_end(end)


def _read_array(entry, places):
    array = np.empty(entry.shape, entry.dtype)
    for box, (path, offset) in places.items():
        # With an ellipsis a scalar is a view as well.
        part = array[(*(slice(start, stop) for start, stop in box), ...)]
        chunk = part if part.flags.c_contiguous else np.empty(part.shape, entry.dtype)
        target = memoryview(chunk.reshape(-1).view(np.uint8))
        with open_file(path) as (file, size):
            stream = Stream(file, size, path)
            stream.seek(offset)
            position = 0
            for nbytes in _pieces(stream, entry):
                if position + nbytes > len(target):
                    raise stream.error("The file has changed")
                stream.copy_to(target[position : position + nbytes])
                position += nbytes
            if position < len(target):
                raise stream.error("The file has changed")
        if chunk is not part:
            part[...] = chunk
    return array
