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


def no_version(files):
    del files.index["version"]


def other_version(files):
    files.index["version"] = "20990101"


def no_index(files):
    del files.index["index"]


def unknown_key(files):
    files.index["path"] = "/etc/passwd"


def index_is_a_list(files):
    files.index["index"] = []


def no_data_files(files):
    files.index["shard_count"] = 0


def data_files_without_end(files):
    files.index["shard_count"] = 1 << 40


def data_files_that_are_missing(files):
    files.index["shard_count"] = 3


def boolean_count(files):
    files.index["shard_count"] = True


def leaf_is_a_number(files):
    files.tree["head"] = 7


def leaf_of_another_type(files):
    files.tree["head"] = msgpack.ExtType(7, files.tree["head"].data)


def fixed_size_leaf(files):
    files.tree["head"] = msgpack.ExtType(8, b"abcd")


def leaf_with_bytes_to_spare(files):
    files.tree["head"] = msgpack.ExtType(8, files.tree["head"].data + b"\0")


def leaf_that_is_cut(files):
    files.tree["head"] = msgpack.ExtType(8, files.tree["head"].data[:-3])


def deep_tree(files):
    for _ in range(200):
        files.tree["a"] = files.tree = {}
    files.leaf()


def unknown_dtype(files):
    files.leaf(dtype="object")


def python_type_as_dtype(files):
    files.leaf(dtype="O")


def other_dtype(files):
    files.leaf(dtype="float32")


def smaller_dtype(files):
    files.leaf(dtype="int16")


def huge_shape(files):
    files.leaf(shape=(1 << 60,), boxes=[((0, 1 << 60),)], places=[0])


def negative_shape(files):
    files.leaf(shape=(-8,), boxes=[((0, -8),)], places=[0])


def many_axes(files):
    files.leaf(shape=(1,) * 60, boxes=[((0, 1),) * 60], places=[0])


def empty_but_huge(files):
    files.leaf(shape=(0, 1 << 60), boxes=[((0, 0), (0, 1 << 59))], places=[0])


def no_slices(files):
    files.leaf(boxes=[], places=[])


def overlapping_slices(files):
    files.leaf(boxes=[((0, 4),), ((3, 8),)])


def slices_with_a_gap(files):
    files.leaf(boxes=[((0, 4),), ((5, 8),)])


def overlap_that_fills_a_gap(files):
    # As many values as the array has
    files.leaf(shape=(4, 2), boxes=[((0, 2), (0, 2)), ((1, 3), (0, 2))])


def slice_that_comes_twice(files):
    files.leaf(boxes=[((0, 4),), ((0, 4),)])


def slice_out_of_range(files):
    files.leaf(boxes=[((0, 4),), ((4, 9),)])


def negative_slice(files):
    files.leaf(boxes=[((0, 4),), ((-4, 8),)])


def reversed_slice(files):
    files.leaf(boxes=[((0, 4),), ((8, 4),)])


def slice_of_another_rank(files):
    files.leaf(boxes=[((0, 4), (0, 1)), ((4, 8), (0, 1))])


def slice_with_a_step(files):
    leaf = msgpack.unpackb(files.tree["head"].data)
    leaf[1] = [writer.pack_box(((0, 8),), step=2)]
    files.tree["head"] = msgpack.ExtType(8, msgpack.packb([leaf[0], leaf[1], [0]]))


def too_many_slices(files):
    count = vmoe.MAX_SLICES + 1
    boxes = [((i, i + 1),) for i in range(count)]
    files.leaf(shape=(count,), boxes=boxes, places=[0] * count)


def too_fine_a_grid(files):
    shape = (8, 8, 8, 8, 3)
    boxes = writer.boxes_of(shape, [range(1, size) for size in shape])
    files.leaf(shape=shape, boxes=boxes, places=[0] * len(boxes))


def data_file_out_of_range(files):
    files.leaf(places=(0, 2))


def negative_data_file(files):
    files.leaf(places=(0, -1))


def fewer_places_than_slices(files):
    files.leaf(places=(0,))


def named_axes(files):
    leaf = msgpack.unpackb(files.tree["head"].data)
    leaf[0] = msgpack.packb([[8], "int32", False, {"batch": 8}])
    files.tree["head"] = msgpack.ExtType(8, msgpack.packb(leaf))


def array_that_no_data_file_has(files):
    files.leaf(name="more", shape=(), boxes=[()], places=[0])


def array_that_the_index_lacks(files):
    del files.tree["scale"]


def data_files_swapped(files):
    files.shards.reverse()


def same_data_twice(files):
    files.shards[1] = files.shards[0]


def no_marker(files):
    del files.shards[0][writer.MARKER]


def false_marker(files):
    files.shards[0][writer.MARKER] = False


def data_file_is_a_list(files):
    files.shards[0] = [files.shards[0]]


def missing_array(files):
    del files.shard_of(BIAS)[BIAS]


def missing_chunk(files):
    files.shard_of(KERNEL)[KERNEL].pop()


def chunk_that_comes_twice(files):
    chunks = files.shard_of(KERNEL)[KERNEL]
    chunks.append(chunks[0])


def unknown_array(files):
    files.shards[0]["4"] = files.shard_of(SCALE)[SCALE]


def array_number_in_other_digits(files):
    shard = files.shard_of(SCALE)
    shard["٣"] = shard.pop(SCALE)


def array_number_with_a_zero(files):
    shard = files.shard_of(SCALE)
    shard["03"] = shard.pop(SCALE)


def chunk_of_another_array(files):
    chunk = files.shard_of(HEAD)[HEAD][0]
    chunk[1] = msgpack.ExtType(writer.SLICE_ND, writer.pack_box(((0, 3),)))


def piece_too_short(files):
    chunk = files.shard_of(BIAS)[BIAS][0]
    chunk[0] = [writer.piece(np.zeros(5, "f4"))]


def piece_too_long(files):
    chunk = files.shard_of(BIAS)[BIAS][0]
    chunk[0].append(writer.piece(np.zeros(1, "f4")))


def no_pieces(files):
    files.shard_of(BIAS)[BIAS][0][0] = []


def empty_pieces(files):
    chunk = files.shard_of(BIAS)[BIAS][0]
    chunk[0] += [writer.piece(np.zeros(0, "f4"))] * 3


def piece_of_another_dtype(files):
    chunk = files.shard_of(BIAS)[BIAS][0]
    chunk[0] = [writer.piece(np.zeros(6, "i4"))]


def piece_that_claims_more(files):
    chunk = files.shard_of(BIAS)[BIAS][0]
    chunk[0] = [writer.piece(np.zeros(5, "f4"), shape=(6,))]


def piece_that_claims_an_object(files):
    chunk = files.shard_of(BIAS)[BIAS][0]
    chunk[0] = [writer.piece(np.zeros(6, "f4"), dtype="object")]


def piece_of_two_axes(files):
    chunk = files.shard_of(BIAS)[BIAS][0]
    chunk[0] = [writer.piece(np.zeros((2, 3), "f4"))]


def pickle_in_place_of_a_piece(files):
    chunk = files.shard_of(BIAS)[BIAS][0]
    chunk[0] = [msgpack.ExtType(1, b"\x80\x04N.")]


def piece_with_bytes_to_spare(files):
    chunk = files.shard_of(BIAS)[BIAS][0]
    chunk[0] = [msgpack.ExtType(1, chunk[0][0].data + b"\0")]


SPOILERS = {
    no_version: "no version.*2022-06-22.*replaced since",
    other_version: "version '20990101'",
    no_index: "no map with version, shard_count and index",
    unknown_key: "'path'",
    index_is_a_list: "no map with version",
    no_data_files: "0 files",
    data_files_without_end: "1 to 99999 data files, not 1099511627776",
    data_files_that_are_missing: "data-00000-of-00003' cannot be read",
    boolean_count: "True files",
    leaf_is_a_number: "no extension object of type 8",
    leaf_of_another_type: "no extension object of type 8",
    fixed_size_leaf: "ExtraData|not enough values|TypeError",
    leaf_with_bytes_to_spare: "extra data",
    leaf_that_is_cut: "ckpt.index",
    deep_tree: "a tree of over 32 levels",
    unknown_dtype: "dtype 'object'",
    python_type_as_dtype: "dtype 'O'",
    other_dtype: "no flat array of float32",
    smaller_dtype: "no flat array of int16",
    huge_shape: "of 'head' is not in the index|are missing",
    negative_shape: "'head' has the shape",
    many_axes: "'head' has the shape",
    empty_but_huge: "is not one of 'head'|overlap, or leave",
    no_slices: "overlap, or leave a part",
    overlapping_slices: "overlap, or leave a part",
    slices_with_a_gap: "overlap, or leave a part",
    overlap_that_fills_a_gap: "overlap, or leave a part",
    slice_that_comes_twice: "a slice of 'head' comes twice",
    slice_out_of_range: "is not one of 'head'",
    negative_slice: "a slice from -4 to 8",
    reversed_slice: "is not one of 'head'",
    slice_of_another_rank: "is not one of 'head'",
    slice_with_a_step: "in steps of 2",
    too_many_slices: "exceeds max_array_len",
    too_fine_a_grid: "exceeds max_array_len",
    data_file_out_of_range: "data file 2 of 2 is not one of 'head'",
    negative_data_file: "data file -1 of 2",
    fewer_places_than_slices: "zip",
    named_axes: "names {'batch': 8}",
    array_that_no_data_file_has: "slices of 'more' are missing",
    array_that_the_index_lacks: "array '3' is not in the index",
    data_files_swapped: "is not in the index",
    same_data_twice: "is not in the index",
    no_marker: "no map with __msgpack_array_chunk_a87ca2__",
    false_marker: "no map with __msgpack_array_chunk_a87ca2__",
    data_file_is_a_list: "data-00000-of-00002' cannot be read",
    missing_array: "slices of 'Encoder/block_0/bias' are missing",
    missing_chunk: "slices of 'Encoder/block_0/kernel' are missing",
    chunk_that_comes_twice: "is not in the index, or comes twice",
    unknown_array: "array '4' is not in the index",
    array_number_in_other_digits: "array '٣' is not in the index",
    array_number_with_a_zero: "array '03' is not in the index",
    chunk_of_another_array: r"the slice \(\(0, 3\),\) of 'head'",
    piece_too_short: "takes 6 values of float32, found 20 bytes",
    piece_too_long: "takes 6 values of float32, found 28 bytes",
    no_pieces: "takes 6 values of float32, found 0 bytes",
    empty_pieces: "no flat array of float32",
    piece_of_another_dtype: "no flat array of float32",
    piece_that_claims_more: "no flat array of float32",
    piece_that_claims_an_object: "no flat array of float32",
    piece_of_two_axes: "no flat array of float32",
    pickle_in_place_of_a_piece: "data-0000. *|cannot be read",
    piece_with_bytes_to_spare: "extra data",
}
