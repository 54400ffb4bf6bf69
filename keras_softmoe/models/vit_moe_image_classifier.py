"""Image classification: converter, preprocessor and task."""

import keras
import keras_hub

from keras_softmoe import presets
from keras_softmoe.models.from_preset import PresetMixin
from keras_softmoe.models.vit_moe_backbone import ViTMoEBackbone, check_images


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


class ImageClassifier(PresetMixin, keras_hub.models.ImageClassifier):
    """KerasHub's class with our presets.

    Its name stays KerasHub's, which writes the name of a task's first base into the
    preset as the kind of task.
    """


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ViTMoEImageClassifier(ImageClassifier):
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
        compile: bool, whether to compile at once with the defaults of
            `keras_hub.models.ImageClassifier.compile`.
        name: str or `None`, name of the model.

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
        compile=True,
        name=None,
    ):
        if num_classes < 1:
            raise ValueError(
                "A classifier needs at least one class. `num_classes` must be a "
                f"positive integer. Received: num_classes={num_classes}."
            )
        # === Config ===
        # First of all, because compiling asks for the activation.
        self.num_classes = num_classes
        self.activation = activation
        self.dropout = dropout
        self.head_dtype = head_dtype

        # === Layers ===
        head_dtype = head_dtype or backbone.dtype_policy
        self.backbone = backbone
        self.preprocessor = preprocessor
        _fit_converter(preprocessor, backbone.image_shape[:2])
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
        keras_hub.models.Task.__init__(
            self, inputs=inputs, outputs=outputs, compile=compile, name=name
        )

    @classmethod
    def from_preset(cls, preset, load_weights=True, **kwargs):
        if "num_classes" not in kwargs:
            presets.check_task(preset, load_weights)
        return super().from_preset(preset, load_weights, **kwargs)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        data = super().preprocess_samples(x, y, sample_weight)
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        check_images(images, self.backbone.image_shape)
        return data

    def get_config(self):
        head_dtype = self.head_dtype
        if self.output_dense.quantization_mode:
            head_dtype = self.output_dense.dtype_policy
        if head_dtype is not None:
            head_dtype = keras.dtype_policies.get(head_dtype)
            head_dtype = keras.dtype_policies.serialize(head_dtype)
        return {
            **keras_hub.models.Task.get_config(self),
            "num_classes": self.num_classes,
            "activation": self.activation,
            "dropout": self.dropout,
            "head_dtype": head_dtype,
        }


def _fit_converter(preprocessor, image_size):
    """Make a resizing image converter resize to what the backbone takes.

    A preset that is loaded at another resolution brings the old size along.
    """
    converter = getattr(preprocessor, "image_converter", None)
    if getattr(converter, "image_size", None) is not None:
        converter.image_size = image_size
