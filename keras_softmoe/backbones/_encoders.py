"""Encoding images alone and text alone, with a model that was trained on pairs."""

from types import SimpleNamespace

import keras
from keras import ops

from keras_softmoe.backbones._adaptation import quantize
from keras_softmoe.backbones._mutable_routing import MutableRouting, recompile_on_change
from keras_softmoe.keras_adapter.layers import flatten_layers
from keras_softmoe.layers import EncoderBlock

# The input of a backbone that holds a modality.
INPUTS = {"image": "images", "text": "token_ids"}


class SingleModality:
    """Mixin of backbones for pairs, which can also encode one half of them.

    A subclass has `_encode`, which maps a dict of some of the inputs `"image"` and
    `"text"` to a dict of outputs.
    """

    _encoders = None

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
        # Quantized weights, or LoRA's, are others than those that it has compiled.
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
    """Vectors of length one, in float32; `x / (|x| + 1e-8)`."""
    x = ops.cast(x, "float32")
    length = ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))
    return x / (length + 1e-8)
