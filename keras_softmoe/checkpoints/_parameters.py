"""The parameters of a model, in whichever format they were saved."""

import os

from keras_softmoe.checkpoints._checkpoint import Checkpoint, read_checkpoint
from keras_softmoe.checkpoints._vit import read_vit_checkpoint


def read_parameters(source):
    """Open the parameters of a model.

    Args:
        source: str or path: the common part of a sharded checkpoint's files, or an
            `.npz` file of an original Vision Transformer. Or a `Checkpoint`.

    Returns:
        `Checkpoint` under V-MoE's names. Of a saved state of training it has only the
        parameters.

    Raises:
        CheckpointError: (a `ValueError`) if a file is missing or damaged.
    """
    if isinstance(source, Checkpoint):
        checkpoint = source
    elif os.fspath(source).endswith(".npz"):
        checkpoint = read_vit_checkpoint(source)
    else:
        checkpoint = read_checkpoint(source)
    if any(name.startswith("params/") for name in checkpoint):
        return checkpoint.below("params/")
    return checkpoint
