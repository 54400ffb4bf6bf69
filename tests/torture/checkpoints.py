"""Damaged checkpoints: read as they are, or refused, at little cost."""

import contextlib
import pathlib
import random
import re
import tempfile

import msgpack
import numpy as np

from keras_softmoe import checkpoints
from keras_softmoe.checkpoints import msgpack_stream as stream
from tests.support import checkpoint_twin as twin, checkpoint_writer as writer
from tests.support.memory import peak_memory
from tests.support.spoilers import ARRAYS, CUTS

# First bytes of objects that have a length, or claim one
HEADERS = re.compile(rb"[\x80-\xbf\xc4-\xc9\xd4-\xdf]")
INTERESTING = (0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xC4, 0xC9, 0xDD, 0xDF, 0xFF)


def flip_bits(content, rng):
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def set_bytes(content, rng):
    for _ in range(rng.choice((1, 1, 2, 4))):
        content[rng.randrange(len(content))] = rng.choice(INTERESTING)


def truncate(content, rng):
    del content[rng.randrange(len(content)) :]


def append(content, rng):
    content += rng.randbytes(rng.choice((1, 2, 100)))


def delete_span(content, rng):
    start = rng.randrange(len(content))
    del content[start : start + rng.choice((1, 1, 2, 16, 100))]


def repeat_span(content, rng):
    start = rng.randrange(len(content))
    span = content[start : start + rng.choice((1, 1, 2, 16, 100))]
    content[start:start] = span * rng.choice((1, 1, 50))


def overwrite_span(content, rng):
    start, size = rng.randrange(len(content)), rng.choice((4, 16))
    content[start : start + size] = rng.randbytes(size)


def edit_length(content, rng):
    """Change a header, or the length that follows it."""
    start = rng.choice([match.start() for match in HEADERS.finditer(content)])
    if content[start] < 0xC0:
        content[start] = (content[start] + rng.choice((-1, 1))) % 256
        return
    width = rng.choice((1, 2, 4))
    length = rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, rng.randrange(1 << 32)))
    content[start + 1 : start + 1 + width] = length.to_bytes(4, "big")[-width:]


BYTES = (
    flip_bits,
    set_bytes,
    truncate,
    append,
    delete_span,
    repeat_span,
    overwrite_span,
    edit_length,
)


def edit_bytes(contents, rng):
    """Damage one file, the index as often as all others together."""
    names = sorted(contents)
    name = ".index" if rng.random() < 0.5 else rng.choice(names)
    content = bytearray(contents[name])
    rng.choice(BYTES)(content, rng)
    contents[name] = bytes(content)


def edit_leaf(contents, rng):
    """Change numbers of an array in the index: shape, slices, data files."""
    index = msgpack.unpackb(contents[".index"])
    path = rng.choice([path for path, _ in twin.flatten(index["index"], ())])
    tree = index["index"]
    for key in path[:-1]:
        tree = tree[key]
    aval, boxes, places = msgpack.unpackb(tree[path[-1]].data)
    shape, dtype, weak, names = msgpack.unpackb(aval)
    boxes = [[msgpack.unpackb(i) for i in msgpack.unpackb(box)] for box in boxes]
    numbers = [shape, places, *(interval for box in boxes for interval in box)]
    numbers = rng.choice([n for n in numbers if n] or [places])
    if numbers:
        position = rng.randrange(min(len(numbers), 2))
        numbers[position] += rng.choice((-1, 1, 1 << 40))
    if rng.random() < 0.2:
        dtype = rng.choice(("float32", "int32", "float16", "object", "V8", ""))
    boxes = [msgpack.packb([msgpack.packb(i) for i in box]) for box in boxes]
    aval = msgpack.packb([shape, dtype, weak, names])
    tree[path[-1]] = msgpack.ExtType(8, msgpack.packb([aval, boxes, places]))
    contents[".index"] = msgpack.packb(index)


def move_leaf(contents, rng):
    """Give two arrays each other's leaf, or one of them a leaf more."""
    index = msgpack.unpackb(contents[".index"])
    leaves = dict(twin.flatten(index["index"], ()))
    one, other = rng.sample(sorted(leaves), 2)
    swapped = {one: leaves[other], other: leaves[one]}
    if rng.random() < 0.5:
        swapped = {(*one[:-1], "more"): leaves[one]}
    tree = {}
    for path, leaf in (leaves | swapped).items():
        level = tree
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = leaf
    contents[".index"] = msgpack.packb({**index, "index": tree})


def swap_files(contents, rng):
    """Exchange files, or replace one by another."""
    one, other = rng.sample(sorted(contents), 2)
    contents[one], contents[other] = (
        contents[other],
        rng.choice((contents[one], contents[other])),
    )


def lose_file(contents, rng):
    del contents[rng.choice(sorted(contents))]


MUTATIONS = (*(edit_bytes,) * 12, *(edit_leaf,) * 4, move_leaf, swap_files, lose_file)


def mutate(contents, rng):
    """Damage files of a checkpoint, now and then twice."""
    contents = dict(contents)
    while True:
        before = dict(contents)
        for _ in range(rng.choice((1, 1, 1, 2))):
            # What is gone cannot be damaged any more.
            with contextlib.suppress(KeyError, IndexError, ValueError):
                rng.choice(MUTATIONS)(contents, rng)
        if contents != before:
            return contents


def damaged_checkpoints(tally, contents, num_checkpoints, seed):
    """Read mutated checkpoints.

    Args:
        tally: `Tally`.
        contents: dict from the end of a file's name to its bytes.
        num_checkpoints: int.
        seed: int.

    Returns:
        int, how many of them were read.
    """
    rng, read = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder, _counted_steps() as steps:
        prefix = pathlib.Path(folder, "ckpt")
        for number in range(num_checkpoints):
            # The first is as it should be.
            damaged = mutate(contents, rng) if number else contents
            name = f"seed {seed}, number {number}"
            with tally.case(name, mentions=[prefix.name]):
                read += check(damaged, prefix, steps)
            assert read, "The checkpoint was damaged before."
    return read


def own_checkpoint():
    """Contents of the files of a small checkpoint with arrays of many kinds."""
    arrays = {**ARRAYS, "a/b/c": np.arange(150, dtype="f8"), "mask": np.ones(9, bool)}
    objects = writer.checkpoint_objects(arrays, 3, CUTS, piece_bytes=64)
    return writer.file_contents(*objects)


def check(contents, prefix, steps):
    """Read the files, or be refused with an error; returns `True`.

    They are compared with what the plain reader finds. Steps through a file are
    counted: there cannot be more than it has bytes, so nothing can go on forever.
    """
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        path.unlink()
    for name, content in contents.items():
        pathlib.Path(f"{prefix}{name}").write_bytes(content)
    total, steps[0], refusal, arrays = sum(map(len, contents.values())), 0, None, None
    with peak_memory() as peak:
        try:
            arrays = dict(checkpoints.read_checkpoint(prefix))
        except checkpoints.CheckpointError as error:
            refusal = error
    assert peak[0] < (1 << 21) + 20 * total
    # Data is walked through twice, when it is checked and when it is read.
    assert steps[0] <= 2 * total + 10
    if refusal is not None:
        assert len(str(refusal)) < 2000
        raise refusal
    expected = twin.read(prefix)
    assert set(arrays) == set(expected)
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert arrays[name].tobytes() == array.tobytes()
    return True


@contextlib.contextmanager
def _counted_steps():
    """Yields a list whose only item grows with each step through a file."""
    library, steps = stream.Stream._library, [0]

    def counted(self, *arguments):
        steps[0] += 1
        return library(self, *arguments)

    stream.Stream._library = counted
    try:
        yield steps
    finally:
        stream.Stream._library = library
