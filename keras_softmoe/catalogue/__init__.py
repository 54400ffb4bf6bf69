"""Catalogue of presets: architectures as data, and directories with weights.

`papers` has the tables of the papers, `unreleased` converts them to rows, `released`
has released checkpoints, `preset_files` writes a row as a directory, `cards` its model
card, `lookup` finds a name.
"""

from keras_softmoe.catalogue.cards import front_matter as front_matter
from keras_softmoe.catalogue.cards import without_front_matter as without_front_matter
from keras_softmoe.catalogue.lookup import CONFIG_FILE as CONFIG_FILE
from keras_softmoe.catalogue.lookup import METADATA_FILE as METADATA_FILE
from keras_softmoe.catalogue.lookup import PRESET_MARKS as PRESET_MARKS
from keras_softmoe.catalogue.lookup import Preset as Preset
from keras_softmoe.catalogue.lookup import describe as describe
from keras_softmoe.catalogue.lookup import explain_errors as explain_errors
from keras_softmoe.catalogue.lookup import find_directory as find_directory
from keras_softmoe.catalogue.lookup import has_task as has_task
from keras_softmoe.catalogue.lookup import is_handle as is_handle
from keras_softmoe.catalogue.lookup import names as names
from keras_softmoe.catalogue.lookup import names_of_kind as names_of_kind
from keras_softmoe.catalogue.lookup import read_config as read_config
from keras_softmoe.catalogue.lookup import read_metadata as read_metadata
from keras_softmoe.catalogue.lookup import rows as rows
from keras_softmoe.catalogue.lookup import write as write
from keras_softmoe.catalogue.row import moe_blocks as moe_blocks
