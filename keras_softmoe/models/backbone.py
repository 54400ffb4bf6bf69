"""The base class of backbones, their size, and encoders of one modality."""

import contextlib
import contextvars
import copy
import functools
import math
import os
from types import SimpleNamespace

import h5py
import keras
import keras_hub
from keras import ops

from keras_softmoe.architecture import Settings, revive_router
from keras_softmoe.keras_adapter.layers import (
    flatten_layers,
    zero_initialization,
)
from keras_softmoe.layer_cost import ITEMSIZE
from keras_softmoe.layers import EncoderBlock, Experts
from keras_softmoe.models.adaptation import (
    enable_lora,
    quantize,
)
from keras_softmoe.models.arguments import check_pairs
from keras_softmoe.models.configuration import (
    base_config,
    dtype_config,
    serialized_routers,
    set_trainable_argument,
    with_quantization,
)
from keras_softmoe.models.mutable_routing import MutableRouting, recompile_on_change
from keras_softmoe.routers import record
from keras_softmoe.sharding.variables import load_shards, weight_files

# Settings that may change later, belong to Keras, or are models.
_KEPT_ELSEWHERE = (
    *("router", "group_images", "dtype"),
    *("image_backbone", "text_backbone"),
)


# Two weights of int4 share a byte.
_WEIGHTS_PER_BYTE = 2
# Weights that a file need not hold: positions are resampled for larger images.
_RESAMPLED = 1 << 25

# Bytes of the files from which weights are loaded; infinite if unknown, `None` for
# models that keep their random weights.
_FILE_BYTES = contextvars.ContextVar("file_bytes", default=None)


@recompile_on_change
class MoEBackbone(keras_hub.models.Backbone, MutableRouting):
    """Base class of backbones whose encoder blocks may be mixtures of experts.

    `models` attaches `from_preset`, `save_to_preset` and `export`. A subclass has
    `check_inputs`, which raises unless arrays are valid inputs of the model.

    Args:
        architecture: the record of the constructor's arguments, see `architecture`.
        inputs: `keras.Input`, or a dict of them.
        outputs: dict of Keras tensors.
        name: str or `None`, name of the model.
        trainable: bool or dict, see `_trainable`.
    """

    # Of configurations, beside the arguments
    further_keys = ("quantization",)

    def __init__(self, architecture, inputs, outputs, name, trainable):
        super().__init__(
            inputs=inputs, outputs=outputs, dtype=architecture.dtype, name=name
        )
        set_trainable_argument(self, trainable)
        self._architecture = architecture
        for setting, value in architecture.flat().items():
            if setting not in _KEPT_ELSEWHERE:
                setattr(self, setting, value)

    @property
    def architecture(self) -> Settings:
        """The current `architecture.Settings` of the model."""
        # Keras reads all properties when it saves or loads weights, so this one does
        # not check again what layers have checked.
        found = copy.copy(self._architecture)
        vars(found)["dtype"] = dtype_config(self)
        if self.moe_layers:
            routing = {"router": list(self.routers.values())}
            vars(found).update(routing, group_images=self.group_images)
        return found

    enable_lora, quantize = enable_lora, quantize

    @property
    def blocks(self):
        """The encoder blocks, a list of `layers.EncoderBlock`."""
        return [self.get_layer(f"block_{index}") for index in range(self.num_layers)]

    @property
    def group_images(self):
        """Int, images (or pairs) that are routed together; `None` for the whole batch.

        Change it with `set_routing`.
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
        else:
            if hasattr(self, "num_layers"):
                _check_blocks(filepath, self.num_layers)
            load_shards(self, filepath, _expert_banks(self), load)

    def default_lora_layer_names(self):
        """Layers that `enable_lora` adapts: attention, MLPs and expert banks."""
        return [
            *super().default_lora_layer_names(),
            "intermediate_dense",
            "gate_dense",
            "output_dense",
        ]

    def get_config(self):
        return {
            **self._architecture.flat(),
            **base_config(self),
            "router": serialized_routers(self),
            "group_images": self.group_images,
        }

    @classmethod
    def from_config(cls, config):
        router = revive_router(config["router"])
        config = with_quantization(config)
        with zero_initialization(_FILE_BYTES.get() is not None):
            return super().from_config({**config, "router": router})


def _check_blocks(filepath, num_layers):
    """Raise if a file has weights of further blocks, which Keras would ignore."""
    # Keras counts the layers of a class: `encoder_block`, `encoder_block_1`, ...
    further = f"layers/encoder_block_{num_layers}"
    for path in weight_files(filepath):
        with h5py.File(path) as file:
            if further in file:
                raise ValueError(
                    f"The weights in '{path}' are those of a model with more blocks, "
                    "and the last ones would be left out. Received: "
                    f"num_layers={num_layers}. Leave `num_layers` as it was saved, or "
                    "start from random weights with `load_weights=False`."
                )


def _expert_banks(model):
    """Return expert banks that files store as they are: no LoRA, not quantized."""
    return [
        bank
        for layer in flatten_layers(model)
        if isinstance(layer, Experts)
        for bank in layer.banks
        if not bank.lora_enabled and bank.quantization_mode is None
    ]


# === Size ===


@contextlib.contextmanager
def weights_follow(file_bytes=math.inf):
    """Scope in which backbones are made whose weights are all loaded afterwards.

    They are initialized with zeros, apart from new heads. A configuration of a few
    bytes can claim more weights than any memory holds, so a backbone that the files
    cannot fill is refused before it is built.

    Args:
        file_bytes: int, the size of the files with the weights, if it is known; `None`
            if none are loaded.
    """
    token = _FILE_BYTES.set(file_bytes)
    try:
        yield
    finally:
        _FILE_BYTES.reset(token)


def check_size(layers, name):
    """Raise if a model is too large to be built.

    Args:
        layers: layers of the model, from its `architecture`.
        name: str or `None`, name of the model.

    Raises:
        ValueError: if the model has more weights than the files hold, or than the
            memory of this machine (unless they lie on accelerators, or are sharded over
            several machines).
    """
    try:
        found = layers.cost(1)
    except ValueError:
        # A custom router may not implement `capacity`. Other errors surface in `build`.
        return
    weights = found.parameters
    file_bytes = _FILE_BYTES.get()
    if file_bytes is not None and weights > _WEIGHTS_PER_BYTE * file_bytes + _RESAMPLED:
        raise ValueError(
            f"The configuration of {name!r} describes a model with {weights:,} "
            f"weights, for which its files with {file_bytes:,} bytes have no place: a "
            "file is damaged, or belongs to another model. Restore it, or pass "
            "`load_weights=False`."
        )
    size, memory = ITEMSIZE["float16"] * weights, _memory()
    if memory is not None and size > memory:
        raise ValueError(
            f"The model {name!r} has {weights:,} weights, which even in half precision "
            f"take {size / 1e9:,.0f} GB. Received: a machine with "
            f"{memory / 1e9:,.0f} GB of memory. Make the model smaller, or build it "
            "under `distribution.expert_parallel` on several devices; "
            "`evaluation.cost` counts it without building it."
        )


def _memory():
    """Return the memory of this machine in bytes; `None` if weights lie elsewhere."""
    if keras.distribution.distribution() is not None or _has_accelerator():
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        # Not on every system
        return None


def _has_accelerator():
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.default_backend() != "cpu"
    if backend == "torch":
        import torch

        return torch.get_default_device().type != "cpu" or torch.cuda.is_available()
    import tensorflow as tf

    return any(d.device_type != "CPU" for d in tf.config.list_physical_devices())


# === One modality ===


# The input of a backbone that holds a modality.
INPUTS = {"image": "images", "text": "token_ids"}


class SingleModality:
    """Mixin of backbones for pairs that encode images alone and texts alone.

    A subclass has `_encode`, which maps a dict of some of the inputs `"image"` and
    `"text"` to a dict of outputs.
    """

    _encoders = None

    def check_inputs(self, x):
        """Raise unless a dict has images and token ids that the model takes."""
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
        # In an object that Keras does not track: encoders are no part of the model.
        if self._encoders is None:
            self._encoders = SimpleNamespace(image=(None, None), text=(None, None))
        encoder, compiled_weights = getattr(self._encoders, modality)
        # It is compiled with its weights, which quantization and LoRA replace.
        weights = [(variable.path, variable.dtype) for variable in self.variables]
        if weights != compiled_weights:
            like = self.input[INPUTS[modality]]
            x = keras.Input(like.shape[1:], dtype=like.dtype, name=INPUTS[modality])
            encoder = ModalityEncoder(
                x, self._encode({modality: x}), name=f"{modality}_encoder"
            )
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


def normalized(x):
    """Return vectors of length one, in float32: `x / (|x| + 1e-8)`."""
    x = ops.cast(x, "float32")
    length = ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))
    return x / (length + 1e-8)
