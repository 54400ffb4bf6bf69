"""Two towers, one for images and one for text, with embeddings in one space."""

import keras

from keras_softmoe.architecture import Settings, TwoTowers
from keras_softmoe.models.arguments import check_kind, offer_names
from keras_softmoe.models.backbone import MoEBackbone, SingleModality, normalized
from keras_softmoe.models.configuration import base_config, with_quantization
from keras_softmoe.models.text import TextMoEBackbone
from keras_softmoe.models.vit import ViTMoEBackbone
from keras_softmoe.types import DType


@keras.saving.register_keras_serializable(package="keras_softmoe")
@offer_names
class TwoTowerBackbone(MoEBackbone, SingleModality):
    """An image tower and a text tower whose outputs are compared.

    Either may have mixtures of experts; they share nothing.

    Args:
        image_backbone: `ViTMoEBackbone`.
        text_backbone: `TextMoEBackbone`.
        image_projection_dim: int, width of a dense layer on the image tower, or `None`.
        text_projection_dim: the same for the text tower.
        freeze_image: bool, whether the image tower is frozen ("locked image tuning").
        logit_scale: float, initial value of the learned scale of similarities.
        logit_bias: float or `None`, initial value of a learned bias of similarities.
        dtype: dtype or policy of the projections.
        name: str or `None`, name of the model.
        trainable: bool, whether the weights are trained.

    Returns, when called on a dict of `"images"` `(B, height, width, channels)` and
        `"token_ids"` `(B, S)` int32: dict of `"image_embedding"` and
        `"text_embedding"` `(B, width)` float32 of length one, `"logit_scale"` `(B,)`
        and, if there is one, `"logit_bias"` `(B,)`, equal in all rows.

    Raises:
        ValueError: if an argument is of another kind, or the towers differ in width.

    Source: Soft MoE, section 4. Unlike its released code, `fit` adds the balancing
    losses of experts in the towers to the contrastive loss.

    Examples:
        >>> image_tower = ksm.models.ViTMoEBackbone.from_preset(name)
        >>> text_tower = ksm.models.TextMoEBackbone(500, 16, 2, 2, 32, 64)
        >>> backbone = ksm.models.TwoTowerBackbone(
        ...     image_tower, text_tower, text_projection_dim=128, freeze_image=True
        ... )
    """

    def __init__(
        self,
        image_backbone: keras.Model,
        text_backbone: keras.Model,
        image_projection_dim: int | None = None,
        text_projection_dim: int | None = None,
        freeze_image: bool = False,
        logit_scale: float = 10.0,
        logit_bias: float | None = None,
        dtype: DType = None,
        name: str | None = None,
        trainable: bool = True,
    ):
        check_kind("image_backbone", image_backbone, ViTMoEBackbone)
        check_kind("text_backbone", text_backbone, TextMoEBackbone)
        towers = {"image_backbone": image_backbone, "text_backbone": text_backbone}
        architecture = TwoTowers.of_arguments(
            {**locals(), **{name: x.architecture for name, x in towers.items()}}
        )

        # === Layers ===
        if freeze_image:
            image_backbone.trainable = False
        encoders = {
            "image": _ImageTower(image_backbone, freeze_image, name="image_tower"),
            "text": text_backbone,
        }
        projections, scale = architecture.projections(), architecture.scale()

        # === Functional Model ===
        def encode(inputs):
            outputs = {}
            for modality, x in inputs.items():
                x = encoders[modality](x)["pooled_output"]
                if modality in projections:
                    x = projections[modality](x)
                outputs[f"{modality}_embedding"] = normalized(x)
            return outputs

        images = keras.Input(shape=image_backbone.image_shape, name="images")
        shape = (text_backbone.sequence_length,)
        token_ids = keras.Input(shape, dtype="int32", name="token_ids")
        outputs = encode({"image": images, "text": token_ids})
        outputs |= scale(outputs["image_embedding"])
        inputs = {"images": images, "token_ids": token_ids}
        super().__init__(architecture, inputs, outputs, name, trainable)
        self._encode = encode
        self.image_backbone = image_backbone
        self.text_backbone = text_backbone
        self.image_shape = image_backbone.image_shape
        self.sequence_length = text_backbone.sequence_length

    @property
    def architecture(self) -> Settings:
        return self._architecture.with_values(
            image_backbone=self.image_backbone.architecture,
            text_backbone=self.text_backbone.architecture,
        )

    @property
    def routers(self) -> dict:
        """Dict from each MoE block, such as `"image/3"`, to its router."""
        towers = {"image": self.image_backbone, "text": self.text_backbone}
        return {
            f"{modality}/{index}": router
            for modality, tower in towers.items()
            for index, router in tower.routers.items()
        }

    def get_config(self):
        towers = {
            "image_backbone": keras.saving.serialize_keras_object(self.image_backbone),
            "text_backbone": keras.saving.serialize_keras_object(self.text_backbone),
        }
        if self.freeze_image:
            # `freeze_image` freezes it again, unless another value is passed.
            towers["image_backbone"]["config"]["trainable"] = True
        base = base_config(self, [self.image_backbone, self.text_backbone])
        return {**self._architecture.flat(), **base, **towers}

    @classmethod
    def from_config(cls, config):
        config = with_quantization(config)
        for name in ("image_backbone", "text_backbone"):
            config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**config)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class _ImageTower(keras.layers.Layer):
    """Calls a model; a frozen one without noise, dropout and losses.

    Freezing leaves them on, and a functional model overrules `training=False` in it.
    """

    def __init__(self, model, frozen, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.model = model
        self.frozen = frozen
        self.built = True

    def call(self, images, training=None):
        return self.model(images, training=False if self.frozen else training)

    def compute_output_spec(self, images, training=None):
        return self.model.compute_output_spec(images)

    def get_config(self):
        model = keras.saving.serialize_keras_object(self.model)
        return {**super().get_config(), "model": model, "frozen": self.frozen}

    @classmethod
    def from_config(cls, config):
        model = keras.saving.deserialize_keras_object(config["model"])
        return cls(**{**config, "model": model})
