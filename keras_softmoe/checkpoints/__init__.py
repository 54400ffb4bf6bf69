"""Readers of files of other libraries: released checkpoints and their settings.

This module handles arrays, their names and shapes, and no models.
`models/conversion.py` creates models from them.
"""

from keras_softmoe.checkpoints.formats import (
    CONFIG_FILE as CONFIG_FILE,
    ONE_FILE_SUFFIXES as ONE_FILE_SUFFIXES,
    PREPROCESSOR_FILE as PREPROCESSOR_FILE,
    download_checkpoint as download_checkpoint,
    is_one_file as is_one_file,
    read_checkpoint as read_checkpoint,
    read_parameters as read_parameters,
    read_text_beside as read_text_beside,
)
from keras_softmoe.checkpoints.msgpack_stream import CheckpointError as CheckpointError
from keras_softmoe.checkpoints.opening import web_address as web_address
from keras_softmoe.checkpoints.translation import (
    count_patches as count_patches,
    place_tokens as place_tokens,
    same as same,
    token as token,
    translate as translate,
    vector as vector,
)
from keras_softmoe.checkpoints.vit_settings import (
    fits_positions as fits_positions,
    read_vit_settings as read_vit_settings,
)
from keras_softmoe.checkpoints.vmoe import (
    Checkpoint as Checkpoint,
    LazyArray as LazyArray,
)
