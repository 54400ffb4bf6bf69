"""Opening of checkpoints of any supported format.

A new format is a reader in a file of its own, and a line in `read_checkpoint`.
"""

import json
import os
from pathlib import Path

from keras_softmoe.checkpoints.checkpoint import Checkpoint, CheckpointError
from keras_softmoe.checkpoints.downloads import local_copy
from keras_softmoe.checkpoints.npz import read_vit_checkpoint
from keras_softmoe.checkpoints.safetensors import read_safetensors, read_torch_names
from keras_softmoe.checkpoints.vmoe import read_sharded

CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
_MAX_TEXT = 1 << 20


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
        source: str or path, or a URL (`https://...`, or `gs://bucket/name` of a public
            bucket), which is downloaded once.

    Returns:
        `Mapping` from name to NumPy array, with the attributes `shapes` and `dtypes`
        (dicts by name, known without reading the arrays). Arrays of bfloat16 have the
        dtype `ml_dtypes.bfloat16`.

    Raises:
        CheckpointError: (a `ValueError`) if a file is missing, damaged, or cannot be
            fetched. Later, if an array can no longer be read.

    Source: V-MoE's released code (format of its checkpoints, version 20220622);
    Dosovitskiy et al. 2021 and big_vision (names); safetensors (version 0.8).

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
        reason = str(error)[:80]
        raise CheckpointError(
            f"'{file}', which describes the weights beside it, cannot be read: "
            f"{reason}."
        ) from error
    return found
