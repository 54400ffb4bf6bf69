"""Catalogue of presets: architectures as data, and directories with weights."""

from keras_softmoe.catalogue.lookup import (
    CONFIG_FILE as CONFIG_FILE,
    METADATA_FILE as METADATA_FILE,
    PRESET_MARKS as PRESET_MARKS,
    Preset as Preset,
    describe as describe,
    explain_errors as explain_errors,
    find_directory as find_directory,
    is_handle as is_handle,
    names as names,
    names_of_kind as names_of_kind,
    read_config as read_config,
    read_metadata as read_metadata,
    rows as rows,
    task_of as task_of,
    write as write,
)
from keras_softmoe.catalogue.row import moe_blocks as moe_blocks
