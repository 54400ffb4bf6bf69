"""What the backbones share: routers, presets, mutable settings."""

import functools

import h5py
import keras
import keras_hub

from keras_softmoe.keras_adapter import (
    flatten_layers,
    register_parameters,
    without_random_numbers,
)
from keras_softmoe.layers import Experts
from keras_softmoe.models._adaptation import (
    check_lora_file,
    has_factors,
    quantize,
)
from keras_softmoe.models._mutable_routing import MutableRouting, recompile_on_change
from keras_softmoe.models._size import weights_follow
from keras_softmoe.models._trainable import (
    set_trainable_argument,
    trainable_argument,
)
from keras_softmoe.routers import record
from keras_softmoe.sharding.variables import load_shards, weight_files


@recompile_on_change
class MoEBackbone(keras_hub.models.Backbone, MutableRouting):
    """Base class of backbones whose encoder blocks may be mixtures of experts.

    A subclass puts the model together from the layers in `layers.parts`, and then calls
    `keep_arguments`.
    """

    def __init__(self, *args, trainable=True, **kwargs):
        super().__init__(*args, **kwargs)
        register_parameters(self)
        set_trainable_argument(self, trainable)

    def keep_arguments(self, encoder, **arguments):
        """Keep the arguments of the constructor as attributes, for `get_config`.

        Args:
            encoder: `layers.Encoder`, whose settings are kept as well.
            **arguments: all arguments that are not those of the encoder.
        """
        arguments |= {"moe_layers": encoder.moe_layers, **encoder.moe_settings}
        self._argument_names = tuple(arguments)
        # Kept by the mixtures of experts, in which it may change; a dense model has
        # none.
        self._group_images = arguments.pop("group_images")
        for name, value in arguments.items():
            setattr(self, name, value)

    quantize = quantize

    @property
    def blocks(self):
        """The encoder blocks, a list of `layers.EncoderBlock`."""
        return [self.get_layer(f"block_{index}") for index in range(self.num_layers)]

    @property
    def group_images(self):
        """Int, images (or pairs) that are routed together; `None` for the whole batch.

        To be set by `set_routing`.
        """
        layers = [block.moe for block in self.blocks if block.moe is not None]
        return layers[0].group_images if layers else self._group_images

    @property
    def routers(self):
        """Dict from the index of each MoE block to its router."""
        blocks = self.blocks
        return {index: blocks[index].moe.router for index in self.moe_layers}

    @property
    def router(self):
        """The router of the first MoE block, `None` in a dense model."""
        return next(iter(self.routers.values()), None)

    def decisions_of(self, function):
        """Dict from each MoE block to its `Decision` in the call of a function."""
        with record() as decisions:
            function()
        return {index: decisions[r.path] for index, r in self.routers.items()}

    def load_weights(self, filepath, skip_mismatch=False, **kwargs):
        load = functools.partial(
            super().load_weights, filepath, skip_mismatch=skip_mismatch, **kwargs
        )
        if skip_mismatch or kwargs:
            load()
        else:
            if hasattr(self, "num_layers"):
                _check_blocks(filepath, self.num_layers)
            load_shards(self, filepath, _expert_banks(self), load)

    def default_lora_layer_names(self):
        """Layers that `enable_lora` adapts: attention, MLPs and expert banks."""
        return [
            *super().default_lora_layer_names(),
            "intermediate_dense",
            "output_dense",
        ]

    def load_lora_weights(self, filepath):
        check_lora_file(self, filepath)
        super().load_lora_weights(filepath)

    def serialized_routers(self):
        """For `get_config`: one router if all blocks have equal ones, else a list."""
        blocks = self.blocks
        routers = [blocks[i].moe.get_config()["router"] for i in self.moe_layers]
        if has_factors(self):
            # Frozen by LoRA, of which a file knows nothing.
            for router in routers:
                router["config"]["trainable"] = True
        if all(router == routers[0] for router in routers):
            return routers[0] if routers else None
        return routers

    def get_config(self):
        arguments = {name: getattr(self, name) for name in self._argument_names}
        return {
            **super().get_config(),
            "trainable": trainable_argument(self),
            **arguments,
            "router": self.serialized_routers(),
        }

    @classmethod
    def from_config(cls, config):
        router = config["router"]
        if isinstance(router, dict | list | tuple):
            router = keras.saving.deserialize_keras_object(router)
        with without_random_numbers(weights_follow()):
            return super().from_config({**config, "router": router})


def _check_blocks(filepath, num_layers):
    """Raise if a file has weights of further blocks, which Keras would leave out."""
    # Keras counts the layers of a class: `encoder_block`, `encoder_block_1`, ...
    further = f"layers/encoder_block_{num_layers}"
    for path in weight_files(filepath):
        with h5py.File(path) as file:
            if further in file:
                raise ValueError(
                    f"The weights in '{path}' are those of a model with more blocks, "
                    "the last of which would be left out. Received: "
                    f"num_layers={num_layers}. Leave `num_layers` as it was saved, or "
                    "start anew with `load_weights=False`."
                )


def _expert_banks(model):
    """The kernels and biases of experts, of which a file holds what the model does."""
    return [
        bank
        for layer in flatten_layers(model)
        if isinstance(layer, Experts)
        for bank in (layer.intermediate_dense, layer.output_dense)
        if not bank.lora_enabled and bank.quantization_mode is None
    ]
