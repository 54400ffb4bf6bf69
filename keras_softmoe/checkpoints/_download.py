"""Download of checkpoints."""

import os
from pathlib import Path

import keras

from keras_softmoe.checkpoints._checkpoint_index import data_path, read_index
from keras_softmoe.checkpoints._files import download, open_file, web_address
from keras_softmoe.files import atomic_file

_BLOCK = 1 << 24
ONE_FILE_SUFFIXES = (".npz", ".safetensors")


def is_one_file(prefix):
    """Return whether a checkpoint is a single file (`.npz`, `.safetensors`)."""
    return str(prefix).endswith(ONE_FILE_SUFFIXES)


def download_checkpoint(prefix, folder, verbose=1):
    """Copy the files of a checkpoint into a folder.

    Args:
        prefix: str, the common part of the files, for example `gs://bucket/name`, or a
            single `.npz` or `.safetensors` file. Public buckets are read over HTTPS.
        folder: str or path of an existing directory.
        verbose: 0 or 1, whether to show progress bars.

    Returns:
        str, the prefix of the copies.

    Raises:
        CheckpointError: (a `ValueError`) if a file cannot be read, or the index is
            damaged.
    """
    copy = str(Path(folder, prefix.rpartition("/")[2]))
    if is_one_file(prefix):
        _copy(prefix, copy, verbose)
        return copy
    _copy(f"{prefix}.index", f"{copy}.index", verbose=0)
    _, shard_count = read_index(copy)
    for shard in range(shard_count):
        _copy(
            data_path(prefix, shard, shard_count),
            data_path(copy, shard, shard_count),
            verbose,
        )
    return copy


def _copy(source, target, verbose):
    if verbose:
        print(f"Downloading {source}")
    if web_address(source) is not None:
        with atomic_file(target) as aside:
            os.replace(download(source, aside.parent, verbose), aside)
        return
    with open_file(source) as (file, size), atomic_file(target) as aside:
        progress = keras.utils.Progbar(size, verbose=verbose, unit_name="byte")
        with open(aside, "wb") as copy:
            while block := file.read(_BLOCK):
                copy.write(block)
                progress.add(len(block))
