"""Image classification: converter, preprocessor and task."""

import keras
import keras_hub

from keras_softmoe import presets
from keras_softmoe.models.from_preset import PresetMixin
from keras_softmoe.models.vit_moe_backbone import ViTMoEBackbone


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ViTMoEImageConverter(keras_hub.layers.ImageConverter):
    """Resizes images and maps pixels from `[0, 255]` to `[-1, 1]`.

    Takes the arguments of `keras_hub.layers.ImageConverter`; `scale` and `offset` have
    defaults for the models of this library. `from_preset` takes our preset names.

    Source: V-MoE's released code (value range).
    """

    backbone_cls = ViTMoEBackbone

    def __init__(self, image_size=None, scale=1.0 / 127.5, offset=-1.0, **kwargs):
        super().__init__(image_size=image_size, scale=scale, offset=offset, **kwargs)

    @classmethod
    def from_preset(cls, preset, **kwargs):
        directory = presets.resolve(preset, load_weights=False)
        with presets.explained(directory):
            return super().from_preset(directory, **kwargs)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ViTMoEImageClassifierPreprocessor(keras_hub.models.ImageClassifierPreprocessor):
    """Prepares images (and passes labels through) for `ViTMoEImageClassifier`.

    Args:
        image_converter: `ViTMoEImageConverter` or `None`.
        **kwargs: as in `keras_hub.models.ImageClassifierPreprocessor`.
    """

    backbone_cls = ViTMoEBackbone
    image_converter_cls = ViTMoEImageConverter

    @classmethod
    def from_preset(cls, preset, **kwargs):
        directory = presets.resolve(preset, load_weights=False)
        with presets.explained(directory):
            return super().from_preset(directory, **kwargs)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ViTMoEImageClassifier(PresetMixin, keras_hub.models.ImageClassifier):
    """Image classifier on a `ViTMoEBackbone`.

    Pixels from 0 to 255 go in, logits come out. `fit`, `evaluate` and `predict`
    preprocess by themselves if there is a `preprocessor`.

    Args:
        backbone: `ViTMoEBackbone`.
        num_classes: int, number of classes.
        preprocessor: `None`, a `ViTMoEImageClassifierPreprocessor` or any callable. If
            its image converter resizes, it is set to the size that the backbone takes.
        activation: `None` (logits), str or callable, of the last layer.
        dropout: float, dropout before the last layer.
        head_dtype: dtype or policy of the head. That of the backbone if `None`.
        **kwargs: as in `keras_hub.models.Task`.

    Returns, when called on `(B, height, width, channels)` images in `[-1, 1]`:
        `(B, num_classes)` logits (or activations).

    Raises:
        ValueError: if `num_classes` is under one.

    Source: V-MoE, section 2.1. The head starts from zeros, as in its released code.

    Example:

    >>> classifier = ksm.models.ViTMoEImageClassifier(
    ...     backbone,
    ...     num_classes=10,
    ...     preprocessor=ksm.models.ViTMoEImageClassifierPreprocessor(
    ...         ksm.models.ViTMoEImageConverter(image_size=(32, 32))
    ...     ),
    ... )
    >>> classifier.fit(images, labels, epochs=3)
    """

    backbone_cls = ViTMoEBackbone
    preprocessor_cls = ViTMoEImageClassifierPreprocessor

    def __init__(
        self,
        backbone,
        num_classes,
        preprocessor=None,
        activation=None,
        dropout=0.0,
        head_dtype=None,
        **kwargs,
    ):
        if num_classes < 1:
            raise ValueError(
                "A classifier needs at least one class. `num_classes` must be a "
                f"positive integer. Received: num_classes={num_classes}."
            )
        head_dtype = head_dtype or backbone.dtype_policy

        # === Layers ===
        self.backbone = backbone
        self.preprocessor = preprocessor
        self.output_dropout = keras.layers.Dropout(
            dropout, dtype=head_dtype, name="output_dropout"
        )
        self.output_dense = keras.layers.Dense(
            num_classes,
            activation=activation,
            kernel_initializer="zeros",
            dtype=head_dtype,
            name="predictions",
        )

        # === Functional Model ===
        inputs = self.backbone.input
        x = self.backbone(inputs)["pooled_output"]
        x = self.output_dropout(x)
        outputs = self.output_dense(x)
        # KerasHub's own classifier would build its pooling: skip it.
        keras_hub.models.Task.__init__(self, inputs=inputs, outputs=outputs, **kwargs)

        # === Config ===
        self.num_classes = num_classes
        self.activation = activation
        self.dropout = dropout
        _fit_converter(preprocessor, backbone.image_shape[:2])

    def get_config(self):
        return {
            **keras_hub.models.Task.get_config(self),
            "num_classes": self.num_classes,
            "activation": self.activation,
            "dropout": self.dropout,
        }


def _fit_converter(preprocessor, image_size):
    """Make a resizing image converter resize to what the backbone takes.

    A preset that is loaded at another resolution brings the old size along.
    """
    converter = getattr(preprocessor, "image_converter", None)
    if getattr(converter, "image_size", None) is not None:
        converter.image_size = image_size
