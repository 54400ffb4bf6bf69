"""Opening of checkpoints of any supported format.

A new format is a reader in a file of its own, and a line in `read_checkpoint`.
"""

import json
import os
from pathlib import Path

from keras_softmoe.checkpoints.checkpoint import Checkpoint, CheckpointError
from keras_softmoe.checkpoints.downloads import local_copy
from keras_softmoe.checkpoints.npz import read_vit_checkpoint
from keras_softmoe.checkpoints.safetensors import read_safetensors
from keras_softmoe.checkpoints.torch_names import read_torch_names
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
        (dicts by name, known without reading the arrays). Nothing is cached. Arrays of
        bfloat16 have the dtype `ml_dtypes.bfloat16`.

    Raises:
        CheckpointError: (a `ValueError`) if a file is missing, damaged, cannot be
            fetched, or does not fit the others. Later, if an array can no longer be
            read.

    Source: V-MoE's released code (format of its checkpoints, version 20220622);
    Dosovitskiy et al. 2021, released code, and big_vision's (names of the parameters);
    safetensors' documentation (version 0.8).

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

    Args:
        source: as in `read_checkpoint`, where `.safetensors` files are those of `timm`
            and `transformers`. Or a `Checkpoint` under V-MoE's names.
        num_heads: int, for a `.safetensors` file if the width does not determine it.
        image_shape: `(height, width, channels)`, for a `.safetensors` file of a model
            for images that are not square.
        head: bool, whether to read the head. If `False`, both heads of a distilled
            model are left out of a `.safetensors` file.

    Returns:
        `Checkpoint` under V-MoE's names. From a saved training state it has only the
        parameters.

    Raises:
        CheckpointError: (a `ValueError`) if a file is missing or damaged.
    """
    if isinstance(source, Checkpoint):
        checkpoint = source
    else:
        path = os.fspath(source)
        checkpoint = read_checkpoint(path)
        if path.endswith(".safetensors"):
            about = read_text_beside(path, CONFIG_FILE)
            return read_torch_names(
                checkpoint, path, about, num_heads, image_shape, head
            )
    if any(name.startswith("params/") for name in checkpoint):
        return checkpoint.below("params/")
    return checkpoint


def read_text_beside(path, name):
    """Return the dict in a JSON file beside another file, empty without such a file.

    Raises:
        CheckpointError: if it is damaged.
    """
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
            f"The file '{file}', which describes the model beside it, cannot be read: "
            f"{str(error)[:80]}."
        ) from error
    return found
