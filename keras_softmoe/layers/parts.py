"""What the models are made of: their layers, not built, and what those cost."""

import inspect
from typing import NamedTuple

import keras

from keras_softmoe.checks import check_choice, check_whole_numbers
from keras_softmoe.costs import LayerCost, cost_of
from keras_softmoe.keras_adapter import flatten_layers
from keras_softmoe.layers._contrastive import ContrastiveScale
from keras_softmoe.layers._encoder import Encoder
from keras_softmoe.layers._moe import MoE
from keras_softmoe.layers._prefix_tokens import ClassToken, Registers
from keras_softmoe.layers.embedding import (
    POSITION_EMBEDDINGS,
    PatchEmbedding,
    PositionEmbedding,
    TokenEmbedding,
    patch_grid,
)
from keras_softmoe.layers.pooling import POOLINGS, TEXT_POOLINGS, AttentionPooling
from keras_softmoe.ops.position import RESAMPLINGS

MODALITIES = ("image", "text")
# Of the encoder's arguments those that only models of images take, for they are what
# dense ones were trained with.
_OF_IMAGES = ("activation", "layer_norm_epsilon", "layer_scale")


class ImageParts(NamedTuple):
    """The layers of a `models.ViTMoEBackbone`.

    Attributes:
        embedding: list of the layers from images to tokens.
        encoder: `Encoder`.
        attention_pooling: `AttentionPooling` or `None`.
        pre_logits: `keras.layers.Dense` or `None`.
    """

    embedding: list
    encoder: Encoder
    attention_pooling: AttentionPooling | None
    pre_logits: keras.layers.Dense | None

    @classmethod
    def make(
        cls,
        image_shape,
        patch_size,
        pooling="token",
        position_embedding="learned",
        position_resampling="bilinear",
        num_registers=0,
        representation_dim=None,
        dtype=None,
        **encoder,
    ):
        """Make the layers from arguments of the backbone; none is built.

        Raises:
            ValueError: if an argument is not among the accepted values, or some do not
                go together.
        """
        grid = patch_grid(image_shape, patch_size)
        check_choice("pooling", pooling, POOLINGS)
        check_choice("position_embedding", position_embedding, POSITION_EMBEDDINGS)
        check_choice("position_resampling", position_resampling, RESAMPLINGS)
        check_whole_numbers(0, num_registers=num_registers)
        blocks = Encoder(dtype=dtype, **encoder)
        embedding = [_patch_embedding(patch_size, encoder, dtype)]
        has_class_token = pooling == "token"
        if has_class_token:
            embedding.append(ClassToken(dtype=dtype, name="class_token"))
        if position_embedding != "none":
            embedding.append(
                PositionEmbedding(
                    grid,
                    kind=position_embedding,
                    has_class_token=has_class_token,
                    resampling=position_resampling,
                    dtype=dtype,
                    name="position_embedding",
                )
            )
        if num_registers:
            embedding.append(
                Registers(num_registers, has_class_token, dtype=dtype, name="registers")
            )
        attention_pooling = pre_logits = None
        if pooling == "map":
            attention_pooling = _attention_pooling("attention_pooling", encoder, dtype)
        if representation_dim is not None:
            check_whole_numbers(1, representation_dim=representation_dim)
            pre_logits = keras.layers.Dense(
                int(representation_dim),
                activation="tanh",
                kernel_initializer="lecun_normal",
                dtype=dtype,
                name="pre_logits",
            )
        return cls(embedding, blocks, attention_pooling, pre_logits)

    def cost(self, images_shape, training=False):
        """What the layers cost for images of a shape, a `costs.LayerCost`."""
        total, shape = _chain_cost(self.embedding, images_shape)
        total += self.encoder.cost(shape, training)
        if self.attention_pooling is not None:
            total += self.attention_pooling.cost(shape)
        if self.pre_logits is not None:
            total += cost_of(self.pre_logits, (shape[0], shape[2]))
        return total


class TextParts(NamedTuple):
    """The layers of a `models.TextMoEBackbone`.

    Attributes:
        embedding: list of the layer from token ids to tokens.
        encoder: `Encoder`.
        attention_pooling: `AttentionPooling` or `None`.
    """

    embedding: list
    encoder: Encoder
    attention_pooling: AttentionPooling | None

    @classmethod
    def make(
        cls,
        vocabulary_size,
        sequence_length,
        pooling="last",
        mask_padding=False,
        dtype=None,
        **encoder,
    ):
        """Make the layers from arguments of the backbone; none is built.

        Raises:
            ValueError: as `ImageParts.make`.
        """
        check_choice("pooling", pooling, TEXT_POOLINGS)
        blocks = Encoder(dtype=dtype, **encoder)
        text = (vocabulary_size, sequence_length, mask_padding)
        embedding = [_token_embedding(*text, encoder, dtype)]
        attention_pooling = None
        if pooling == "map":
            attention_pooling = _attention_pooling("attention_pooling", encoder, dtype)
        return cls(embedding, blocks, attention_pooling)

    def cost(self, token_ids_shape, training=False):
        """What the layers cost for texts of a shape, a `costs.LayerCost`."""
        total, shape = _chain_cost(self.embedding, token_ids_shape)
        total += self.encoder.cost(shape, training)
        if self.attention_pooling is not None:
            total += self.attention_pooling.cost(shape)
        return total


class PairParts(NamedTuple):
    """The layers of a `models.LIMoEBackbone`.

    Attributes:
        embedding: dict from modalities to the lists of layers from input to tokens.
        encoder: `Encoder`.
        attention_pooling: dict from modalities to `AttentionPooling` layers.
        projection: dict from modalities to `keras.layers.Dense` layers.
        scale: `ContrastiveScale`.
    """

    embedding: dict
    encoder: Encoder
    attention_pooling: dict
    projection: dict
    scale: ContrastiveScale

    @classmethod
    def make(
        cls,
        image_shape,
        patch_size,
        vocabulary_size,
        sequence_length,
        embedding_dim=512,
        image_pooling="gap",
        text_pooling="gap",
        logit_scale=10.0,
        logit_bias=None,
        group_images=32,
        mask_padding=False,
        dtype=None,
        **encoder,
    ):
        """Make the layers from arguments of the backbone; none is built.

        Raises:
            ValueError: as `ImageParts.make`.
        """
        grid = patch_grid(image_shape, patch_size)
        check_whole_numbers(1, embedding_dim=embedding_dim)
        poolings = {"image": image_pooling, "text": text_pooling}
        for modality, pooling in poolings.items():
            check_choice(f"{modality}_pooling", pooling, TEXT_POOLINGS)
        blocks = Encoder(dtype=dtype, group_images=group_images, **encoder)
        text = (vocabulary_size, sequence_length, mask_padding)
        embedding = {
            "image": [
                _patch_embedding(patch_size, encoder, dtype),
                PositionEmbedding(grid, dtype=dtype, name="image_position_embedding"),
            ],
            "text": [_token_embedding(*text, encoder, dtype)],
        }
        attention_pooling = {
            modality: _attention_pooling(
                f"{modality}_attention_pooling", encoder, dtype
            )
            for modality, pooling in poolings.items()
            if pooling == "map"
        }
        projection = {
            modality: keras.layers.Dense(
                int(embedding_dim),
                use_bias=False,
                dtype=dtype,
                name=f"{modality}_projection",
            )
            for modality in MODALITIES
        }
        scale = ContrastiveScale(logit_scale, logit_bias, name="contrastive_scale")
        return cls(embedding, blocks, attention_pooling, projection, scale)

    def cost(self, shapes, training=False):
        """What the layers cost, a `costs.LayerCost`.

        Args:
            shapes: dict from `"image"` to the shape of images, from `"text"` to that of
                token ids.
            training: bool, whether the settings of training count.
        """
        total, tokens = LayerCost(), {}
        for modality in MODALITIES:
            part, tokens[modality] = _chain_cost(
                self.embedding[modality], shapes[modality]
            )
            total += part
        total += self.encoder.cost(tokens, training)
        for modality, shape in tokens.items():
            if modality in self.attention_pooling:
                total += self.attention_pooling[modality].cost(shape)
            vectors = (shape[0], shape[2])
            total += cost_of(self.projection[modality], vectors)
        return total + self.scale.cost(vectors)


def mixtures_of(model):
    """All `layers.MoE` in a model, a list."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, MoE)]


def arguments_of(parts):
    """The arguments that parts are made from.

    Args:
        parts: `ImageParts`, `TextParts` or `PairParts`.

    Returns:
        `(required, optional)`, tuples of str.
    """
    own = inspect.signature(parts.make).parameters
    encoder = dict(inspect.signature(Encoder).parameters)
    if parts is not ImageParts:
        encoder = {name: p for name, p in encoder.items() if name not in _OF_IMAGES}
    found = {
        name: p.default is p.empty
        for name, p in (encoder | own).items()
        if p.kind is not p.VAR_KEYWORD
    }
    # The parts' own come first.
    names = [*own, *(name for name in encoder if name not in own)]
    names = [name for name in names if name in found]
    required = tuple(name for name in names if found[name])
    optional = tuple(name for name in names if not found[name])
    return required, tuple(dict.fromkeys((*optional, *MoE.settings())))


def _patch_embedding(patch_size, encoder, dtype):
    return PatchEmbedding(
        patch_size, encoder["hidden_dim"], dtype=dtype, name="patch_embedding"
    )


def _token_embedding(vocabulary_size, sequence_length, mask_padding, encoder, dtype):
    return TokenEmbedding(
        vocabulary_size,
        sequence_length,
        encoder["hidden_dim"],
        mask_padding=mask_padding,
        dtype=dtype,
        name="token_embedding",
    )


def _attention_pooling(name, encoder, dtype):
    return AttentionPooling(
        encoder["num_heads"],
        encoder["mlp_dim"],
        use_qk_norm=encoder.get("use_qk_norm", False),
        activation=encoder.get("activation", "gelu_tanh"),
        layer_norm_epsilon=encoder.get("layer_norm_epsilon", 1e-6),
        dtype=dtype,
        name=name,
    )


def _chain_cost(layers, shape):
    """Cost of layers one after the other, and the shape of what comes out."""
    total = LayerCost()
    for layer in layers:
        total += layer.cost(shape)
        shape = layer.compute_output_shape(shape)
    return total, shape
