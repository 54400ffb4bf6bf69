"""Checkpoints of the original Vision Transformers (`.npz`)."""

import contextlib
import os
import re
import zipfile

import ml_dtypes
import numpy as np

from keras_softmoe.checkpoints._checkpoint import Checkpoint, LazyArray
from keras_softmoe.checkpoints._stream import CheckpointError, open_file

# Weights hardly compress: an archive that grows much more is none of weights.
_MAX_GROWTH = 16
_MAX_SMALL = 1 << 26

# Their name (a pattern) -> V-MoE's. The children of a block are numbered by kind in
# newer files (LayerNorm_0 and 1) and jointly in older ones (LayerNorm_0 and 2).
_BLOCK = r"Transformer/(encoderblock_\d+)"
_RULES = (
    (r"(embedding/(?:kernel|bias)|cls|(?:pre_logits|head)/(?:kernel|bias))", r"\1"),
    (r"Transformer/(posembed_input/pos_embedding)", r"Encoder/\1"),
    (r"Transformer/(encoder_norm/(?:scale|bias))", r"Encoder/\1"),
    (_BLOCK + r"/LayerNorm_0/(scale|bias)", r"Encoder/\1/LayerNorm_0/\2"),
    (_BLOCK + r"/LayerNorm_[12]/(scale|bias)", r"Encoder/\1/LayerNorm_1/\2"),
    (
        _BLOCK + r"/MultiHeadDotProductAttention_[01]"
        r"/((?:query|key|value|out)/(?:kernel|bias))",
        r"Encoder/\1/SelfAttention/\2",
    ),
    (
        _BLOCK + r"/MlpBlock_[03]/(Dense_[01]/(?:kernel|bias))",
        r"Encoder/\1/Mlp/\2",
    ),
)


def read_vit_checkpoint(path):
    """Open a checkpoint of an original Vision Transformer, an `.npz` file.

    Both numberings of the blocks' children are understood. The names that come out
    are V-MoE's, so `load_vmoe_params` and `convert_vmoe_checkpoint` take the result.
    Nothing is unpickled, and the file is checked before anything is returned.

    Args:
        path: str or path, or a URL that `tf.io.gfile` reads (`gs://...`).

    Returns:
        `Checkpoint`: a mapping from V-MoE's flat name to NumPy array, each read when
        it is asked for. Arrays saved as bfloat16 come as `ml_dtypes.bfloat16`.

    Raises:
        CheckpointError: (a `ValueError`) if the file is missing or damaged, or holds
            anything but the parameters of a plain Vision Transformer.

    Source: Dosovitskiy et al. 2021, released code (names of the parameters).

    Example:

    >>> checkpoint = ksm.converters.read_vit_checkpoint("ViT-B_16.npz")
    >>> checkpoint.shapes["Encoder/encoderblock_0/Mlp/Dense_0/kernel"]
    (768, 3072)
    """
    path = os.fspath(path)
    arrays, unknown = {}, []
    for member, shape, dtype in _members(path):
        name = _translate(member)
        if name is None:
            unknown.append(member)
        elif name in arrays:
            raise CheckpointError(f"'{path}' holds {name!r} in both numberings.")
        else:
            arrays[name] = _lazy(path, member, shape, dtype)
    if unknown:
        raise CheckpointError(
            f"'{path}' is no plain Vision Transformer: of {len(arrays) + len(unknown)} "
            f"arrays, {len(unknown)} have no place in one (a hybrid with convolutions, "
            "or a training state?). Received: "
            f"{', '.join(sorted(unknown)[:5])}."
        )
    return Checkpoint(arrays)


def _members(path):
    """Name, shape and dtype of each array in an `.npz` file."""
    with _archive(path) as (archive, size):
        infos = archive.infolist()
        total = sum(info.file_size for info in infos)
        if total > max(_MAX_GROWTH * size, _MAX_SMALL):
            raise CheckpointError(
                f"'{path}' would grow from {size:,} to {total:,} bytes: no weights do."
            )
        if len({info.filename for info in infos}) < len(infos):
            raise CheckpointError(f"'{path}' holds a name twice.")
        for info in infos:
            with archive.open(info) as member:
                shape, dtype, offset = _read_header(member)
            nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
            if dtype.hasobject or offset + nbytes != info.file_size:
                raise CheckpointError(
                    f"'{info.filename}' in '{path}' is not the array of shape {shape} "
                    f"and dtype {dtype} that it claims to be."
                )
            yield info.filename.removesuffix(".npy"), shape, dtype


def _read_header(member):
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(member)
    return shape, dtype, member.tell()


def _translate(member):
    for pattern, name in _RULES:
        match = re.fullmatch(pattern, member)
        if match:
            return match.expand(name)
    return None


def _lazy(path, member, shape, dtype):
    # NumPy has no bfloat16, and saves it as two bytes of nothing in particular.
    is_bfloat16 = dtype == np.dtype("V2")

    def read():
        with _archive(path) as (archive, _), archive.open(f"{member}.npy") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        return array.view(ml_dtypes.bfloat16) if is_bfloat16 else array

    return LazyArray(
        shape, np.dtype(ml_dtypes.bfloat16) if is_bfloat16 else dtype, read
    )


@contextlib.contextmanager
def _archive(path):
    """The open zip archive and its size; whatever goes wrong in it is explained."""
    try:
        with open_file(path) as (file, size), zipfile.ZipFile(file) as archive:
            yield archive, size
    except CheckpointError:
        raise
    # Zip, its compressions and NumPy's headers fail in a dozen ways.
    except Exception as error:
        raise CheckpointError(
            f"'{path}' cannot be read as an .npz file of arrays: it is damaged, "
            f"truncated, or something else. Reason: {type(error).__name__}: {error}"
        ) from error
