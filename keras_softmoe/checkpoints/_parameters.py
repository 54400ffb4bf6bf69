"""Parameters of a model from a file of any supported format."""

import json
import os
from pathlib import Path

from keras_softmoe.checkpoints._checkpoint import Checkpoint, read_checkpoint
from keras_softmoe.checkpoints._files import is_remote
from keras_softmoe.checkpoints._safetensors import read_safetensors
from keras_softmoe.checkpoints._stream import CheckpointError
from keras_softmoe.checkpoints._torch_names import read_torch_names
from keras_softmoe.checkpoints._vit import read_vit_checkpoint

CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
_MAX_TEXT = 1 << 20


def read_parameters(source, num_heads=None, image_shape=None, head=True):
    """Open the parameters of a model, in any supported format.

    Args:
        source: str or path: the common part of a sharded checkpoint's files, an `.npz`
            file of an original Vision Transformer or of big_vision, or a `.safetensors`
            file of `timm` or `transformers`. Or a `Checkpoint`.
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
    elif os.fspath(source).endswith(".npz"):
        checkpoint = read_vit_checkpoint(source)
    elif os.fspath(source).endswith(".safetensors"):
        path = os.fspath(source)
        about = read_text_beside(path, CONFIG_FILE)
        arrays = read_safetensors(path)
        return read_torch_names(arrays, path, about, num_heads, image_shape, head)
    else:
        checkpoint = read_checkpoint(source)
    if any(name.startswith("params/") for name in checkpoint):
        return checkpoint.below("params/")
    return checkpoint


def read_text_beside(path, name):
    """Read a JSON file in the directory of another file, a dict.

    Args:
        path: str, the other file.
        name: str, of the JSON file.

    Returns:
        dict, empty if the file does not exist.

    Raises:
        CheckpointError: if it is damaged.
    """
    file = Path(path).parent / name
    if is_remote(path) or not file.is_file():
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
            f"{str(error)[:80]}. Fetch it again, or move the weights elsewhere."
        ) from error
    return found
