"""Dense Vision Transformers of this library from models and files of others.

Files and models of other libraries are first read as a `Checkpoint` under V-MoE's names
(`checkpoints/`, `_keras_hub_params.py`). These functions find the kind of a source and
make the model.
"""

from collections.abc import Sequence

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_softmoe.backbones import (
    ViTMoEImageClassifierPreprocessor,
    ViTMoEImageConverter,
)
from keras_softmoe.checkpoints import (
    Checkpoint,
    fits_positions,
    read_parameters,
)
from keras_softmoe.checks import check_names
from keras_softmoe.models._keras_hub_params import read_keras_hub
from keras_softmoe.models._source_kinds import (
    Source,
    converter_settings,
    find_file,
    from_keras_hub,
    own_model,
)
from keras_softmoe.models.conversion import model_for
from keras_softmoe.models.vmoe_params import load_vmoe_params

_SETTINGS = ("activation", "layer_norm_epsilon", "position_resampling")
_CHOICES = ("pooling", "position_embedding")


def dense_model(
    source: Source,
    image_shape: Sequence[int] | None = None,
    head: bool = True,
    **changes,
) -> keras.Model:
    """Return a dense model of this library with the weights of a source.

    A source is one of these, or a preset name, a directory or a handle (`hf://...`,
    `kaggle://...`) of it:

    - a model of this library, which is returned as it is;
    - KerasHub's `ViTBackbone`, `ViTImageClassifier`, `DeiTBackbone`,
      `DeiTImageClassifier`, `DINOV2Backbone` and `SigLIPVisionEncoder` (or the
      `SigLIPBackbone` around it);
    - an `.npz` file of an original Vision Transformer, AugReg or big_vision;
    - a `.safetensors` file of `timm` or `transformers` (ViT, DeiT, DINOv2, SigLIP).

    The outputs are those of the source: activation, epsilon, layer scale and tokens in
    front of the patches are the same. It takes the images of the source, which are not
    in `[-1, 1]` for all of them: `image_preprocessor` converts pixels to these.
    Dropout is off.

    Args:
        source: a model, str or path, or the result of `read_checkpoint`, under V-MoE's
            names.
        image_shape: `(height, width, channels)`. With another one than the source's its
            positions are resampled as the source's own code does it, and the tokens in
            front of the patches stay as they are. Files of models for images that are
            no squares need it, as theirs.
        head: bool, whether to keep the head for classes, if there is one.
        **changes: settings that neither a file nor a `config.json` beside it tells:
            `num_heads`, `activation`, `layer_norm_epsilon`, `position_resampling`,
            `pooling`, `position_embedding`, see `ViTMoEBackbone`.

    Returns:
        `ViTMoEImageClassifier` if there is a head, otherwise `ViTMoEBackbone`.

    Raises:
        CheckpointError: (a `ValueError`) if a file is missing, damaged or none of a
            plain Vision Transformer; the message lists the names that do not fit.
        ValueError: if the source is unknown, cannot be fetched, or is a model that
            needs parts that ours do not have (DINOv3, CLIP, MLPs with gates).

    Examples:
        >>> vit = ksm.converters.dense_model("vit_tiny_patch4_32_glyphs")
        >>> vit.save_to_preset("my_vit")
    """
    check_names("`dense_model`", changes, ("num_heads", *_SETTINGS, *_CHOICES))
    model = own_model(source)
    if model is None:
        model = _converted(source, image_shape, head, changes)
    elif changes:
        raise ValueError(
            "A keras_softmoe model takes no conversion arguments. Received: "
            f"{', '.join(changes)} for source={source!r}. Leave these arguments out."
        )
    if not head:
        model = getattr(model, "backbone", model)
    backbone = getattr(model, "backbone", model)
    if image_shape is not None and tuple(image_shape) != tuple(backbone.image_shape):
        return _at_resolution(model, tuple(image_shape))
    return model


def image_preprocessor(
    source: Source, image_size: Sequence[int] | None = None
) -> keras.layers.Layer:
    """Return the preprocessor from pixels (0 to 255) to the images of a source.

    Args:
        source: as in `dense_model`.
        image_size: `(height, width)` to resize to, or `None`. A `ViTMoEImageClassifier`
            sets it to the size of its backbone if it is given.

    Returns:
        `ViTMoEImageClassifierPreprocessor`: that of the source (a classifier or preset
        of KerasHub, or of a `preprocessor_config.json` beside a file), or one
        that maps pixels to `[-1, 1]`.

    Raises:
        ValueError: as `dense_model`.

    Examples:
        >>> preprocessor = ksm.converters.image_preprocessor("dinov2_small", (224, 224))
    """
    converter = ViTMoEImageConverter(image_size, **converter_settings(source))
    return ViTMoEImageClassifierPreprocessor(converter)


def _converted(source, image_shape, head, changes):
    """Make a model of this library from a source of another one."""
    changes, activation = dict(changes), None
    if isinstance(source, Checkpoint):
        checkpoint = source
    elif (path := find_file(source)) is not None:
        num_heads = changes.pop("num_heads", None)
        checkpoint = read_parameters(path, num_heads, image_shape, head)
    else:
        model = from_keras_hub(source)
        if own_model(model) is not None:
            return model
        checkpoint = read_keras_hub(model)
        if isinstance(model, keras_hub.models.ImageClassifier):
            activation = model.activation
    if not head:
        checkpoint = checkpoint.without("head/")
    for name in _SETTINGS:
        if name in changes:
            checkpoint.settings[name] = changes.pop(name)
    preprocessor = None
    if any(name.startswith("head/") for name in checkpoint):
        # The classifier sets the size.
        preprocessor = image_preprocessor(source, (1, 1))
    model, _ = model_for(
        checkpoint,
        image_shape=_native_shape(checkpoint, image_shape),
        preprocessor=preprocessor,
        activation=activation,
        **changes,
    )
    load_vmoe_params(model, checkpoint)
    return model


def _native_shape(checkpoint, image_shape):
    """Return the given shape of images if the parameters are for it."""
    if image_shape is None:
        return None
    return image_shape if fits_positions(checkpoint.shapes, image_shape) else None


def _at_resolution(model, image_shape):
    """Make the same model for images of another shape."""
    backbone = getattr(model, "backbone", model)
    new = new_backbone = type(backbone).from_config(
        {**backbone.get_config(), "image_shape": image_shape}
    )
    if backbone is not model:
        new = type(model).from_config({**model.get_config(), "backbone": new})
    for variable, old in zip(new.weights, model.weights, strict=True):
        # A copy, because on JAX two models that share memory delete it for each other.
        value = np.array(ops.convert_to_numpy(old))
        if value.shape != tuple(variable.shape):
            layer = new_backbone.get_layer("position_embedding")
            value = layer.resample(value, backbone.patch_grid)
        variable.assign(value)
    return new
