"""Readers and converters of other libraries' parameters, and upcycling.

The examples of this module start with:

    >>> name = "vit_tiny_patch8_32_icons"
    >>> classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
    >>> import keras_hub
    >>> sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    >>> vit = keras_hub.models.ViTBackbone((32, 32, 3), patch_size=8, **sizes)
"""

from keras_softmoe.checkpoints import (
    CheckpointError as CheckpointError,
    read_checkpoint as read_checkpoint,
)
from keras_softmoe.converters.add_experts import add_experts as add_experts
from keras_softmoe.converters.dense_model import (
    dense_model as dense_model,
    image_preprocessor as image_preprocessor,
)
from keras_softmoe.converters.sparsify import sparsify as sparsify
from keras_softmoe.converters.to_dense import to_dense_model as to_dense_model
from keras_softmoe.converters.upcycle import upcycle as upcycle
from keras_softmoe.models.conversion import (
    convert_vmoe_checkpoint as convert_vmoe_checkpoint,
)
from keras_softmoe.models.vmoe_params import (
    load_vmoe_params as load_vmoe_params,
    to_vmoe_params as to_vmoe_params,
)
