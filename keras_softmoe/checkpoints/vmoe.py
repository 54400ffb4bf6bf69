"""Reader of the sharded format of the released V-MoE models.

`PREFIX.index` holds a tree of arrays: the shape and dtype of each, and the data file of
each of its slices. `PREFIX.data-00000-of-00002` and so on hold the slices in pieces.
All of it is msgpack, nested: objects contain packed objects.
"""

import functools
import math
import os
from typing import NamedTuple

import ml_dtypes
import msgpack
import numpy as np

from keras_softmoe.checkpoints import checkpoint as base
from keras_softmoe.checkpoints.checkpoint import Checkpoint, LazyArray
from keras_softmoe.checks import is_whole_number

# Limits far above the needs of a checkpoint (the index of 15 B parameters takes under a
# megabyte), which bound the cost of a hostile file. `msgpack` allocates an array when
# it reads its header, on each of up to 1,024 levels.
MAX_INDEX_BYTES = 1 << 22
MAX_SLICES = 1 << 12
_MAX_NAMES = 1 << 12
_MAX_NAME = 512
_MAX_DEPTH = 32
_MAX_AXES = 8
# Names of files have five digits.
_MAX_SHARDS = 99_999
# The writer splits slices into pieces of at most this size.
_MAX_PIECE = 1 << 30

_VERSION = "20220622"
# The key that marks a data file
_MARKER = "__msgpack_array_chunk_a87ca2__"
# Codes of msgpack's extension objects
_NDARRAY, _SLICE, _INDEX_ENTRY = 1, 6, 8

_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("uint64", "float16", "float32", "float64", "complex64", "complex128"),
)
_DTYPES = {name: np.dtype(name) for name in _NAMES}
_DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


_open = functools.partial(
    base.open_file,
    kind="a part of a V-MoE checkpoint, which is PREFIX.index and all of "
    "PREFIX.data-00000-of-... in one place",
)


class _Entry(NamedTuple):
    """Entry of the index for one array."""

    # Path in the tree, joined by slashes
    name: str
    shape: tuple
    dtype: np.dtype
    # Box of a slice, a tuple of `(start, stop)` for each axis -> number of a data file
    shards: dict


def read_sharded(prefix):
    """Open a checkpoint in V-MoE's sharded format (version 20220622).

    Every array of the index must exist completely, once, with its dtype. Memory is
    bounded by a multiple of the file.
    """
    prefix = os.fspath(prefix)
    entries, shard_count = read_index(prefix)
    # For each array, box -> (path, offset)
    places = [{} for _ in entries]
    for shard in sorted({shard for e in entries for shard in e.shards.values()}):
        path = data_path(prefix, shard, shard_count)
        with _open(path) as (file, size):
            for number, box, offset in _find_slices(file, size, entries):
                entry = entries[number]
                if entry.shards.get(box) != shard or box in places[number]:
                    raise ValueError(
                        f"the slice {box} of {entry.name!r} is not in the index, or "
                        "comes twice"
                    )
                places[number][box] = path, offset
            for entry, found in zip(entries, places, strict=True):
                if any(s == shard and b not in found for b, s in entry.shards.items()):
                    raise ValueError(f"slices of {entry.name!r} are missing")
    arrays = {}
    for entry, found in zip(entries, places, strict=True):
        read = functools.partial(_read_array, entry, found)
        arrays[entry.name] = LazyArray(entry.shape, entry.dtype, read)
    return Checkpoint(arrays)


def data_path(prefix, shard, shard_count):
    """Return the path of a data file, by its number."""
    return f"{prefix}.data-{shard:05d}-of-{shard_count:05d}"


def read_index(prefix):
    """Return the entries of `PREFIX.index`, in their order, and the number of files."""
    with _open(f"{prefix}.index") as (file, size):
        if size > MAX_INDEX_BYTES:
            raise ValueError(f"{size} bytes, where an index has at most 4 MiB")
        root = _unpack(file.read())
        if isinstance(root, dict) and "index" in root and "version" not in root:
            raise ValueError(
                "it has no version: it was written before 2022-06-22, when the order "
                "of the arrays was not kept. The released checkpoints have been "
                "replaced since"
            )
        match root:
            case {
                "version": version,
                "shard_count": shards,
                "index": dict(tree),
                **more,
            }:
                if version != _VERSION or more or not is_whole_number(shards):
                    raise ValueError(f"version {version!r}, {shards} files, {[*more]}")
            case _:
                raise ValueError("no map with version, shard_count and index")
        if shards > _MAX_SHARDS:
            raise ValueError(f"1 to {_MAX_SHARDS} data files, not {shards}")
        leaves = dict(_leaves(tree))
        return [_entry(path, leaves[path], shards) for path in sorted(leaves)], shards


def _leaves(tree, path=()):
    """Yield path and content of each leaf of a tree."""
    if len(path) >= _MAX_DEPTH:
        raise ValueError(f"a tree of over {_MAX_DEPTH} levels")
    for key, value in tree.items():
        below = (*path, key)
        # Names are not used as paths of files here, but must be safe as such.
        if key in ("", ".", "..") or not key.isprintable() or set("/\\") & set(key):
            raise ValueError(f"{key[:40]!r} is no name of a parameter")
        if len("/".join(below)) > _MAX_NAME:
            raise ValueError(f"a name of over {_MAX_NAME} characters")
        if isinstance(value, dict):
            yield from _leaves(value, below)
        else:
            yield below, value


def _entry(path, leaf, shard_count):
    """Return the `_Entry` of a leaf, whose slices must fill the array exactly."""
    name = "/".join(path)
    about, boxes, shards = _unpack(_inside(leaf, _INDEX_ENTRY))
    # Third is whether JAX may change the dtype in operations, fourth names of axes.
    shape, dtype, _, axes = _unpack(about)
    shape = tuple(shape)
    sizes = len(shape) <= _MAX_AXES and all(is_whole_number(n, 0) for n in shape)
    if not sizes or dtype not in _DTYPES or axes:
        raise ValueError(
            f"{name!r} has the shape {str(shape)[:80]}, dtype {str(dtype)[:20]!r} and "
            f"names {str(axes)[:40]}"
        )
    boxes = [_read_box(box) for box in boxes]
    entry = _Entry(name, shape, _DTYPES[dtype], dict(zip(boxes, shards, strict=True)))
    if len(entry.shards) < len(boxes):
        raise ValueError(f"a slice of {name!r} comes twice")
    for box, shard in entry.shards.items():
        inside = len(box) == len(shape) and all(
            start < stop <= n or start == stop == n == 0
            for (start, stop), n in zip(box, shape, strict=True)
        )
        if not inside or not is_whole_number(shard, 0) or shard >= shard_count:
            raise ValueError(
                f"the slice {box} in data file {shard} of {shard_count} is not one of "
                f"{name!r}, {shape}"
            )
    if not _fill(shape, boxes):
        raise ValueError(
            f"the slices of {name!r} overlap, or leave a part of {shape} out"
        )
    return entry


def _fill(shape, boxes):
    """Return whether boxes inside an array fill it exactly, without overlap."""
    if 0 in shape:
        return boxes == [tuple((0, size) for size in shape)]
    if sum(map(_volume, boxes)) != math.prod(shape):
        return False
    # (N, axes, 2)
    bounds = np.array(boxes, "int64").reshape(len(boxes), len(shape), 2)
    overlap = np.ones((len(boxes), len(boxes)), bool)
    for axis in range(len(shape)):
        starts, stops = bounds[:, axis, 0], bounds[:, axis, 1]
        overlap &= (starts[:, None] < stops) & (starts < stops[:, None])
    # Each with itself only
    return np.count_nonzero(overlap) == len(boxes)


def _volume(box):
    return math.prod(stop - start for start, stop in box)


def _find_slices(file, size, entries):
    """Yield array number, box and offset of each slice in a data file."""
    unpacker = _unpacker(file)
    numbers = {str(number): number for number in range(len(entries))}
    is_marked = False
    for _ in range(unpacker.read_map_header()):
        key = unpacker.unpack()
        if key == _MARKER:
            is_marked = unpacker.unpack() is True
            continue
        if key not in numbers:
            raise ValueError(f"the array {str(key)[:40]!r} is not in the index")
        number = numbers[key]
        entry = entries[number]
        for _ in range(unpacker.read_array_header()):
            if unpacker.read_array_header() != 2:
                raise ValueError(f"a slice of {entry.name!r} is no pair")
            offset = unpacker.tell()
            nbytes = sum(map(len, _pieces(unpacker, entry)))
            box = _read_box(_inside(unpacker.unpack(), _SLICE))
            if nbytes != _volume(box) * entry.dtype.itemsize:
                raise ValueError(
                    f"the slice {box} of {entry.name!r} takes {_volume(box)} values of "
                    f"{entry.dtype}, found {nbytes} bytes"
                )
            yield number, box, offset
    if not is_marked or unpacker.tell() != size:
        raise ValueError(f"no map with {_MARKER} and nothing after it")


def _pieces(unpacker, entry):
    """Yield the bytes of each piece of a slice."""
    for _ in range(unpacker.read_array_header()):
        match _unpack(_inside(unpacker.unpack(), _NDARRAY)):
            case [[int(length)], entry.dtype.name, bytes(content)] if (
                0 < len(content) == length * entry.dtype.itemsize
            ):
                yield content
            case _:
                raise ValueError(
                    f"a piece of {entry.name!r} is no flat array of {entry.dtype}"
                )


def _read_array(entry, places):
    array = np.empty(entry.shape, entry.dtype)
    for box, (path, offset) in places.items():
        # With an ellipsis a scalar is a view as well.
        part = array[(*(slice(start, stop) for start, stop in box), ...)]
        with _open(path) as (file, _):
            file.seek(offset)
            content = b"".join(_pieces(_unpacker(file), entry))
            part[...] = np.frombuffer(content, entry.dtype).reshape(part.shape)
    return array


def _unpacker(file):
    """Return an `Unpacker` for values that are no arrays or maps."""
    return msgpack.Unpacker(
        file,
        max_buffer_size=_MAX_PIECE + (1 << 21),
        max_ext_len=_MAX_PIECE + (1 << 12),
        max_str_len=_MAX_NAME,
        max_array_len=0,
        max_map_len=0,
    )


def _unpack(data):
    """Return a packed object."""
    return msgpack.unpackb(
        data,
        object_pairs_hook=base.without_repetition,
        max_str_len=_MAX_NAME,
        max_array_len=MAX_SLICES,
        max_map_len=_MAX_NAMES,
    )


def _inside(value, code):
    """Return the content of an extension object."""
    if not isinstance(value, msgpack.ExtType) or value.code != code:
        raise ValueError(f"no extension object of type {code} where one is expected")
    return value.data


def _read_box(data):
    """Return the `(start, stop)` for each axis of a packed slice."""
    box = [_unpack(interval) for interval in _unpack(data)]
    for start, stop, step in box:
        if not is_whole_number(start, 0) or not is_whole_number(stop, 0) or step:
            raise ValueError(f"a slice from {start} to {stop} in steps of {step}")
    return tuple((start, stop) for start, stop, _ in box)
