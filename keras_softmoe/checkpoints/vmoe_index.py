"""Index of a sharded V-MoE checkpoint: its arrays and their data files."""

import collections
import io
import itertools
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from keras_softmoe.checkpoints.msgpack_stream import CheckpointError, Stream
from keras_softmoe.checkpoints.opening import open_file

# Limits far above the needs of a checkpoint (the index of 15 B parameters takes under a
# megabyte), which bound the cost of a hostile file.
MAX_INDEX_BYTES = 1 << 24
_MAX_NAMES = 1 << 17
_MAX_SLICES = 1 << 16
_MAX_CORNERS = 1 << 18
_MAX_DEPTH = 32
_MAX_NAME = 512
_MAX_DIMENSIONS = 8
# Names of files have five digits.
_MAX_SHARDS = 99_999

_VERSION = "20220622"

# Codes of msgpack's extension objects.
NDARRAY, SLICE_ND, _INDEX_ENTRY = 1, 6, 8

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{
        name: np.dtype(name)
        for name in (
            *("bool", "int8", "int16", "int32", "int64"),
            *("uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    },
}


class IndexEntry(NamedTuple):
    """Entry of the index for one array.

    Attributes:
        name: str, the path in the tree, joined by slashes.
        shape: tuple of int.
        dtype: `np.dtype`.
        chunks: dict from the box of a chunk, a tuple of `(start, stop)` for each axis,
            to the number of its data file.
    """

    name: str
    shape: tuple
    dtype: np.dtype
    chunks: dict


def read_index(prefix):
    """Read and check `PREFIX.index`.

    Args:
        prefix: str.

    Returns:
        list of `IndexEntry`, in the order in which data files number the arrays, and
        the number of data files.

    Raises:
        CheckpointError: if the file is missing, damaged, or over the limits above.
    """
    path = f"{prefix}.index"
    with open_file(path) as (file, size):
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(
                f"An index of at most {MAX_INDEX_BYTES} bytes is accepted. '{path}' "
                f"has {size}: it is no index of a V-MoE checkpoint."
            )
        data = file.read(size)
    stream = Stream(io.BytesIO(data), len(data), path)
    leaves, others = None, {}
    for _ in range(stream.map_length()):
        key = stream.value(str)
        if key in others or (key == "index" and leaves is not None):
            raise stream.error(f"The key {key!r} comes twice")
        if key == "index":
            leaves = _read_tree(stream)
        elif key in ("shard_count", "version"):
            others[key] = stream.value(int if key == "shard_count" else str)
        else:
            raise stream.error(f"Unknown key {key[:40]!r}")
    stream.check_end(stream.size)
    if "version" not in others and leaves is not None:
        raise CheckpointError(
            f"'{path}' has no version: it was written before 2022-06-22, when the "
            "order of the arrays was not kept in the file. The released checkpoints "
            "have been replaced since: fetch them again."
        )
    if leaves is None or others.get("version") != _VERSION:
        raise stream.error(
            f"Expected the keys 'index', 'shard_count' and 'version' = {_VERSION!r}, "
            f"found {others}"
        )
    shard_count = others.get("shard_count", 0)
    if not 1 <= shard_count <= _MAX_SHARDS:
        raise stream.error(f"Expected 1 to {_MAX_SHARDS} data files, not {shard_count}")
    entries = [leaves[path] for path in sorted(leaves)]
    for entry in entries:
        _check_chunks(stream, entry, shard_count)
    return entries, shard_count


def data_path(prefix, shard, shard_count):
    """Return the path of a data file, by its number."""
    return f"{prefix}.data-{shard:05d}-of-{shard_count:05d}"


def read_box(stream):
    """Read a slice and return its `(start, stop)` for each axis."""
    box = []
    dimensions = stream.array_length()
    if dimensions > _MAX_DIMENSIONS:
        raise stream.error(f"A slice of {dimensions} axes")
    for _ in range(dimensions):
        end = stream.enter_binary()
        stream.array_length(3)
        box.append((stream.value(int), stream.value(int)))
        stream.value(type(None))
        stream.check_end(end)
    return tuple(box)


def _read_tree(stream):
    """Return a dict from path to `IndexEntry` of all leaves below the next map."""
    leaves, num_names, num_slices = {}, 0, 0
    # Depth first, with an explicit stack: (path, keys to come, keys seen)
    pending = [((), stream.map_length(), set())]
    while pending:
        path, remaining, seen = pending.pop()
        if not remaining:
            continue
        key = _read_key(stream, path)
        if key in seen:
            raise stream.error(f"The name {'/'.join((*path, key))!r} comes twice")
        seen.add(key)
        num_names += 1
        pending.append((path, remaining - 1, seen))
        path = (*path, key)
        if num_names > _MAX_NAMES:
            raise stream.error(f"Over {_MAX_NAMES} names")
        if stream.at_map():
            if len(path) >= _MAX_DEPTH:
                raise stream.error(f"A tree of over {_MAX_DEPTH} levels")
            pending.append((path, stream.map_length(), set()))
            continue
        leaves[path] = _read_entry(stream, "/".join(path), _MAX_SLICES - num_slices)
        num_slices += len(leaves[path].chunks)
    return leaves


def _read_key(stream, path):
    key = stream.value(str)
    # Names are not used as paths of files here, but must be safe as such.
    if key in ("", ".", "..") or not key.isprintable() or set("/\\") & set(key):
        raise stream.error(f"{key[:40]!r} is no name of a parameter")
    if sum(map(len, path)) + len(path) + len(key) > _MAX_NAME:
        raise stream.error(f"A name of over {_MAX_NAME} characters")
    return key


def _read_entry(stream, name, max_slices):
    end = stream.enter_extension(_INDEX_ENTRY)
    stream.array_length(3)
    shape, dtype = _read_shape(stream)
    boxes = []
    for _ in range(stream.array_length()):
        box_end = stream.enter_binary()
        boxes.append(read_box(stream))
        stream.check_end(box_end)
        if len(boxes) > max_slices:
            raise stream.error(f"Over {_MAX_SLICES} slices of arrays")
    stream.array_length(len(boxes))
    shards = [stream.value(int) for _ in boxes]
    stream.check_end(end)
    chunks = dict(zip(boxes, shards, strict=True))
    if len(chunks) < len(boxes):
        raise stream.error(f"A slice of {name!r} comes twice")
    return IndexEntry(name, shape, dtype, chunks)


def _read_shape(stream):
    end = stream.enter_binary()
    stream.array_length(4)
    dimensions = stream.array_length()
    if dimensions > _MAX_DIMENSIONS:
        raise stream.error(f"An array of {dimensions} axes")
    shape = tuple(stream.value(int) for _ in range(dimensions))
    dtype = read_dtype(stream)
    # Whether JAX may change the dtype in an operation: not needed
    stream.value(bool)
    if stream.map_length():
        raise stream.error("Axes with names are not supported")
    stream.check_end(end)
    return shape, dtype


def read_dtype(stream):
    """Read the name of a dtype."""
    name = stream.value(str)
    if name not in DTYPES:
        raise stream.error(f"Unknown dtype {name[:40]!r}")
    return DTYPES[name]


def _check_chunks(stream, entry, shard_count):
    """Raise unless the chunks fill the array exactly, from existing files."""
    name, shape, _, chunks = entry
    if min(shape, default=0) < 0:
        raise stream.error(f"{name!r} has the shape {shape}")
    for box, shard in chunks.items():
        if not 0 <= shard < shard_count:
            raise stream.error(
                f"{name!r} lies in data file {shard}, of {shard_count} counted from 0"
            )
        fits = len(box) == len(shape) and all(
            0 <= start < stop <= size or start == stop == size == 0
            for (start, stop), size in zip(box, shape, strict=False)
        )
        if not fits:
            raise stream.error(f"The slice {box} is not one of {name!r}, {shape}")
    if not _tile(stream, shape, chunks):
        raise stream.error(
            f"The slices of {name!r} overlap, or leave a part of {shape} out"
        )


def _tile(stream, shape, boxes):
    """Return whether boxes fill an array exactly, without overlap.

    The number of boxes over a point is the sum of the steps up and down at the corners
    of boxes before it. So two sets of boxes cover the same points exactly if the steps
    at each corner have the same sums.
    """
    whole = tuple((0, size) for size in shape)
    if math.prod(shape) == 0:
        return list(boxes) == [whole]
    cut = [
        axis
        for axis, interval in enumerate(whole)
        if any(box[axis] != interval for box in boxes)
    ]
    if len(boxes) << len(cut) > _MAX_CORNERS:
        raise stream.error(f"An array in {len(boxes)} pieces along {len(cut)} axes")

    def steps(boxes):
        total = collections.Counter()
        for box in boxes:
            corners = (((box[axis][0], 1), (box[axis][1], -1)) for axis in cut)
            for corner in itertools.product(*corners):
                point = tuple(position for position, _ in corner)
                total[point] += math.prod(sign for _, sign in corner)
        return {point: step for point, step in total.items() if step}

    return steps(boxes) == steps([whole])
