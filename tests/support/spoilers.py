"""Ways to spoil a checkpoint, and what the reader says to each."""

import msgpack
import numpy as np

from keras_softmoe.checkpoints import vmoe
from tests.support import checkpoint_writer as writer

ARRAYS = {
    "Encoder/block_0/kernel": np.arange(24, dtype="f4").reshape(4, 6),
    "Encoder/block_0/bias": np.arange(6, dtype="f4"),
    "head": np.arange(8, dtype="i4"),
    "scale": np.array(2.0, "f4"),
}
CUTS = {"Encoder/block_0/kernel": ((1, 3), (2,)), "head": ((4,),)}
# Numbers of the arrays, as the data files use them
BIAS, KERNEL, HEAD, SCALE = "0", "1", "2", "3"


class Files:
    """What the files hold, to be spoiled: `index`, `tree` and `shards`."""

    def __init__(self):
        self.index, self.shards = writer.checkpoint_objects(ARRAYS, 2, CUTS)
        self.tree = self.index["index"]

    def leaf(self, name="head", shape=(8,), dtype="int32", boxes=None, places=(0, 1)):
        """Replace a leaf of the index."""
        boxes = [((0, 4),), ((4, 8),)] if boxes is None else boxes
        self.tree[name] = writer.index_entry(shape, dtype, boxes, places)

    def shard_of(self, number):
        return next(shard for shard in self.shards if number in shard)

    def write(self, prefix):
        writer.write_objects(prefix, self.index, self.shards)

    def set_leaf(self, data, code=writer.INDEX_ENTRY):
        self.tree["head"] = msgpack.ExtType(code, data)

    def chunk(self, number):
        """First chunk of an array in the data files: its pieces, and its slice."""
        return self.shard_of(number)[number][0]


def deep_tree(files):
    for _ in range(200):
        files.tree["a"] = files.tree = {}
    files.leaf()


def slice_with_a_step(files):
    leaf = msgpack.unpackb(files.tree["head"].data)
    box = writer.pack_box(((0, 8),), step=2)
    files.set_leaf(msgpack.packb([leaf[0], [box], [0]]))


def too_fine_a_grid(files):
    shape = (8, 8, 8, 8, 3)
    boxes = writer.boxes_of(shape, [range(1, size) for size in shape])
    files.leaf(shape=shape, boxes=boxes, places=[0] * len(boxes))


def named_axes(files):
    leaf = msgpack.unpackb(files.tree["head"].data)
    leaf[0] = msgpack.packb([[8], "int32", False, {"batch": 8}])
    files.set_leaf(msgpack.packb(leaf))


def _with_head(change):
    """Change the packed leaf of an array in the index."""
    return lambda files: files.set_leaf(change(files.tree["head"].data))


def _index(**keys):
    return lambda files: files.index.update(keys)


def _leaf(**arguments):
    return lambda files: files.leaf(**arguments)


def _boxes(*boxes, **arguments):
    return _leaf(boxes=list(boxes), places=[0] * len(boxes), **arguments)


def _renamed(key):
    """Give an array in a data file another number."""

    def rename(files):
        shard = files.shard_of(SCALE)
        shard[key] = shard.pop(SCALE)

    return rename


def _pieces(*arrays, **claims):
    """Replace the pieces of an array of 6 float32 numbers."""
    pieces = [writer.piece(array, **claims) for array in arrays]
    return lambda files: files.chunk(BIAS).__setitem__(0, pieces)


_FLOATS = np.zeros(6, "f4")
_MANY = [((i, i + 1),) for i in range(vmoe.MAX_SLICES + 1)]
_NO_FLAT = "no flat array of float32"
_OVERLAP = "overlap, or leave a part"
_NO_MARKER = f"no map with {writer.MARKER}"

# Name -> what it does to the files, and what the error says
SPOILERS = {
    "no version": (
        lambda files: files.index.pop("version"),
        "no version.*2022-06-22.*replaced since",
    ),
    "other version": (_index(version="20990101"), "version '20990101'"),
    "no index": (
        lambda files: files.index.pop("index"),
        "no map with version, shard_count and index",
    ),
    "unknown key": (_index(path="/etc/passwd"), "'path'"),
    "index is a list": (_index(index=[]), "no map with version"),
    "no data files": (_index(shard_count=0), "0 files"),
    "data files without end": (_index(shard_count=1 << 40), "1 to 99999 data files"),
    "missing data files": (
        _index(shard_count=3),
        "data-00000-of-00003' cannot be read",
    ),
    "boolean count": (_index(shard_count=True), "True files"),
    # Leaves of the index
    "a number": (
        lambda files: files.tree.update(head=7),
        "no extension object of type 8",
    ),
    "another type": (
        lambda files: files.set_leaf(files.tree["head"].data, 7),
        "no extension object of type 8",
    ),
    "fixed size": (lambda files: files.set_leaf(b"abcd"), "ExtraData|TypeError"),
    "bytes to spare": (_with_head(lambda data: data + b"\0"), "extra data"),
    "cut": (_with_head(lambda data: data[:-3]), "ckpt.index"),
    "deep tree": (deep_tree, "a tree of over 32 levels"),
    "unknown dtype": (_leaf(dtype="object"), "dtype 'object'"),
    "Python type": (_leaf(dtype="O"), "dtype 'O'"),
    "other dtype": (_leaf(dtype="float32"), _NO_FLAT),
    "smaller dtype": (_leaf(dtype="int16"), "no flat array of int16"),
    "huge shape": (_boxes(((0, 1 << 60),), shape=(1 << 60,)), "is not in the index"),
    "negative shape": (_boxes(((0, -8),), shape=(-8,)), "'head' has the shape"),
    "many axes": (_boxes(((0, 1),) * 60, shape=(1,) * 60), "'head' has the shape"),
    "empty but huge": (
        _boxes(((0, 0), (0, 1 << 59)), shape=(0, 1 << 60)),
        f"is not one of 'head'|{_OVERLAP}",
    ),
    "no slices": (_boxes(), _OVERLAP),
    "overlap": (_boxes(((0, 4),), ((3, 8),)), _OVERLAP),
    "a gap": (_boxes(((0, 4),), ((5, 8),)), _OVERLAP),
    # As many values as the array has
    "overlap that fills a gap": (
        _boxes(((0, 2), (0, 2)), ((1, 3), (0, 2)), shape=(4, 2)),
        _OVERLAP,
    ),
    "slice twice": (_boxes(((0, 4),), ((0, 4),)), "a slice of 'head' comes twice"),
    "slice out of range": (_boxes(((0, 4),), ((4, 9),)), "is not one of 'head'"),
    "negative slice": (_boxes(((0, 4),), ((-4, 8),)), "a slice from -4 to 8"),
    "reversed slice": (_boxes(((0, 4),), ((8, 4),)), "is not one of 'head'"),
    "slice of another rank": (
        _boxes(((0, 4), (0, 1)), ((4, 8), (0, 1))),
        "is not one of 'head'",
    ),
    "slice with a step": (slice_with_a_step, "in steps of 2"),
    "too many slices": (_boxes(*_MANY, shape=(len(_MANY),)), "max_array_len"),
    "too fine a grid": (too_fine_a_grid, "max_array_len"),
    "data file out of range": (
        _leaf(places=(0, 2)),
        "data file 2 of 2 is not one of 'head'",
    ),
    "negative data file": (_leaf(places=(0, -1)), "data file -1 of 2"),
    "fewer places than slices": (_leaf(places=(0,)), "zip"),
    "named axes": (named_axes, "names {'batch': 8}"),
    "array without data": (
        _leaf(name="more", shape=(), boxes=[()], places=[0]),
        "slices of 'more' are missing",
    ),
    "data without an array": (
        lambda files: files.tree.pop("scale"),
        "array '3' is not in the index",
    ),
    # Data files
    "swapped": (lambda files: files.shards.reverse(), "is not in the index"),
    "same data twice": (
        lambda files: files.shards.__setitem__(1, files.shards[0]),
        "is not in the index",
    ),
    "no marker": (lambda files: files.shards[0].pop(writer.MARKER), _NO_MARKER),
    "false marker": (
        lambda files: files.shards[0].update({writer.MARKER: False}),
        _NO_MARKER,
    ),
    "a list": (
        lambda files: files.shards.__setitem__(0, [files.shards[0]]),
        "data-00000-of-00002' cannot be read",
    ),
    "missing array": (
        lambda files: files.shard_of(BIAS).pop(BIAS),
        "slices of 'Encoder/block_0/bias' are missing",
    ),
    "missing chunk": (
        lambda files: files.shard_of(KERNEL)[KERNEL].pop(),
        "slices of 'Encoder/block_0/kernel' are missing",
    ),
    "chunk twice": (
        lambda files: files.shard_of(KERNEL)[KERNEL].append(files.chunk(KERNEL)),
        "is not in the index, or comes twice",
    ),
    "unknown array": (_renamed("4"), "array '4' is not in the index"),
    "number in other digits": (_renamed("٣"), "array '٣' is not in the index"),
    "number with a zero": (_renamed("03"), "array '03' is not in the index"),
    "chunk of another array": (
        lambda files: files.chunk(HEAD).__setitem__(
            1, msgpack.ExtType(writer.SLICE_ND, writer.pack_box(((0, 3),)))
        ),
        r"the slice \(\(0, 3\),\) of 'head'",
    ),
    "piece too short": (_pieces(_FLOATS[:5]), "takes 6 values.*found 20 bytes"),
    "piece too long": (_pieces(_FLOATS, _FLOATS[:1]), "takes 6 values.*found 28 bytes"),
    "no pieces": (_pieces(), "takes 6 values.*found 0 bytes"),
    "empty pieces": (_pieces(_FLOATS, _FLOATS[:0]), _NO_FLAT),
    "piece of another dtype": (_pieces(np.zeros(6, "i4")), _NO_FLAT),
    "piece that claims more": (_pieces(_FLOATS[:5], shape=(6,)), _NO_FLAT),
    "piece that claims objects": (_pieces(_FLOATS, dtype="object"), _NO_FLAT),
    "piece of two axes": (_pieces(_FLOATS.reshape(2, 3)), _NO_FLAT),
    "pickle as a piece": (
        lambda files: files.chunk(BIAS)[0].__setitem__(
            0, msgpack.ExtType(writer.NDARRAY, b"\x80\x04N.")
        ),
        "cannot be read",
    ),
    "piece with bytes to spare": (
        lambda files: files.chunk(BIAS)[0].__setitem__(
            0, msgpack.ExtType(writer.NDARRAY, files.chunk(BIAS)[0][0].data + b"\0")
        ),
        "extra data",
    ),
}
