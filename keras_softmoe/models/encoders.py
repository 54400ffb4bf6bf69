"""Encoding images alone and text alone, with a model that was trained on pairs."""

import keras
from keras import ops

from keras_softmoe.layers.encoder_block import EncoderBlock
from keras_softmoe.models.live_routing import LiveRouting, follows_routers

# The input of a backbone that holds a modality.
INPUTS = {"image": "images", "text": "token_ids"}


class SingleModality:
    """Mixin of backbones for pairs, which can also encode one half of them.

    A subclass has `_encode`, which maps a dict of some of the inputs `"image"` and
    `"text"` to a dict of outputs.
    """

    @property
    def image_encoder(self):
        """`keras.Model` from `images` to `"image_embedding"` and its tokens."""
        return self._encoder("image")

    @property
    def text_encoder(self):
        """`keras.Model` from `token_ids` to `"text_embedding"` and its tokens."""
        return self._encoder("text")

    def _encoder(self, modality):
        # Beside Keras' bookkeeping, to which it would be a part of the model.
        encoders = self.__dict__.setdefault("_encoders", {})
        encoder, compiled_weights = encoders.get(modality, (None, None))
        # Quantized weights, or LoRA's, are others than those that it has compiled.
        weights = [(variable.path, variable.dtype) for variable in self.variables]
        if weights != compiled_weights:
            like = self.input[INPUTS[modality]]
            x = keras.Input(like.shape[1:], dtype=like.dtype, name=INPUTS[modality])
            encoder = Encoder(
                x, self._encode({modality: x}), name=f"{modality}_encoder"
            )
            encoders[modality] = encoder, weights
        return encoder


@follows_routers
class Encoder(keras.Model, LiveRouting):
    """The part of a backbone that one modality passes through."""

    @property
    def routers(self):
        """Dict from the name of each MoE block to its router."""
        blocks = [x for x in self._flatten_layers() if isinstance(x, EncoderBlock)]
        return {block.path: block.moe.router for block in blocks if block.moe}


def normalized(x):
    """Vectors of length one, in float32; `x / (|x| + 1e-8)`."""
    x = ops.cast(x, "float32")
    length = ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))
    return x / (length + 1e-8)
