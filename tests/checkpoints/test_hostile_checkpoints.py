"""The reader of sharded checkpoints, on files that are not as they should be."""

import os
import struct

import msgpack
import pytest

from keras_softmoe import checkpoints
from keras_softmoe.checkpoints import opening, vmoe_index as checkpoint_index
from tests.support import checkpoint_writer as writer
from tests.support.memory import peak_memory
from tests.support.spoilers import ARRAYS, SPOILERS, Files

BAD_NAMES = ("..", ".", "", "/etc", "a/b", "a\\b", "a\0b", "\u202e", "a" * 600)


def test_files_are_good_before_they_are_spoiled(tmp_path):
    Files().write(tmp_path / "ckpt")
    assert set(checkpoints.read_checkpoint(tmp_path / "ckpt")) == set(ARRAYS)


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_refused(tmp_path, spoil):
    files = Files()
    spoil(files)
    files.write(tmp_path / "ckpt")
    with pytest.raises(checkpoints.CheckpointError, match=SPOILERS[spoil]):
        checkpoints.read_checkpoint(tmp_path / "ckpt")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_paths_or_worse(tmp_path, name):
    files = Files()
    files.leaf(name)
    files.write(tmp_path / "ckpt")
    with pytest.raises(checkpoints.CheckpointError, match="no name of|A name of over"):
        checkpoints.read_checkpoint(tmp_path / "ckpt")


def test_only_files_of_the_prefix_are_opened(tmp_path, monkeypatch):
    Files().write(tmp_path / "ckpt")
    opened = []

    def spy(path, mode):
        opened.append(os.path.basename(path))
        return open(path, mode)

    monkeypatch.setattr(opening, "open", spy, raising=False)
    dict(checkpoints.read_checkpoint(tmp_path / "ckpt"))
    assert set(opened) == {"ckpt.index", *(f"ckpt.data-0000{i}-of-00002" for i in "01")}


def test_keys_that_come_twice(tmp_path):
    contents = writer.file_contents(*writer.checkpoint_objects(ARRAYS, 1))
    # The key that follows is renamed to the same.
    renamed = {
        ".index": (b"\xa5scale", b"\xa4head"),
        ".data-00000-of-00001": (b"\xa13", b"\xa12"),
    }
    for name, (old, new) in renamed.items():
        for other, content in contents.items():
            (tmp_path / f"ckpt{other}").write_bytes(content)
        content = contents[name].replace(old, new)
        assert content != contents[name]
        (tmp_path / f"ckpt{name}").write_bytes(content)
        with pytest.raises(checkpoints.CheckpointError, match="comes twice"):
            checkpoints.read_checkpoint(tmp_path / "ckpt")
    # At the root
    index = b"\x84" + contents[".index"][1:] + b"\xabshard_count\x01"
    (tmp_path / "ckpt.index").write_bytes(index)
    with pytest.raises(checkpoints.CheckpointError, match="comes twice"):
        checkpoints.read_checkpoint(tmp_path / "ckpt")


@pytest.mark.parametrize("name", [".index", ".data-00000-of-00002"])
def test_bytes_to_spare_and_missing_ones(tmp_path, name):
    Files().write(tmp_path / "ckpt")
    path = tmp_path / f"ckpt{name}"
    content = path.read_bytes()
    for wrong in (content + b"\0", content[:-1], b"", content[: len(content) // 2]):
        path.write_bytes(wrong)
        with pytest.raises(checkpoints.CheckpointError, match=f"ckpt{name}"):
            checkpoints.read_checkpoint(tmp_path / "ckpt")


def test_what_is_no_file(tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="PREFIX.index and all of"):
        checkpoints.read_checkpoint(tmp_path / "absent")
    (tmp_path / "folder.index").mkdir()
    with pytest.raises(checkpoints.CheckpointError, match="cannot be read"):
        checkpoints.read_checkpoint(tmp_path / "folder")
    # Nothing would ever come out of it.
    os.mkfifo(tmp_path / "pipe.index")
    with pytest.raises(checkpoints.CheckpointError, match="cannot be read"):
        checkpoints.read_checkpoint(tmp_path / "pipe")
    with pytest.raises(checkpoints.CheckpointError, match="cannot be read"):
        checkpoints.read_checkpoint(f"file://{tmp_path}/absent")


def test_size_of_the_index(tmp_path):
    with open(tmp_path / "ckpt.index", "wb") as file:
        file.truncate(checkpoint_index.MAX_INDEX_BYTES + 1)
    with pytest.raises(checkpoints.CheckpointError, match="at most 16777216 bytes"):
        checkpoints.read_checkpoint(tmp_path / "ckpt")


def nested_arrays(size):
    """Each array claims that all the rest of the file are its entries."""
    return b"".join(struct.pack(">BI", 0xDD, size) for _ in range(size // 5))


def leaf_of(payload):
    return b"\x81\xa5index\x81\xa1a" + msgpack.packb(msgpack.ExtType(8, payload))


BOMBS = {
    "arrays": nested_arrays(100_000),
    "arrays in a leaf": leaf_of(nested_arrays(100_000)),
    "a map": struct.pack(">BI", 0xDF, 2**32 - 1) + b"\xa1a",
    "maps": struct.pack(">BI", 0xDF, 2**32 - 1) * 1000,
    "a string": struct.pack(">BI", 0xDB, 2**32 - 1) + b"a" * 10_000,
    "an extension object": b"\x81\xa5index\x81\xa1a" + b"\xc9" + b"\xff" * 5000,
    "slices": leaf_of(
        b"\x93"
        + msgpack.packb(msgpack.packb([[1], "int8", False, {}]))
        + struct.pack(">BI", 0xDD, 2**32 - 1)
    ),
    "names": b"\x83\xa5index"
    + struct.pack(">BI", 0xDF, 2**31)
    + b"".join(msgpack.packb(str(i)) + b"\x80" for i in range(1 << 13)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_memory(tmp_path, monkeypatch, bomb):
    monkeypatch.setattr(checkpoint_index, "_MAX_NAMES", 1 << 12)
    (tmp_path / "ckpt.index").write_bytes(BOMBS[bomb])
    with peak_memory() as peak, pytest.raises(checkpoints.CheckpointError):
        checkpoints.read_checkpoint(tmp_path / "ckpt")
    # What the index itself takes, twice, and what its names cost.
    assert peak[0] < 2 * len(BOMBS[bomb]) + (1 << 20)
