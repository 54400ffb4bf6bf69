"""Readers of files of other libraries: released checkpoints and their settings.

This module handles arrays, their names and shapes, and no models.
`models/conversion.py` creates models from them.
"""

from keras_softmoe.checkpoints.checkpoint import Checkpoint as Checkpoint
from keras_softmoe.checkpoints.checkpoint import CheckpointError as CheckpointError
from keras_softmoe.checkpoints.checkpoint import LazyArray as LazyArray
from keras_softmoe.checkpoints.downloads import ONE_FILE_SUFFIXES as ONE_FILE_SUFFIXES
from keras_softmoe.checkpoints.downloads import (
    download_checkpoint as download_checkpoint,
)
from keras_softmoe.checkpoints.downloads import is_one_file as is_one_file
from keras_softmoe.checkpoints.downloads import web_address as web_address
from keras_softmoe.checkpoints.formats import CONFIG_FILE as CONFIG_FILE
from keras_softmoe.checkpoints.formats import PREPROCESSOR_FILE as PREPROCESSOR_FILE
from keras_softmoe.checkpoints.formats import read_checkpoint as read_checkpoint
from keras_softmoe.checkpoints.formats import read_parameters as read_parameters
from keras_softmoe.checkpoints.formats import read_text_beside as read_text_beside
from keras_softmoe.checkpoints.translation import count_patches as count_patches
from keras_softmoe.checkpoints.translation import place_tokens as place_tokens
from keras_softmoe.checkpoints.translation import same as same
from keras_softmoe.checkpoints.translation import token as token
from keras_softmoe.checkpoints.translation import translate as translate
from keras_softmoe.checkpoints.translation import vector as vector
from keras_softmoe.checkpoints.vit_settings import fits_positions as fits_positions
from keras_softmoe.checkpoints.vit_settings import (
    read_vit_settings as read_vit_settings,
)
