"""The base class of backbones, their size, and encoders of one modality."""

import contextvars
import functools
import os
from types import SimpleNamespace

import h5py
import keras
import keras_hub
from keras import ops

from keras_softmoe.architecture import Settings, revive_router
from keras_softmoe.keras_adapter.layers import (
    during,
    flatten_layers,
    zero_initialization,
)
from keras_softmoe.layers import EncoderBlock, Experts
from keras_softmoe.models import configuration
from keras_softmoe.models.adaptation import EXPERT_LAYERS, enable_lora, quantize
from keras_softmoe.models.arguments import check_pairs
from keras_softmoe.models.mutable_routing import MutableRouting, recompile_on_change
from keras_softmoe.routers import record
from keras_softmoe.sharding.variables import load_shards, weight_files

# Settings that are properties, belong to Keras, or are models.
_NO_ATTRIBUTES = ("router", "group_images", "dtype", "image_backbone", "text_backbone")
# Two weights of int4 share a byte.
_WEIGHTS_PER_BYTE = 2
# Weights that a file need not hold: positions are resampled for larger images.
_RESAMPLED = 1 << 25

# Bytes of the files with the weights to load; infinite if unknown, `None` without any.
_FILE_BYTES = contextvars.ContextVar("file_bytes", default=None)


@recompile_on_change
class MoEBackbone(keras_hub.models.FeaturePyramidBackbone, MutableRouting):
    """Base class of backbones whose encoder blocks may be mixtures of experts.

    Only `ViTMoEBackbone` has a pyramid. It could not have that base class besides this
    one: Keras inserts its functional model above `Backbone` once for each way there.

    `models` attaches `from_preset`, `save_to_preset` and `export`. A subclass has
    `check_inputs`, which raises unless arrays are valid inputs of the model.

    Args:
        architecture: the record of the constructor's arguments, see `architecture`.
        inputs: `keras.Input`, or a dict of them.
        outputs: dict of Keras tensors.
        name: str or `None`, name of the model.
        trainable: bool or dict, see `configuration.set_trainable_argument`.

    Attributes:
        hidden_dim, num_layers, moe_layers, image_shape, ...: all settings of the record
            but `router`, `group_images` and `dtype`, which may change later.
    """

    # Keys of configurations besides the arguments
    further_keys = ("quantization",)

    def __init__(self, architecture, inputs, outputs, name, trainable):
        super().__init__(inputs, outputs, dtype=architecture.dtype, name=name)
        if trainable is not True:
            configuration.set_trainable_argument(self, trainable)
        self._architecture = architecture
        # `self.hidden_dim`, `self.num_layers`, ..., see the attributes above.
        for setting, value in vars(architecture).items():
            if setting not in _NO_ATTRIBUTES:
                setattr(self, setting, value)

    @property
    def architecture(self) -> Settings:
        """The current `architecture.Settings` of the model."""
        changed = {"dtype": configuration.serialized_dtype(self)}
        if self.moe_layers:
            changed["router"] = list(self.routers.values())
            changed["group_images"] = self.group_images
        return self._architecture.with_values(**changed)

    enable_lora, quantize = enable_lora, quantize

    @property
    def blocks(self):
        """The encoder blocks, a list of `layers.EncoderBlock`."""
        return [self.get_layer(f"block_{index}") for index in range(self.num_layers)]

    @property
    def group_images(self):
        """Images (or pairs) per group, an int; `None` for the whole batch."""
        for block in self.blocks:
            if block.moe is not None:
                return block.moe.group_images
        return self._architecture.group_images

    @property
    def routers(self):
        """Dict from the index of each MoE block to its router."""
        indices = self.moe_layers
        return {i: self.get_layer(f"block_{i}").moe.router for i in indices}

    @property
    def router(self):
        """The router of the first MoE block, `None` in a dense model."""
        return next(iter(self.routers.values()), None)

    def decisions_of(self, function):
        """Call a function; return a dict from each MoE block to its `Decision`."""
        with record() as decisions:
            function()
        return {index: decisions[r.path] for index, r in self.routers.items()}

    def predict(self, x, *args, **kwargs):
        self.check_inputs(x)
        return super().predict(x, *args, **kwargs)

    def load_weights(self, filepath, skip_mismatch=False, **kwargs):
        load = functools.partial(
            super().load_weights, filepath, skip_mismatch=skip_mismatch, **kwargs
        )
        if skip_mismatch or kwargs:
            load()
            return
        # 1. Keras would ignore the weights of further blocks. It counts the layers of a
        # class: `encoder_block`, `encoder_block_1`, ...
        num_layers = getattr(self, "num_layers", None)
        for path in weight_files(filepath) if num_layers else ():
            with h5py.File(path) as file:
                if f"layers/encoder_block_{num_layers}" in file:
                    raise ValueError(
                        f"The weights in '{path}' belong to a model with more blocks. "
                        f"Received: num_layers={num_layers}. Leave `num_layers` as it "
                        "was saved, or pass `load_weights=False`."
                    )
        # 2. A process reads its shards of expert banks that Keras loads unchanged.
        experts = (x for x in flatten_layers(self) if isinstance(x, Experts))
        banks = [
            bank
            for layer in experts
            for bank in layer.banks
            if not bank.lora_enabled and bank.quantization_mode is None
        ]
        load_shards(self, filepath, banks, load)

    def default_lora_layer_names(self):
        """Layers that `enable_lora` adapts: attention, MLPs and expert banks."""
        return [*super().default_lora_layer_names(), *EXPERT_LAYERS]

    def get_config(self):
        return {
            **self._architecture.flat(),
            **configuration.base_config(self),
            "router": configuration.serialized_routers(self),
            "group_images": self.group_images,
        }

    @classmethod
    def from_config(cls, config):
        router = revive_router(config["router"])
        if "quantization" in config:
            config = configuration.with_quantization(config)
        with zero_initialization(_FILE_BYTES.get() is not None):
            return super().from_config({**config, "router": router})


# === Size ===


def weights_follow(file_bytes):
    """Scope in which backbones are made whose weights are all loaded afterwards.

    They start as zeros, apart from new heads. A configuration can claim more weights
    than any memory holds: what files of this size cannot fill is refused and not built.
    The size is `None` without any.
    """
    return during(_FILE_BYTES, file_bytes)


def check_size(architecture, name):
    """Raise if a model has more weights than its files hold, or than the memory.

    Memory is this machine's, unless weights lie on accelerators or are sharded over
    machines. `architecture` is the record of the model, `name` may be `None`.
    """
    weights, file_bytes = architecture.least_weights, _FILE_BYTES.get()
    if file_bytes is not None and weights > _WEIGHTS_PER_BYTE * file_bytes + _RESAMPLED:
        raise ValueError(
            f"The configuration of {name!r} describes a model with at least "
            f"{weights:,} weights, too many for its files: one is damaged, or belongs "
            f"to another model. Received: files of {file_bytes:,} bytes. Restore it, "
            "or pass `load_weights=False`."
        )
    # In half precision
    size, memory = 2 * weights, _memory()
    if memory is not None and size > memory:
        raise ValueError(
            f"The model {name!r} has at least {weights:,} weights, which even in half "
            f"precision take {size / 1e9:,.0f} GB. Received: a machine with "
            f"{memory / 1e9:,.0f} GB of memory. Build it under "
            "`distribution.expert_parallel` on several devices."
        )


def _memory():
    """Return the memory of this machine in bytes; `None` if weights lie elsewhere."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        is_elsewhere = jax.default_backend() != "cpu"
    elif backend == "torch":
        import torch

        device = torch.get_default_device().type
        is_elsewhere = device != "cpu" or torch.cuda.is_available()
    else:
        import tensorflow as tf

        devices = tf.config.list_physical_devices()
        is_elsewhere = any(device.device_type != "CPU" for device in devices)
    if is_elsewhere or keras.distribution.distribution() is not None:
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        # Not on every system
        return None


# === One modality ===


# The input of a backbone that holds a modality.
INPUTS = {"image": "images", "text": "token_ids"}


class SingleModality:
    """Mixin of backbones for pairs that encode images alone and texts alone.

    A subclass has `_encode`: a dict of inputs (`"image"`, `"text"`) to one of outputs.
    """

    _encoders = None

    def check_inputs(self, x):
        """Raise unless a dict has images and token ids that the model accepts."""
        if isinstance(x, dict):
            check_pairs(self, x.get("images"), x.get("token_ids"))

    @property
    def image_encoder(self):
        """`keras.Model` from `images` to `"image_embedding"` and its tokens."""
        return self._encoder("image")

    @property
    def text_encoder(self):
        """`keras.Model` from `token_ids` to `"text_embedding"` and its tokens."""
        return self._encoder("text")

    def _encoder(self, modality):
        # In an object that Keras does not track: encoders are not part of the model.
        if self._encoders is None:
            self._encoders = SimpleNamespace(image=(None, None), text=(None, None))
        encoder, compiled_weights = getattr(self._encoders, modality)
        # A compiled encoder has built-in weights, which quantization and LoRA replace.
        weights = [(variable.path, variable.dtype) for variable in self.variables]
        if weights != compiled_weights:
            like = self.input[INPUTS[modality]]
            x = keras.Input(like.shape[1:], dtype=like.dtype, name=INPUTS[modality])
            outputs = self._encode({modality: x})
            encoder = ModalityEncoder(x, outputs, name=f"{modality}_encoder")
            setattr(self._encoders, modality, (encoder, weights))
        return encoder


@keras.saving.register_keras_serializable(package="keras_softmoe")
@recompile_on_change
class ModalityEncoder(keras.Model, MutableRouting):
    """The part of a backbone that one modality passes through."""

    quantize = quantize

    @property
    def routers(self):
        """Dict from the name of each MoE block to its router."""
        blocks = [x for x in flatten_layers(self) if isinstance(x, EncoderBlock)]
        return {block.path: block.moe.router for block in blocks if block.moe}


@keras.saving.register_keras_serializable(package="keras_softmoe")
class _Normalized(keras.Operation):
    """One operation: PyTorch would make a tensor of a number in a graph."""

    def call(self, x):
        x = ops.cast(x, "float32")
        length = ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))
        return x / (length + 1e-8)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")


def normalized(x):
    """Return vectors of length one in float32, `x / (|x| + 1e-8)`."""
    return _Normalized()(x)
