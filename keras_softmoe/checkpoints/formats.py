"""Opening of checkpoints of any supported format, also on the web and in buckets.

A new format is a reader in a file of its own, and a line in `read_checkpoint`.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import keras

from keras_softmoe.checkpoints.checkpoint import Checkpoint, CheckpointError, open_file
from keras_softmoe.checkpoints.npz import read_vit_checkpoint
from keras_softmoe.checkpoints.safetensors import read_safetensors, read_torch_names
from keras_softmoe.checkpoints.vmoe import data_path, read_index, read_sharded
from keras_softmoe.files import atomic_file

CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
_MAX_TEXT = 1 << 20

ONE_FILE_SUFFIXES = (".npz", ".safetensors")
_BUCKETS = "https://storage.googleapis.com/"
# Timeout for a server's answer, in seconds
_PATIENCE = 10.0


def read_checkpoint(source: str | os.PathLike) -> Checkpoint:
    """Open a checkpoint of another library. The arrays are read on access.

    | source | format | names of the arrays |
    |---|---|---|
    | `PREFIX` of `PREFIX.index` and `PREFIX.data-...` | V-MoE | V-MoE's |
    | `.npz` | original Vision Transformer, AugReg, big_vision | V-MoE's |
    | `.safetensors` | any | those in the file |

    `load_vmoe_params` and `convert_vmoe_checkpoint` accept V-MoE's names. Files may be
    untrusted: they are checked before anything is returned, and never unpickled.

    Args:
        source: str or path, or a URL (`https://...`, `gs://bucket/name`), copied once.

    Returns:
        `Mapping` from name to NumPy array (of `ml_dtypes.bfloat16`, too), with dicts
        `shapes` and `dtypes` by name, known without reading the arrays.

    Raises:
        CheckpointError: (a `ValueError`) if a file is missing, damaged, or cannot be
            fetched. Later, if an array can no longer be read.

    Source: V-MoE's released code (format of its checkpoints, version 20220622);
    Dosovitskiy et al. 2021 and big_vision (names).

    Examples:
        >>> checkpoint = ksm.converters.read_checkpoint("vmoe_tiny/ckpt")
        >>> checkpoint.shapes["head/kernel"]
        (16, 10)
        >>> kernel = checkpoint["head/kernel"]
    """
    path = local_copy(os.fspath(source))
    if path.endswith(".npz"):
        return read_vit_checkpoint(path)
    if path.endswith(".safetensors"):
        return read_safetensors(path)
    return read_sharded(path)


def read_parameters(source, num_heads=None, image_shape=None, head=True):
    """Open the parameters of a model under V-MoE's names, in any supported format.

    `source` is as in `read_checkpoint`, the others are as in `read_torch_names`.
    """
    checkpoint = source
    if not isinstance(source, Checkpoint):
        path = os.fspath(source)
        checkpoint = read_checkpoint(path)
        if path.endswith(".safetensors"):
            about = read_text_beside(path, CONFIG_FILE)
            settings = num_heads, image_shape, head
            return read_torch_names(checkpoint, path, about, *settings)
    is_state = any(name.startswith("params/") for name in checkpoint)
    return checkpoint.below("params/") if is_state else checkpoint


def read_text_beside(path, name):
    """Return the dict in a JSON file beside another file, empty without such a file."""
    file = Path(path).parent / name
    if "://" in path or not file.is_file():
        return {}
    try:
        if file.stat().st_size > _MAX_TEXT:
            raise ValueError(f"over {_MAX_TEXT} bytes")
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"'{file}', which describes the weights beside it, cannot be read: "
            f"{str(error)[:80]}."
        ) from error
    return found


# === Copies of checkpoints on the web ===


def web_address(path):
    """Return the URL of a path on the web (`gs://` or `https://`), or `None`."""
    if path.startswith("gs://"):
        return _BUCKETS + path.removeprefix("gs://")
    return path if path.startswith(("https://", "http://")) else None


def is_one_file(prefix):
    """Return whether a checkpoint is a single file (`.npz`, `.safetensors`)."""
    return str(prefix).endswith(ONE_FILE_SUFFIXES)


def local_copy(prefix):
    """Return the prefix of a checkpoint on this machine, downloaded once if needed.

    Copies are kept in `keras_softmoe/checkpoints/` below the directory of Keras.
    """
    if web_address(prefix) is None:
        return prefix.removeprefix("file://")
    home = os.environ.get("KERAS_HOME") or Path("~", ".keras").expanduser()
    name = hashlib.sha256(prefix.encode()).hexdigest()[:16]
    folder = Path(home, "keras_softmoe", "checkpoints", name)
    return download_checkpoint(prefix, folder, keep=True)


def download_checkpoint(prefix, folder, verbose=1, keep=False):
    """Copy a file, or all with a common prefix, and return the path or prefix there."""
    copy = str(Path(folder, prefix.rpartition("/")[2]))
    if is_one_file(prefix):
        _copy(prefix, copy, verbose, keep)
        return copy
    _copy(f"{prefix}.index", f"{copy}.index", 0, keep)
    _, shard_count = read_index(copy)
    for shard in range(shard_count):
        names = [data_path(path, shard, shard_count) for path in (prefix, copy)]
        _copy(*names, verbose, keep)
    return copy


def _copy(source, target, verbose, keep):
    if keep and os.path.exists(target):
        return
    if verbose:
        print(f"Downloading {source}")
    # An interrupted copy does not get the name of a whole one.
    if (url := web_address(source)) is not None:
        with atomic_file(target) as aside:
            os.replace(_download(url, aside.parent, verbose), aside)
        return
    with (
        open_file(source.removeprefix("file://"), "a checkpoint") as (file, _),
        atomic_file(target) as aside,
        open(aside, "wb") as copy,
    ):
        shutil.copyfileobj(file, copy)


def _download(url, folder, verbose):
    """Fetch a file with `keras.utils.get_file` and return its path."""
    _check_answer(url)
    output = contextlib.nullcontext()
    if not verbose:
        output = contextlib.redirect_stdout(io.StringIO())
    # `get_file` has no argument for a timeout.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    try:
        with output:
            name = Path(url).name
            return keras.utils.get_file(name, url, cache_dir=folder, cache_subdir="")
    # It raises plain `Exception`.
    except Exception as error:
        raise _error(url, error) from error
    finally:
        socket.setdefaulttimeout(before)


def _check_answer(url):
    """Raise unless a server has the file, and says so in time."""
    problems = [TimeoutError(f"no answer within {_PATIENCE:.0f} seconds")]

    def ask():
        request = urllib.request.Request(url, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=_PATIENCE).close()
            problems.clear()
        except urllib.error.HTTPError as error:
            # It keeps the connection open.
            error.close()
            problems[:] = [error]
        except OSError as error:
            problems[:] = [error]

    # In a thread, because the DNS look-up has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if problems:
        raise _error(url, problems[0]) from problems[0]


def _error(url, reason):
    return CheckpointError(
        f"'{url}' cannot be fetched. Reason: {type(reason).__name__}: {reason}."
    )
