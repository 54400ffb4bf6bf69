"""Readers of files of other libraries: arrays, names and shapes, and no models."""

from keras_softmoe.checkpoints.checkpoint import (
    Checkpoint as Checkpoint,
    CheckpointError as CheckpointError,
    LazyArray as LazyArray,
)
from keras_softmoe.checkpoints.formats import (
    CONFIG_FILE as CONFIG_FILE,
    ONE_FILE_SUFFIXES as ONE_FILE_SUFFIXES,
    PREPROCESSOR_FILE as PREPROCESSOR_FILE,
    download_checkpoint as download_checkpoint,
    is_one_file as is_one_file,
    read_checkpoint as read_checkpoint,
    read_parameters as read_parameters,
    read_text_beside as read_text_beside,
    web_address as web_address,
)
from keras_softmoe.checkpoints.translation import (
    count_patches as count_patches,
    place_tokens as place_tokens,
    same as same,
    token as token,
    translate as translate,
)
from keras_softmoe.checkpoints.vit_settings import (
    fits_positions as fits_positions,
    read_vit_settings as read_vit_settings,
)
