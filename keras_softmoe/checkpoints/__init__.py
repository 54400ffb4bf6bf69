"""Readers of files that others wrote: released checkpoints, and what is in them.

This room knows arrays, their names and shapes, and no model. `models/conversion.py`
makes models of what it reads.
"""

from keras_softmoe.checkpoints._architecture import (
    read_architecture as read_architecture,
)
from keras_softmoe.checkpoints._checkpoint import Checkpoint as Checkpoint
from keras_softmoe.checkpoints._checkpoint import read_checkpoint as read_checkpoint
from keras_softmoe.checkpoints._download import (
    download_checkpoint as download_checkpoint,
)
from keras_softmoe.checkpoints._parameters import read_parameters as read_parameters
from keras_softmoe.checkpoints._stream import CheckpointError as CheckpointError
from keras_softmoe.checkpoints._vit import read_vit_checkpoint as read_vit_checkpoint
