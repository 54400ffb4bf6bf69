"""The base class of backbones: routers, configuration, weights."""

import functools

import h5py
import keras_hub

from keras_softmoe.architecture import Settings, revive_router
from keras_softmoe.backbones._adaptation import (
    check_lora_file,
    has_factors,
    quantize,
)
from keras_softmoe.backbones._mutable_routing import MutableRouting, recompile_on_change
from keras_softmoe.backbones._size import weights_follow
from keras_softmoe.backbones._trainable import (
    set_trainable_argument,
    trainable_argument,
)
from keras_softmoe.keras_adapter.layers import (
    flatten_layers,
    register_parameters,
    zero_initialization,
)
from keras_softmoe.layers import Experts
from keras_softmoe.routers import record
from keras_softmoe.sharding.variables import load_shards, weight_files

# Settings that may change later, belong to Keras, or are models.
_KEPT_ELSEWHERE = (
    *("router", "group_images", "dtype"),
    *("image_backbone", "text_backbone"),
)


@recompile_on_change
class MoEBackbone(keras_hub.models.Backbone, MutableRouting):
    """Base class of backbones whose encoder blocks may be mixtures of experts.

    `models` attaches `from_preset`, `save_to_preset` and `export`.

    Args:
        architecture: the record of the constructor's arguments, see `architecture`.
        inputs: `keras.Input`, or a dict of them.
        outputs: dict of Keras tensors.
        name: str or `None`, name of the model.
        trainable: bool or dict, see `_trainable`.
    """

    def __init__(self, architecture, inputs, outputs, name, trainable):
        super().__init__(
            inputs=inputs, outputs=outputs, dtype=architecture.dtype, name=name
        )
        register_parameters(self)
        set_trainable_argument(self, trainable)
        self._architecture = architecture
        for setting, value in architecture.flat().items():
            if setting not in _KEPT_ELSEWHERE:
                setattr(self, setting, value)

    @property
    def architecture(self) -> Settings:
        """The `architecture.Settings` of the model, as they are now."""
        changed = {"dtype": self._base_config()["dtype"]}
        if self.moe_layers:
            changed |= {
                "router": list(self.routers.values()),
                "group_images": self.group_images,
            }
        return self._architecture.replace(**changed)

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
        return layers[0].group_images if layers else self._architecture.group_images

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
            # LoRA has frozen them; a file has no LoRA.
            for router in routers:
                router["config"]["trainable"] = True
        if all(router == routers[0] for router in routers):
            return routers[0] if routers else None
        return routers

    def get_config(self):
        base = self._base_config()
        return {
            **base,
            **self._architecture.flat(),
            "router": self.serialized_routers(),
            "group_images": self.group_images,
            "dtype": base["dtype"],
        }

    def _base_config(self):
        """The arguments that are no settings, and the dtype that the model has now."""
        return {**super().get_config(), "trainable": trainable_argument(self)}

    @classmethod
    def from_config(cls, config):
        router = revive_router(config["router"])
        with zero_initialization(weights_follow()):
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
    """Expert banks whose weights are the same in a file as in the model."""
    return [
        bank
        for layer in flatten_layers(model)
        if isinstance(layer, Experts)
        for bank in (layer.intermediate_dense, layer.output_dense)
        if not bank.lora_enabled and bank.quantization_mode is None
    ]
