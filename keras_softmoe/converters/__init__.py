"""Readers and writers of other libraries' parameters, and upcycling."""

from keras_softmoe.converters.checkpoint import Checkpoint as Checkpoint
from keras_softmoe.converters.checkpoint import read_checkpoint as read_checkpoint
from keras_softmoe.converters.convert import (
    convert_as_configured as convert_as_configured,
)
from keras_softmoe.converters.convert import (
    convert_vmoe_checkpoint as convert_vmoe_checkpoint,
)
from keras_softmoe.converters.download import (
    download_checkpoint as download_checkpoint,
)
from keras_softmoe.converters.stream import CheckpointError as CheckpointError
from keras_softmoe.converters.upcycling import upcycle as upcycle
from keras_softmoe.converters.vit import read_vit_checkpoint as read_vit_checkpoint
from keras_softmoe.converters.vmoe import load_vmoe_params as load_vmoe_params
from keras_softmoe.converters.vmoe import to_vmoe_params as to_vmoe_params
