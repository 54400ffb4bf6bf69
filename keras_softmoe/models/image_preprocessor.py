"""Preprocessing of images: converter, and preprocessors of the tasks."""

from collections.abc import Sequence

import keras
import keras_hub

from keras_softmoe import checks
from keras_softmoe.models.data import without_pil
from keras_softmoe.models.vit import ViTMoEBackbone

_INTERPOLATIONS = ("bilinear", "nearest", "bicubic", "lanczos3", "lanczos5")
_FLAGS = ("crop_to_aspect_ratio", "pad_to_aspect_ratio", "antialias")


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ViTMoEImageConverter(keras_hub.layers.ImageConverter):
    """Layer that resizes images and maps pixels from `[0, 255]` to `[-1, 1]`.

    Accepts arrays, PIL images and lists of them, with their channels last, independent
    of `keras.config.image_data_format()`. Arguments are those of
    `keras_hub.layers.ImageConverter`. A model sets `image_size` of the converter in its
    preprocessor to its own.

    Source: V-MoE's released code (value range).

    Examples:
        >>> converter = ksm.models.ViTMoEImageConverter(image_size=(32, 32))
        >>> converter(np.full((2, 48, 48, 3), 255, "float32")).shape
        (2, 32, 32, 3)
    """

    backbone_cls = ViTMoEBackbone

    def __init__(
        self,
        image_size: Sequence[int] | None = None,
        scale: float = 1.0 / 127.5,
        offset: float = -1.0,
        data_format: str | None = "channels_last",
        **kwargs,
    ):
        # Keras checks most of these when it converts the first image.
        if image_size is not None:
            is_pair = isinstance(image_size, (list, tuple)) and len(image_size) == 2
            if not is_pair or not all(
                checks.is_whole_number(size, name="image_shape") for size in image_size
            ):
                raise ValueError(
                    "`image_size` must be `None`, or a height and a width"
                    f"{checks.at_most('image_shape')}. "
                    + checks.received(image_size=image_size)
                )
        for name, value in {"scale": scale, "offset": offset}.items():
            if value is not None:
                numbers = value[:16] if isinstance(value, (list, tuple)) else [value]
                for number in numbers:
                    checks.check_numbers(**{name: number})
        checks.check_bools(**{name: kwargs[name] for name in _FLAGS if name in kwargs})
        interpolation = kwargs.get("interpolation", "bilinear")
        checks.check_choice("interpolation", interpolation, _INTERPOLATIONS)
        checks.check_choice("data_format", data_format, (None, "channels_last"))
        super().__init__(
            image_size=image_size,
            scale=scale,
            offset=offset,
            # `None` would follow `keras.config.image_data_format()`.
            data_format="channels_last",
            **kwargs,
        )
        # It has no weights, but `quantize` refuses a model with an unbuilt layer.
        self.resizing.built = True

    def call(self, inputs):
        # PIL images and lists have no shape.
        is_array = hasattr(inputs, "shape")
        return super().call(inputs if is_array else without_pil(inputs))


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ViTMoEImageClassifierPreprocessor(keras_hub.models.ImageClassifierPreprocessor):
    """Preprocessor of images for `ViTMoEImageClassifier`; labels stay as they are.

    Args:
        image_converter: `ViTMoEImageConverter` or `None`.
        **kwargs: as in `keras_hub.models.ImageClassifierPreprocessor`.

    Examples:
        >>> converter = ksm.models.ViTMoEImageConverter(image_size=(32, 32))
        >>> preprocessor = ksm.models.ViTMoEImageClassifierPreprocessor(converter)
        >>> preprocessor(np.full((2, 48, 48, 3), 255, "float32")).shape
        (2, 32, 32, 3)
    """

    backbone_cls = ViTMoEBackbone
    image_converter_cls = ViTMoEImageConverter


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ViTMoEImageSegmenterPreprocessor(keras_hub.models.ImageSegmenterPreprocessor):
    """Preprocessor for `ViTMoEImageSegmenter`: images and masks are resized alike.

    A pixel of a resized mask is the nearest one, never a mean of classes.

    Args:
        image_converter: `ViTMoEImageConverter` or `None`.
        resize_output_mask: bool, whether masks are resized as the images are.
        pad_label: int, the class of what `pad_to_aspect_ratio` of the converter adds.
        **kwargs: as in `keras_hub.models.ImageSegmenterPreprocessor`.

    Masks are whole numbers `(B, height, width)` or `(B, height, width, 1)`, or one-hot;
    sample weights of that shape are resized as they are, and 0 in what is added.

    Examples:
        >>> converter = ksm.models.ViTMoEImageConverter(image_size=(32, 32))
        >>> preprocessor = ksm.models.ViTMoEImageSegmenterPreprocessor(converter)
        >>> images, masks = np.zeros((2, 48, 48, 3)), np.ones((2, 48, 48), "int32")
        >>> preprocessor(images, masks)[1].shape
        (2, 32, 32)
    """

    backbone_cls = ViTMoEBackbone
    image_converter_cls = ViTMoEImageConverter

    def __init__(
        self,
        image_converter: ViTMoEImageConverter | None = None,
        resize_output_mask: bool = True,
        pad_label: int = 0,
        **kwargs,
    ):
        super().__init__(image_converter, resize_output_mask, **kwargs)
        self.pad_label = pad_label

    def call(self, x, y=None, sample_weight=None):
        converter = self.image_converter
        x = converter(x) if converter else x
        if getattr(converter, "image_size", None) and self.resize_output_mask:
            # Exact, where half precision would round classes from 256 on
            y = self._resized(y, self.pad_label, "int32")
            # What is added has no weight.
            sample_weight = self._resized(sample_weight, 0, "float32")
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def _resized(self, y, fill_value, dtype):
        """Return masks, or weights of pixels, in the size of the images."""
        if y is None or len(y.shape) < 3:
            return y
        converter, has_channels = self.image_converter, len(y.shape) == 4
        y = keras.layers.Resizing(
            *converter.image_size,
            interpolation="nearest",
            crop_to_aspect_ratio=converter.crop_to_aspect_ratio,
            pad_to_aspect_ratio=converter.pad_to_aspect_ratio,
            fill_value=fill_value,
            data_format="channels_last",
            dtype=dtype,
        )(y if has_channels else y[..., None])
        return y if has_channels else y[..., 0]

    def get_config(self):
        names = ("resize_output_mask", "pad_label")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def fit_image_size(preprocessor, image_size):
    """Set the size of an image converter to a backbone's; raise if that fails."""
    converter = getattr(preprocessor, "image_converter", None)
    for name, value in (("preprocessor", preprocessor), ("image_converter", converter)):
        if value is not None and not callable(value):
            raise ValueError(
                f"`{name}` must be callable or `None`. "
                + checks.received(**{name: value})
            )
    if getattr(converter, "data_format", None) == "channels_first":
        raise ValueError(
            "The models expect images with their channels last. Received: "
            f"data_format='channels_first' of a {type(converter).__name__}, perhaps "
            "from `keras.config.image_data_format()`."
        )
    if hasattr(converter, "image_size"):
        converter.image_size = image_size
