"""Models of pairs of image and text: one tower for both, or one for each."""

import keras

from keras_softmoe.architecture import towers
from keras_softmoe.architecture.encoder import Encoder, EncoderLayers
from keras_softmoe.architecture.settings import Settings, record
from keras_softmoe.checks import check_choice, check_whole_numbers
from keras_softmoe.layers import PositionEmbedding
from keras_softmoe.layers.limoe_block import LIMoEBlock
from keras_softmoe.layers.pooling import TEXT_POOLINGS, ContrastiveScale, pool
from keras_softmoe.types import DType

MODALITIES = ("image", "text")


@record
class LIMoE(Encoder, towers.Text, towers.Image):
    """Settings of a `models.LIMoEBackbone`."""

    backbone = "LIMoEBackbone"

    embedding_dim: int = 512
    image_pooling: str = "gap"
    text_pooling: str = "gap"
    logit_scale: float = 10.0
    logit_bias: float | None = None
    group_images: int | None = 32

    def __post_init__(self):
        super().__post_init__()
        check_whole_numbers(1, embedding_dim=self.embedding_dim)
        for modality, pooling in self.poolings.items():
            check_choice(f"{modality}_pooling", pooling, TEXT_POOLINGS)

    @property
    def poolings(self) -> dict[str, str]:
        """Dict from modalities to their poolings."""
        return {"image": self.image_pooling, "text": self.text_pooling}

    def inputs(self, batch_size: int | None) -> dict:
        """Return the shapes and dtypes of a batch of pairs."""
        return {
            "image": keras.KerasTensor((batch_size, *self.image_shape)),
            "text": keras.KerasTensor((batch_size, self.sequence_length), "int32"),
        }

    def layers(self) -> "PairLayers":
        """Make the layers, not built."""
        return PairLayers(self)


class PairLayers:
    """The layers of a `LIMoE`, not built."""

    def __init__(self, limoe):
        self.limoe, dtype = limoe, limoe.dtype
        position = PositionEmbedding(
            limoe.patch_grid, dtype=dtype, name="image_position_embedding"
        )
        self.embedding = {
            "image": [towers.patch_embedding(limoe), position],
            "text": [towers.token_embedding(limoe)],
        }
        self.encoder = EncoderLayers(limoe, LIMoEBlock)
        self.attention_pooling = {
            modality: limoe.attention_pooling(f"{modality}_attention_pooling")
            for modality, pooling in limoe.poolings.items()
            if pooling == "map"
        }
        self.projection = {
            modality: keras.layers.Dense(
                int(limoe.embedding_dim),
                use_bias=False,
                dtype=dtype,
                name=f"{modality}_projection",
            )
            for modality in MODALITIES
        }
        self.scale = _scale(limoe)

    def encode(self, inputs, training=None):
        """Map images, token ids or both to tokens and masks.

        `inputs` and both results are dicts from `"image"` and `"text"`.
        """
        tokens, masks = {}, {}
        for modality, x in inputs.items():
            for layer in self.embedding[modality]:
                x = layer(x)
            tokens[modality] = x
        if self.limoe.mask_padding and "text" in inputs:
            (embedding,) = self.embedding["text"]
            masks["text"] = embedding.compute_mask(inputs["text"])
        return self.encoder(tokens, training, masks or None), masks

    def embed(self, modality, tokens, mask=None):
        """Map `(B, S, D)` tokens of a modality to `(B, embedding_dim)` vectors."""
        pooling = self.limoe.poolings[modality]
        attention_pooling = self.attention_pooling.get(modality)
        return self.projection[modality](pool(tokens, pooling, attention_pooling, mask))

    def __call__(self, inputs):
        """Map pairs to embeddings, not normalized, and the scale of similarities."""
        tokens, masks = self.encode(inputs)
        vectors = {m: self.embed(m, x, masks.get(m)) for m, x in tokens.items()}
        return vectors, self.scale(vectors["image"])


@record
class TwoTowers(Settings):
    """Settings of a `models.TwoTowerBackbone`, and of its towers."""

    backbone = "TwoTowerBackbone"

    image_backbone: towers.ViT
    text_backbone: towers.TextTower
    image_projection_dim: int | None = None
    text_projection_dim: int | None = None
    freeze_image: bool = False
    logit_scale: float = 10.0
    logit_bias: float | None = None
    dtype: DType = None

    def __post_init__(self):
        super().__post_init__()
        for modality, dim in self.projection_dims.items():
            if dim is not None:
                check_whole_numbers(1, **{f"{modality}_projection_dim": dim})
        image, text = (
            self.projection_dims[modality] or tower.output_dim
            for modality, tower in self.towers.items()
        )
        if image != text:
            raise ValueError(
                "Embeddings of images and text must have one width to be compared. "
                f"Received: {image} for images, {text} for text. "
                f"Set `text_projection_dim={image}`, or `image_projection_dim`."
            )

    @property
    def towers(self) -> dict:
        """Dict from modalities to the settings of their towers."""
        return {"image": self.image_backbone, "text": self.text_backbone}

    @property
    def projection_dims(self) -> dict[str, int | None]:
        """Dict from modalities to the widths of their projections."""
        return {"image": self.image_projection_dim, "text": self.text_projection_dim}

    def projections(self) -> dict[str, keras.layers.Dense]:
        """Make the projections, dict from those modalities that have one."""
        return {
            modality: keras.layers.Dense(
                int(dim),
                kernel_initializer="lecun_normal",
                dtype=self.dtype,
                name=f"{modality}_projection",
            )
            for modality, dim in self.projection_dims.items()
            if dim is not None
        }

    def scale(self) -> ContrastiveScale:
        """Make the layer with the learned scale of similarities."""
        return _scale(self)


def _scale(settings):
    scale, bias = settings.logit_scale, settings.logit_bias
    return ContrastiveScale(scale, bias, name="contrastive_scale")
