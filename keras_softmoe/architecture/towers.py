"""Towers for one modality: Vision Transformers and text encoders."""

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from keras_softmoe import checks
from keras_softmoe.architecture.encoder import Encoder, EncoderLayers
from keras_softmoe.architecture.settings import Settings, record
from keras_softmoe.layers import embedding
from keras_softmoe.layers.pooling import POOLINGS, TEXT_POOLINGS, pool
from keras_softmoe.ops.position import RESAMPLINGS
from keras_softmoe.routers.scores import DROPLESS, Capacity

# Maps of a pyramid: the coarsest one, P7, is 128 times smaller than the image.
_MAPS = 6


@record
class Image(Settings):
    """Settings of the images of a model."""

    image_shape: Sequence[int]
    patch_size: int | Sequence[int]
    # `(rows, columns)` of patches
    patch_grid: ClassVar[tuple[int, int]]

    def __post_init__(self):
        super().__post_init__()
        image_shape = checks.checked_image_shape(self.image_shape)
        patch_size = checks.pair(self.patch_size)
        grid = checks.patch_grid(image_shape, patch_size)
        # In one form, past the record, which is frozen
        found = {"image_shape": image_shape, "patch_size": patch_size}
        vars(self).update(found, patch_grid=grid)


@record
class Text(Settings):
    """Settings of the texts of a model."""

    vocabulary_size: int
    sequence_length: int
    mask_padding: bool = False


@record
class ViT(Encoder, Image):
    """Settings of a `models.ViTMoEBackbone`."""

    backbone = "ViTMoEBackbone"

    group_images: int | str | None = "auto"
    pooling: str = "token"
    position_embedding: str = "learned"
    representation_dim: int | None = None
    position_resampling: str = "bilinear"
    num_registers: int = 0
    activation: str = "gelu_tanh"
    layer_norm_epsilon: float = 1e-6
    layer_scale: float | None = None
    pyramid_blocks: Sequence | None = None

    def __post_init__(self):
        if self.group_images == "auto":
            vars(self).update(self._default_groups())
        super().__post_init__()
        for name, accepted in (
            ("pooling", POOLINGS),
            ("position_embedding", embedding.POSITION_EMBEDDINGS),
            ("position_resampling", RESAMPLINGS),
        ):
            checks.check_choice(name, getattr(self, name), accepted)
        checks.check_whole_numbers(0, num_registers=self.num_registers)
        if self.representation_dim is not None:
            checks.check_whole_numbers(1, representation_dim=self.representation_dim)
        given, most = self.pyramid_blocks, self.num_layers
        if given is not None:
            blocks = tuple(given) if np.iterable(given) else ()
            if not 0 < len(blocks) <= _MAPS or not all(
                checks.is_whole_number(index, 0) and index < most for index in blocks
            ):
                raise ValueError(
                    f"`pyramid_blocks` has one to {_MAPS} block indices from 0 to "
                    f"{most - 1}, for the maps P2, P3, ... "
                    + checks.received(pyramid_blocks=given)
                )
            vars(self).update(pyramid_blocks=blocks)

    def flat(self) -> dict[str, Any]:
        """Return all settings, `pyramid_blocks` only where it is given."""
        # Files of models without it can be read by version 0.1.0.
        found = super().flat()
        if self.pyramid_blocks is None:
            del found["pyramid_blocks"]
        return found

    def _default_groups(self) -> dict[str, Any]:
        """Return the settings of groups and routers where groups are not given.

        Patches of one image resemble each other and choose the same few experts, those
        of many images spread: fewer are dropped. Predictions then need no capacity, as
        images that are predicted together should not depend on each other.
        """
        is_list = isinstance(self.router, list | tuple)
        routers = self.router if is_list else [self.router]
        # As given, or as found here before and saved
        defaults = Capacity(), Capacity(eval_capacity_factor=DROPLESS)
        for router in routers:
            policy = getattr(router, "capacity_policy", None)
            if policy not in defaults or not router.chooses_alone:
                return {"group_images": 1}
        routers = [r.with_settings(eval_capacity_factor=DROPLESS) for r in routers]
        return {"group_images": 32, "router": routers if is_list else routers[0]}

    @property
    def output_dim(self) -> int:
        """Width of the pooled output."""
        return self.representation_dim or self.hidden_dim

    def inputs(self, batch_size: int | None) -> keras.KerasTensor:
        """Return the shape and dtype of a batch."""
        return keras.KerasTensor((batch_size, *self.image_shape))

    def layers(self) -> "ImageLayers":
        """Make the layers, not built."""
        return ImageLayers(self)


class ImageLayers:
    """The layers of a `ViT`, not built."""

    def __init__(self, vit):
        self.vit, dtype = vit, vit.dtype
        has_class_token = vit.pooling == "token"
        first = [patch_embedding(vit)]
        if has_class_token:
            first.append(embedding.ClassToken(dtype=dtype, name="class_token"))
        if vit.position_embedding != "none":
            position = embedding.PositionEmbedding(
                vit.patch_grid,
                kind=vit.position_embedding,
                has_class_token=has_class_token,
                resampling=vit.position_resampling,
                dtype=dtype,
                name="position_embedding",
            )
            first.append(position)
        if vit.num_registers:
            arguments = {"dtype": dtype, "name": "registers"}
            number = vit.num_registers
            first.append(embedding.Registers(number, has_class_token, **arguments))
        self.embedding = first
        self.encoder = EncoderLayers(vit)
        self.attention_pooling = self.pre_logits = None
        if vit.pooling == "map":
            self.attention_pooling = vit.attention_pooling("attention_pooling")
        if vit.representation_dim is not None:
            self.pre_logits = keras.layers.Dense(
                int(vit.representation_dim),
                activation="tanh",
                kernel_initializer="lecun_normal",
                dtype=dtype,
                name="pre_logits",
            )

    def __call__(self, images):
        """Map images to the `(B, S, D)` tokens and the pooled output, a dict."""
        for layer in self.embedding:
            images = layer(images)
        tokens = self.encoder(images)
        registers = self.vit.num_registers
        pooling, attention = self.vit.pooling, self.attention_pooling
        vector = pool(tokens, pooling, attention, num_registers=registers)
        if self.pre_logits is not None:
            vector = self.pre_logits(vector)
        return {"sequence_output": tokens, "pooled_output": vector}


@record
class TextTower(Encoder, Text):
    """Settings of a `models.TextMoEBackbone`."""

    backbone = "TextMoEBackbone"

    pooling: str = "last"

    def __post_init__(self):
        super().__post_init__()
        checks.check_choice("pooling", self.pooling, TEXT_POOLINGS)

    @property
    def output_dim(self) -> int:
        """Width of the pooled output."""
        return self.hidden_dim

    def inputs(self, batch_size: int | None) -> keras.KerasTensor:
        """Return the shape and dtype of a batch."""
        return keras.KerasTensor((batch_size, self.sequence_length), "int32")

    def layers(self) -> "TextLayers":
        """Make the layers, not built."""
        return TextLayers(self)


class TextLayers:
    """The layers of a `TextTower`, not built."""

    def __init__(self, text):
        self.text = text
        self.embedding = token_embedding(text)
        self.encoder = EncoderLayers(text)
        self.attention_pooling = None
        if text.pooling == "map":
            self.attention_pooling = text.attention_pooling("attention_pooling")

    def __call__(self, token_ids):
        """Map `(B, S)` token ids to the tokens and the pooled output, a dict."""
        mask = self.embedding.compute_mask(token_ids)
        tokens = self.encoder(self.embedding(token_ids), mask=mask)
        vector = pool(tokens, self.text.pooling, self.attention_pooling, mask)
        return {"sequence_output": tokens, "pooled_output": vector}


def patch_embedding(settings):
    """Make the first layer for images."""
    return embedding.PatchEmbedding(
        settings.patch_size,
        settings.hidden_dim,
        dtype=settings.dtype,
        name="patch_embedding",
    )


def token_embedding(settings):
    """Make the first layer for texts."""
    return embedding.TokenEmbedding(
        settings.vocabulary_size,
        settings.sequence_length,
        settings.hidden_dim,
        mask_padding=settings.mask_padding,
        dtype=settings.dtype,
        name="token_embedding",
    )
