"""Readers and converters of other libraries' parameters, and upcycling.

A table of contents. What only reads files is in `checkpoints`, and what needs a model
in `models`, which is imported when it is first used.

What the examples of this module go on from:

    >>> name = "vit_tiny_patch4_32_glyphs"
    >>> classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
"""

from typing import TYPE_CHECKING

from keras_softmoe.checkpoints import Checkpoint as Checkpoint
from keras_softmoe.checkpoints import CheckpointError as CheckpointError
from keras_softmoe.checkpoints import download_checkpoint as download_checkpoint
from keras_softmoe.checkpoints import read_checkpoint as read_checkpoint
from keras_softmoe.checkpoints import read_safetensors as read_safetensors
from keras_softmoe.checkpoints import read_vit_checkpoint as read_vit_checkpoint

if TYPE_CHECKING:
    from keras_softmoe.models.conversion import (
        convert_vmoe_checkpoint as convert_vmoe_checkpoint,
    )
    from keras_softmoe.models.dense_sources import dense_model as dense_model
    from keras_softmoe.models.dense_sources import (
        image_preprocessor as image_preprocessor,
    )
    from keras_softmoe.models.upcycling import upcycle as upcycle
    from keras_softmoe.models.vmoe_params import load_vmoe_params as load_vmoe_params
    from keras_softmoe.models.vmoe_params import to_vmoe_params as to_vmoe_params

_NEED_MODELS = (
    "convert_vmoe_checkpoint",
    "dense_model",
    "image_preprocessor",
    "load_vmoe_params",
    "to_vmoe_params",
    "upcycle",
)


def __getattr__(name):
    if name not in _NEED_MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from keras_softmoe.models.conversion import convert_vmoe_checkpoint
    from keras_softmoe.models.dense_sources import dense_model, image_preprocessor
    from keras_softmoe.models.upcycling import upcycle
    from keras_softmoe.models.vmoe_params import load_vmoe_params, to_vmoe_params

    return {
        "convert_vmoe_checkpoint": convert_vmoe_checkpoint,
        "dense_model": dense_model,
        "image_preprocessor": image_preprocessor,
        "load_vmoe_params": load_vmoe_params,
        "to_vmoe_params": to_vmoe_params,
        "upcycle": upcycle,
    }[name]


def __dir__():
    return [*globals(), *_NEED_MODELS]
