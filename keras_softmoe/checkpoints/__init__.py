"""Readers of files of other libraries: released checkpoints and their settings.

This module handles arrays, their names and shapes, and no models.
`models/conversion.py` creates models from them.
"""

from keras_softmoe.checkpoints._checkpoint import Checkpoint as Checkpoint
from keras_softmoe.checkpoints._checkpoint import LazyArray as LazyArray
from keras_softmoe.checkpoints._files import web_address as web_address
from keras_softmoe.checkpoints._parameters import CONFIG_FILE as CONFIG_FILE
from keras_softmoe.checkpoints._parameters import (
    ONE_FILE_SUFFIXES as ONE_FILE_SUFFIXES,
)
from keras_softmoe.checkpoints._parameters import PREPROCESSOR_FILE as PREPROCESSOR_FILE
from keras_softmoe.checkpoints._parameters import (
    download_checkpoint as download_checkpoint,
)
from keras_softmoe.checkpoints._parameters import is_one_file as is_one_file
from keras_softmoe.checkpoints._parameters import read_checkpoint as read_checkpoint
from keras_softmoe.checkpoints._parameters import read_parameters as read_parameters
from keras_softmoe.checkpoints._parameters import read_text_beside as read_text_beside
from keras_softmoe.checkpoints._stream import CheckpointError as CheckpointError
from keras_softmoe.checkpoints._translation import count_patches as count_patches
from keras_softmoe.checkpoints._translation import place_tokens as place_tokens
from keras_softmoe.checkpoints._translation import same as same
from keras_softmoe.checkpoints._translation import token as token
from keras_softmoe.checkpoints._translation import translate as translate
from keras_softmoe.checkpoints._translation import vector as vector
from keras_softmoe.checkpoints._vit_settings import fits_positions as fits_positions
from keras_softmoe.checkpoints._vit_settings import (
    read_vit_settings as read_vit_settings,
)
