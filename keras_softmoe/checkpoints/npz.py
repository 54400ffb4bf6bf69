"""Checkpoints of Vision Transformers in `.npz` files: original, AugReg, big_vision."""

import contextlib
import functools
import zipfile

import ml_dtypes
import numpy as np

from keras_softmoe.checkpoints import translation
from keras_softmoe.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    LazyArray,
    open_file,
)

# Weights hardly compress: an archive that grows much more does not contain weights.
_MAX_GROWTH = 16
_MAX_SMALL = 1 << 26

# Original name (a pattern) -> V-MoE's. The children of a block are numbered by kind in
# newer files (LayerNorm_0 and 1) and jointly in older ones (LayerNorm_0 and 2).
_BLOCK = r"Transformer/(encoderblock_\d+)"
_HEADS = r"/((?:query|key|value|out)/(?:kernel|bias))"
_DENSE = r"/(Dense_[01]/(?:kernel|bias))"
_NORM = r"/(scale|bias)"
_RULES = tuple(
    (*rule, translation.same)
    for rule in (
        (r"(embedding/(?:kernel|bias)|cls|(?:pre_logits|head)/(?:kernel|bias))", r"\1"),
        (r"Transformer/(posembed_input/pos_embedding)", r"Encoder/\1"),
        # Of big_vision, without a position for the class token
        (r"pos_embedding", translation.POSITIONS),
        (r"Transformer/encoder_norm" + _NORM, r"Encoder/encoder_norm/\1"),
        (_BLOCK + "/LayerNorm_0" + _NORM, r"Encoder/\1/LayerNorm_0/\2"),
        (_BLOCK + "/LayerNorm_[12]" + _NORM, r"Encoder/\1/LayerNorm_1/\2"),
        (
            _BLOCK + "/MultiHeadDotProductAttention_[01]" + _HEADS,
            r"Encoder/\1/SelfAttention/\2",
        ),
        (_BLOCK + "/MlpBlock_[03]" + _DENSE, r"Encoder/\1/Mlp/\2"),
        (r"MAPHead_0/probe", r"MapHead/probe"),
        (
            "MAPHead_0/MultiHeadDotProductAttention_0" + _HEADS,
            r"MapHead/MultiHeadDotProductAttention/\1",
        ),
        ("MAPHead_0/LayerNorm_0" + _NORM, r"MapHead/LayerNorm/\1"),
        ("MAPHead_0/MlpBlock_0" + _DENSE, r"MapHead/Mlp/\1"),
    )
)
# Blocks stacked by the `scan` of big_vision
_STACKED = "Transformer/encoderblock/"
_MAX_BLOCKS = 1024


def read_vit_checkpoint(path):
    """Open an `.npz` file under V-MoE's names, see `read_checkpoint`."""
    arrays = {
        member: _lazy(path, member, shape, dtype)
        for member, shape, dtype in _members(path)
    }
    # The parameters of the image tower only
    for prefix in ("params/", "img/"):
        below = {n.removeprefix(prefix): n for n in arrays if n.startswith(prefix)}
        arrays = {name: arrays[n] for name, n in below.items()} or arrays
    where = f"'{path}'"
    arrays = translation.translate(_unstacked(arrays, where), _RULES, where)
    if translation.POSITIONS in arrays:
        if translation.OUR_POSITIONS in arrays:
            raise CheckpointError(f"{where} holds positions in two places.")
        if len(shape := arrays[translation.POSITIONS].shape) != 3 or shape[0] != 1:
            raise CheckpointError(f"{where} has positions of the shape {shape}.")
        arrays = translation.place_tokens(arrays, (0,))
    return Checkpoint(arrays)


def _unstacked(arrays, where):
    """Split arrays of all blocks, `(L, ...)`, into one for each block."""
    stacked = {name: a for name, a in arrays.items() if name.startswith(_STACKED)}
    counts = {array.shape[:1] for array in stacked.values()}
    if len(counts) > 1 or counts & {(), (0,)}:
        raise CheckpointError(
            f"The stacked arrays of {where} must have one number of blocks. Received: "
            f"first axes {sorted(counts)}."
        )
    unstacked = {name: a for name, a in arrays.items() if name not in stacked}
    for (count,) in counts:
        if count > _MAX_BLOCKS:
            raise CheckpointError(f"{where} has {count} stacked blocks.")
        for name, array in stacked.items():
            stack = _Stack(array)
            for index in range(count):
                name_of_block = name.replace(_STACKED, f"{_STACKED[:-1]}_{index}/")
                if name_of_block in unstacked:
                    raise CheckpointError(f"{where} holds {name_of_block!r} twice.")
                part = functools.partial(stack.read, index)
                unstacked[name_of_block] = LazyArray(array.shape[1:], array.dtype, part)
    return unstacked


class _Stack:
    """Array of several blocks, read once for all of them."""

    def __init__(self, array):
        self._array = array
        self._read = None
        self._taken = set()

    def read(self, index):
        """Return the part of a block. The last call releases the array."""
        array = self._array.read() if self._read is None else self._read
        self._read = array
        self._taken.add(index)
        if len(self._taken) == len(array):
            self._read = None
            self._taken.clear()
        return array[index]


def _members(path):
    """Yield name, shape and dtype of each array in an `.npz` file."""
    with _archive(path) as (archive, size):
        infos = archive.infolist()
        total = sum(info.file_size for info in infos)
        if total > max(_MAX_GROWTH * size, _MAX_SMALL):
            raise ValueError(f"it would grow from {size:,} to {total:,} bytes")
        if len({info.filename for info in infos}) < len(infos):
            raise ValueError("it holds a name twice")
        for info in infos:
            with archive.open(info) as member:
                read = np.lib.format.read_array_header_2_0
                if np.lib.format.read_magic(member) == (1, 0):
                    read = np.lib.format.read_array_header_1_0
                (shape, _, dtype), offset = read(member), member.tell()
            nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
            if dtype.hasobject or offset + nbytes != info.file_size:
                raise ValueError(
                    f"'{info.filename}' is not the array of shape {shape} and dtype "
                    f"{dtype} that it claims to be"
                )
            yield info.filename.removesuffix(".npy"), shape, dtype


def _lazy(path, member, shape, dtype):
    # NumPy has no bfloat16, and saves it as two bytes without a type.
    is_bfloat16 = dtype == np.dtype("V2")

    def read():
        with _archive(path) as (archive, _), archive.open(f"{member}.npy") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        return array.view(ml_dtypes.bfloat16) if is_bfloat16 else array

    dtype = np.dtype(ml_dtypes.bfloat16) if is_bfloat16 else dtype
    return LazyArray(shape, dtype, read)


@contextlib.contextmanager
def _archive(path):
    """Open a zip archive, with its size and with errors that name it."""
    with open_file(path, "an .npz file of arrays") as (file, size):
        with zipfile.ZipFile(file) as archive:
            yield archive, size
