"""A plain reader of the format, which trusts the files: what the library's must equal.

Written from the description of the format, without any of the checks.
"""

import glob

import ml_dtypes  # noqa: F401  (so that NumPy knows bfloat16)
import msgpack
import numpy as np


def read(prefix):
    """Dict from flat name to array."""
    with open(f"{prefix}.index", "rb") as file:
        index = msgpack.unpackb(file.read())
    leaves = dict(flatten(index["index"], ()))
    order = sorted(leaves)
    arrays = {}
    for path in order:
        aval, _, _ = msgpack.unpackb(leaves[path].data)
        shape, dtype, _, _ = msgpack.unpackb(aval)
        arrays["/".join(path)] = np.full(shape, 0, np.dtype(dtype))
    count = index["shard_count"]
    for path in sorted(glob.glob(f"{glob.escape(str(prefix))}.data-*-of-{count:05d}")):
        with open(path, "rb") as file:
            shard = msgpack.unpackb(file.read())
        for key, chunks in shard.items():
            if key == "__msgpack_array_chunk_a87ca2__":
                continue
            array = arrays["/".join(order[int(key)])]
            for pieces, box in chunks:
                box = tuple(
                    slice(*msgpack.unpackb(interval))
                    for interval in msgpack.unpackb(box.data)
                )
                flat = [from_bytes(array.dtype, piece.data) for piece in pieces]
                if flat:
                    array[box] = np.concatenate(flat).reshape(array[box].shape)
    return arrays


def flatten(tree, path):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value


def from_bytes(dtype, data):
    shape, name, content = msgpack.unpackb(data)
    assert np.dtype(name) == dtype
    return np.frombuffer(content, dtype).reshape(shape)
