"""A writer of the sharded format of the released V-MoE checkpoints.

The library only reads it. `checkpoint_objects` gives what the files hold, so that tests
can spoil it, and `write_objects` writes it down; `write_checkpoint` does both.
"""

import itertools

import msgpack
import numpy as np

VERSION = "20220622"
MARKER = "__msgpack_array_chunk_a87ca2__"

NDARRAY, SLICE_ND, INDEX_ENTRY = 1, 6, 8


def write_checkpoint(prefix, arrays, num_shards=1, cuts=None, piece_bytes=1 << 30):
    """Write arrays as `PREFIX.index` and `PREFIX.data-00000-of-...`.

    Args:
        prefix: str or path.
        arrays: dict from flat name (components joined by slashes) to NumPy array.
        num_shards: int, number of data files.
        cuts: dict from name to the positions where the array is cut, a tuple of
            positions for each axis.
        piece_bytes: int, size over which a chunk is written in several pieces.
    """
    index, shards = checkpoint_objects(arrays, num_shards, cuts, piece_bytes)
    write_objects(prefix, index, shards)


def checkpoint_objects(arrays, num_shards=1, cuts=None, piece_bytes=1 << 30):
    """The index, and a list of the contents of the data files."""
    shards = [{MARKER: True} for _ in range(num_shards)]
    used_bytes = [0] * num_shards
    tree = {}
    # Numbered by a walk that takes the keys of each level in the order of strings.
    names = sorted(arrays, key=lambda name: name.split("/"))
    for number, name in enumerate(names):
        array = np.asarray(arrays[name])
        boxes = boxes_of(array.shape, (cuts or {}).get(name))
        places = []
        for box in boxes:
            chunk = array[tuple(slice(*interval) for interval in box)]
            shard = used_bytes.index(min(used_bytes))
            used_bytes[shard] += chunk.nbytes
            places.append(shard)
            shards[shard].setdefault(str(number), []).append(
                [pieces(chunk, piece_bytes), msgpack.ExtType(SLICE_ND, pack_box(box))]
            )
        *parents, leaf = name.split("/")
        level = tree
        for parent in parents:
            level = level.setdefault(parent, {})
        level[leaf] = index_entry(array.shape, array.dtype.name, boxes, places)
    return {"shard_count": num_shards, "index": tree, "version": VERSION}, shards


def write_objects(prefix, index, shards):
    """Write the index and the contents of the data files as they are."""
    for name, content in file_contents(index, shards).items():
        with open(f"{prefix}{name}", "wb") as file:
            file.write(content)


def file_contents(index, shards):
    """Dict from the end of a file's name to its bytes."""
    names = [f".data-{i:05d}-of-{len(shards):05d}" for i in range(len(shards))]
    contents = {".index": msgpack.packb(index)}
    return contents | dict(zip(names, map(msgpack.packb, shards), strict=True))


def boxes_of(shape, positions=None):
    """All boxes that come from cutting an array, each `(start, stop)` per axis."""
    positions = positions or ((),) * len(shape)
    intervals = [
        list(itertools.pairwise([0, *sorted(cuts), size]))
        for size, cuts in zip(shape, positions, strict=True)
    ]
    return list(itertools.product(*intervals))


def pieces(chunk, piece_bytes):
    """A chunk as extension objects of flat arrays."""
    flat = np.ascontiguousarray(chunk).reshape(-1)
    step = max(1, piece_bytes // flat.dtype.itemsize)
    return [piece(flat[i : i + step]) for i in range(0, flat.size, step)]


def piece(array, shape=None, dtype=None):
    content = [list(shape or array.shape), dtype or array.dtype.name, array.tobytes()]
    return msgpack.ExtType(NDARRAY, msgpack.packb(content))


def pack_box(box, step=None):
    return msgpack.packb([msgpack.packb([*interval, step]) for interval in box])


def index_entry(shape, dtype, boxes, places):
    """The leaf of the index for one array."""
    content = [
        msgpack.packb([list(shape), dtype, False, {}]),
        [pack_box(box) for box in boxes],
        list(places),
    ]
    return msgpack.ExtType(INDEX_ENTRY, msgpack.packb(content))
