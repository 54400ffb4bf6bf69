"""The reader of sharded checkpoints, on intact files.

Covers `checkpoints/checkpoint.py`.
"""

import os

import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from keras_softmoe import checkpoints
from tests.support import checkpoint_twin as twin, checkpoint_writer as writer
from tests.support.memory import peak_memory

DTYPES = [*("bool", "int8", "uint16", "int64", "float16", "float32", "complex64")]
ARRAYS = {
    # "block_10" is numbered before "block_2".
    "Encoder/block_2/kernel": np.arange(24, dtype="f4").reshape(4, 6),
    "Encoder/block_10/kernel": np.arange(24, 48, dtype="f4").reshape(4, 6),
    "Encoder/block_10/bias": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "mask": np.array([True, False, True]),
    "nothing": np.zeros((3, 0), "i4"),
    "step": np.array(7, "i8"),
}
CUTS = {"Encoder/block_2/kernel": ((1, 3), (2,)), "mask": ((1,),)}


def assert_equal(actual, expected):
    assert set(actual) == set(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        assert actual[name].shape == array.shape, name
        # Bit for bit, NaN included.
        assert actual[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("piece_bytes", [8, 1 << 30])
def test_read(tmp_path, num_shards, piece_bytes):
    prefix = tmp_path / "ckpt"
    writer.write_checkpoint(prefix, ARRAYS, num_shards, CUTS, piece_bytes)
    checkpoint = checkpoints.read_checkpoint(prefix)
    assert_equal(dict(checkpoint), ARRAYS)
    assert_equal(twin.read(prefix), ARRAYS)
    assert checkpoint.shapes == {name: a.shape for name, a in ARRAYS.items()}
    assert checkpoint.dtypes == {name: a.dtype for name, a in ARRAYS.items()}
    assert checkpoint.nbytes == sum(array.nbytes for array in ARRAYS.values())
    assert len(checkpoint) == len(ARRAYS)
    assert "mask" in checkpoint and "Encoder" not in checkpoint
    assert "6 arrays" in repr(checkpoint)


@st.composite
def any_checkpoint(draw):
    """Arrays of any shape and dtype, and cuts of them."""
    word = st.text("abz_0129", min_size=1, max_size=4)
    # A name is either an array or a level: one more component keeps them apart.
    names = draw(st.lists(st.lists(word, max_size=2), max_size=5, unique_by=tuple))
    arrays, cuts = {}, {}
    for path in names:
        name = "/".join((*path, "leaf."))
        shape = draw(hypothesis_numpy.array_shapes(min_dims=0, max_dims=4, max_side=5))
        arrays[name] = draw(
            hypothesis_numpy.arrays(draw(st.sampled_from(DTYPES)), shape)
        )
        cuts[name] = [
            draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else ()
            for size in shape
        ]
    return arrays, cuts


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    any_checkpoint(), st.integers(1, 4), st.sampled_from([1, 24, 1 << 30]), st.data()
)
def test_there_and_back(tmp_path_factory, checkpoint, num_shards, piece_bytes, data):
    arrays, cuts = checkpoint
    prefix = tmp_path_factory.mktemp("checkpoint") / "ckpt"
    writer.write_checkpoint(prefix, arrays, num_shards, cuts, piece_bytes)
    read = checkpoints.read_checkpoint(prefix)
    # In any order
    names = data.draw(st.permutations(sorted(arrays)))
    assert_equal({name: read[name] for name in names}, arrays)
    assert set(read) == set(arrays)


def test_slices_that_form_no_grid(tmp_path):
    array = np.arange(12).reshape(3, 4)
    boxes = [((0, 1), (0, 3)), ((0, 2), (3, 4)), ((1, 3), (0, 1)), ((2, 3), (1, 4))]
    boxes.append(((1, 2), (1, 3)))
    index = writer.index_entry(array.shape, "int64", boxes, [0] * 5)
    shard = {writer.MARKER: True, "0": []}
    for box in boxes:
        chunk = array[tuple(slice(*interval) for interval in box)]
        packed = writer.msgpack.ExtType(writer.SLICE_ND, writer.pack_box(box))
        shard["0"].append([writer.pieces(chunk, 8), packed])
    tree = {"shard_count": 1, "index": {"a": index}, "version": writer.VERSION}
    writer.write_objects(tmp_path / "ckpt", tree, [shard])
    assert_equal(dict(checkpoints.read_checkpoint(tmp_path / "ckpt")), {"a": array})


def test_keys_in_any_order_and_empty_levels(tmp_path):
    index, shards = writer.checkpoint_objects(ARRAYS, 2)
    index["index"]["opt_state"] = {"0": {}, "1": {}}
    index = dict(reversed(index.items()))
    shards = [dict(reversed(shard.items())) for shard in shards]
    writer.write_objects(tmp_path / "ckpt", index, shards)
    assert_equal(dict(checkpoints.read_checkpoint(tmp_path / "ckpt")), ARRAYS)


def test_prefix_is_a_str_or_a_path_or_a_url(tmp_path):
    prefix = tmp_path / "with space"
    writer.write_checkpoint(prefix, ARRAYS, 2)
    for given in (str(prefix), prefix, f"file://{prefix}"):
        assert_equal(dict(checkpoints.read_checkpoint(given)), ARRAYS)


def test_below():
    arrays = {"params/a": np.zeros(2), "params/b/c": np.zeros(3), "step": np.zeros(())}
    lazy = {
        name: checkpoints.LazyArray(a.shape, a.dtype, lambda a=a: a)
        for name, a in arrays.items()
    }
    below = checkpoints.Checkpoint(lazy).below("params/")
    assert below.shapes == {"a": (2,), "b/c": (3,)}
    assert below["b/c"] is arrays["params/b/c"]


def test_arrays_are_read_one_by_one(tmp_path):
    size = 1 << 22
    arrays = {f"a{i}": np.full((size // 4,), i, "f4") for i in range(4)}
    # Columns: a chunk of them is no block of the array.
    arrays["columns"] = np.arange(size // 4, dtype="f4").reshape(-1, 1024)
    cuts = {"a1": ((1000,),), "columns": ((), (512,))}
    prefix = tmp_path / "ckpt"
    writer.write_checkpoint(prefix, arrays, 2, cuts)
    checkpoint = checkpoints.read_checkpoint(prefix)
    for name, piece in (("a0", size), ("a1", size), ("columns", size // 2)):
        with peak_memory() as peak:
            array = checkpoint[name]
        np.testing.assert_array_equal(array, arrays[name])
        # The array, a piece of it four times on its way, and blocks of 1 MB.
        assert peak[0] < size + 4 * piece + (5 << 20)


def test_nothing_is_kept_and_what_is_gone_is_missed(tmp_path):
    prefix = tmp_path / "ckpt"
    writer.write_checkpoint(prefix, ARRAYS)
    checkpoint = checkpoints.read_checkpoint(prefix)
    checkpoint["mask"][:] = False
    assert checkpoint["mask"].any()
    data = tmp_path / "ckpt.data-00000-of-00001"
    os.truncate(data, 10)
    with pytest.raises(checkpoints.CheckpointError, match="data-00000.*fetch it again"):
        checkpoint["mask"]
    data.unlink()
    with pytest.raises(checkpoints.CheckpointError, match="cannot be read.*no such"):
        checkpoint["mask"]
    with pytest.raises(KeyError):
        checkpoint["absent"]
