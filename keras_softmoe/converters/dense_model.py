"""Dense Vision Transformers of this library from models and files of others."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_softmoe import catalogue, checkpoints
from keras_softmoe.checks import check_names
from keras_softmoe.converters.keras_hub_params import SUPPORTED, read_keras_hub
from keras_softmoe.models.conversion import model_for
from keras_softmoe.models.image_classifier import ViTMoEImageClassifier
from keras_softmoe.models.image_preprocessor import (
    ViTMoEImageClassifierPreprocessor,
    ViTMoEImageConverter,
)
from keras_softmoe.models.vit import ViTMoEBackbone
from keras_softmoe.models.vmoe_params import load_vmoe_params

# Sources of a dense Vision Transformer, see `dense_model`
Source: TypeAlias = str | os.PathLike | checkpoints.Checkpoint | keras.Model

_PATH = str | os.PathLike
_WEIGHTS = "model.safetensors"
_HUGGING_FACE = "hf://"
# Settings of our converter that another one determines.
_CONVERTER = (
    *("scale", "offset", "interpolation", "antialias"),
    *("crop_to_aspect_ratio", "pad_to_aspect_ratio"),
)
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
    - KerasHub's ViT, DeiT, DINOv2 (backbones and image classifiers) and SigLIP;
    - an `.npz` file of an original Vision Transformer, AugReg or big_vision;
    - a `.safetensors` file of `timm` or `transformers` (ViT, DeiT, DINOv2, SigLIP).

    The outputs are those of the source, with dropout off. `image_preprocessor` converts
    pixels to its images.

    Args:
        source: a model, str or path, or the result of `read_checkpoint`, under V-MoE's
            names.
        image_shape: `(height, width, channels)`. If it differs from the source's,
            position embeddings are resampled as in the source's code. Required for
            files of models trained on images that are not square.
        head: bool, whether to keep the head for classes, if there is one.
        **changes: settings that neither a file nor a `config.json` beside it has:
            `num_heads`, `activation`, `layer_norm_epsilon`, `position_resampling`,
            `pooling`, `position_embedding`, see `ViTMoEBackbone`.

    Returns:
        `ViTMoEImageClassifier` if there is a head (of this library also
        `ViTMoEImageSegmenter`), otherwise `ViTMoEBackbone`.

    Raises:
        CheckpointError: (a `ValueError`) if a file is missing, damaged or none of a
            plain Vision Transformer; the message lists the names that do not fit.
        ValueError: if the source is unknown, or has unsupported parts (DINOv3, CLIP,
            MLPs with gates).

    Examples:
        >>> vit = ksm.converters.dense_model("vit_tiny_patch8_32_icons")
        >>> vit.save_to_preset("my_vit")
    """
    check_names("`dense_model`", changes, ("num_heads", *_SETTINGS, *_CHOICES))
    model = own_model(source)
    if model is None:
        model = _converted(source, image_shape, head, changes)
    elif changes:
        raise ValueError(
            "A keras_softmoe model takes no conversion arguments. Received: "
            f"{', '.join(changes)} for source={source!r}."
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
        `ViTMoEImageClassifierPreprocessor`: that of the source, or one that maps pixels
        to `[-1, 1]`.

    Examples:
        >>> preprocessor = ksm.converters.image_preprocessor("dinov2_small", (224, 224))
    """
    converter = ViTMoEImageConverter(image_size, **converter_settings(source))
    return ViTMoEImageClassifierPreprocessor(converter)


def _converted(source, image_shape, head, changes):
    """Create a model of this library from a source of another one."""
    changes, activation = dict(changes), None
    if isinstance(source, checkpoints.Checkpoint):
        checkpoint = source
    elif (path := find_file(source)) is not None:
        num_heads = changes.pop("num_heads", None)
        checkpoint = checkpoints.read_parameters(path, num_heads, image_shape, head)
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
    # Otherwise the positions are resampled in the model.
    fits = image_shape and checkpoints.fits_positions(checkpoint.shapes, image_shape)
    model, _ = model_for(
        checkpoint,
        image_shape=image_shape if fits else None,
        preprocessor=preprocessor,
        activation=activation,
        **changes,
    )
    load_vmoe_params(model, checkpoint)
    return model


def _at_resolution(model, image_shape):
    """Return a copy of a model for images of another shape."""
    backbone = getattr(model, "backbone", model)
    config = {**backbone.get_config(), "image_shape": image_shape}
    new = new_backbone = type(backbone).from_config(config)
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


def own_model(source):
    """Return the model of this library that a source is or names, or `None`."""
    if isinstance(getattr(source, "backbone", source), ViTMoEBackbone):
        return source
    if not _is_own_preset(source):
        return None
    name = str(source)
    kind, _ = catalogue.read_config(name)
    if keras.saving.get_registered_object(kind) is not ViTMoEBackbone:
        raise ValueError(
            "`source` must be a Vision Transformer. Received: "
            f"source={name!r}, a preset of {kind!r}."
        )
    task = catalogue.task_of(name)
    cls = keras.saving.get_registered_object(task) if task else ViTMoEBackbone
    return (cls or ViTMoEImageClassifier).from_preset(name)


def find_file(source):
    """Return the path of the file of weights of a source, `None` if it has none."""
    if not isinstance(source, _PATH):
        return None
    source = _downloaded(os.fspath(source))
    path = Path(source)
    if checkpoints.is_one_file(source) or Path(f"{source}.index").is_file():
        return source
    if path.is_file():
        raise ValueError(
            f"Unsupported file format: '{source}'. Accepted: "
            f"{' and '.join(checkpoints.ONE_FILE_SUFFIXES)}, since pickled files can "
            "execute code: save such a file as safetensors."
        )
    if not path.is_dir() or _registered_name(source):
        return None
    if (path / _WEIGHTS).is_file():
        return str(path / _WEIGHTS)
    raise ValueError(
        f"The directory '{source}' has no weights in a supported format: neither a "
        f"preset nor a file {_WEIGHTS} (in one piece)."
    )


def from_keras_hub(source):
    """Return a model of KerasHub, given or named by a preset."""
    if isinstance(source, keras.layers.Layer):
        return source
    if not isinstance(source, _PATH):
        raise ValueError(
            "`source` must be a model, a name or a path. Received: source="
            f"{type(source).__name__}."
        )
    name = os.fspath(source)
    classes = (*SUPPORTED, "SigLIPBackbone")
    known = [n for cls in classes for n in getattr(keras_hub.models, cls).presets]
    if name not in known and not catalogue.is_handle(name) and not Path(name).is_dir():
        near = difflib.get_close_matches(name, [*known, *catalogue.names()], n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(
            "`source` must be a preset of this library or of KerasHub, or a path that "
            f"exists. Received: source={name!r}.{hint}"
        )
    try:
        try:
            return keras_hub.models.ImageClassifier.from_preset(name)
        except (TypeError, ValueError):
            # It has no head, or there are no classifiers on such a backbone.
            return keras_hub.models.Backbone.from_preset(name)
    except Exception as error:
        raise ValueError(
            f"KerasHub could not load {name!r}; a folder from "
            "`keras_hub.models.Backbone.from_preset(...).save_to_preset(FOLDER)` needs "
            f"no network. Reason: {type(error).__name__}: {error}"
        ) from error


def converter_settings(source):
    """Return the arguments of a `ViTMoEImageConverter` for the images of a source."""
    if isinstance(source, _PATH):
        if _is_own_preset(source):
            converter = ViTMoEImageConverter.from_preset(str(source))
        elif (path := find_file(source)) is not None:
            return _settings_beside(path)
        else:
            try:
                converter = keras_hub.layers.ImageConverter.from_preset(str(source))
            except (ValueError, OSError):
                converter = None
    else:
        preprocessor = getattr(source, "preprocessor", None)
        converter = getattr(preprocessor, "image_converter", None)
    if converter is None:
        return {}
    config = converter.get_config()
    return {name: config[name] for name in _CONVERTER if name in config}


def _settings_beside(path):
    """Return scale and offset from the JSON files of `transformers` and `timm`."""
    about = checkpoints.read_text_beside(path, checkpoints.PREPROCESSOR_FILE)
    mean, std = about.get("image_mean"), about.get("image_std")
    if mean is None:
        about = checkpoints.read_text_beside(path, checkpoints.CONFIG_FILE)
        about = about.get("pretrained_cfg")
        about = about if isinstance(about, dict) else {}
        mean, std = about.get("mean"), about.get("std")
    if mean is None:
        return {}
    try:
        pairs = [(float(m), float(s)) for m, s in zip(mean, std, strict=True)]
        scale = [1.0 / (255.0 * s) for _, s in pairs]
        return {"scale": scale, "offset": [-m / s for m, s in pairs]}
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise checkpoints.CheckpointError(
            f"The preprocessing config next to '{path}' is invalid. Received: "
            f"mean={str(mean)[:40]}, std={str(std)[:40]}."
        ) from error


def _is_own_preset(source):
    """Return whether a source is the name or directory of our preset."""
    if not isinstance(source, _PATH) or catalogue.is_handle(source):
        return False
    if _registered_name(str(source)).startswith("keras_softmoe>"):
        return True
    return not Path(source).exists() and str(source) in catalogue.names()


def _registered_name(directory):
    """Return the registered name in a preset's `config.json`, or `""`."""
    name = checkpoints.CONFIG_FILE
    about = checkpoints.read_text_beside(str(Path(directory, name)), name)
    return str(about.get("registered_name") or "")


def _downloaded(source):
    """Download a Hugging Face repository that is no preset; else return the source."""
    if not source.startswith(_HUGGING_FACE):
        return source
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        # The error of KerasHub names the missing package.
        return source
    name = source.removeprefix(_HUGGING_FACE)
    try:
        folder = snapshot_download(name, allow_patterns=["*.json"])
        if not _registered_name(folder):
            folder = snapshot_download(name, allow_patterns=["*.json", _WEIGHTS])
            return folder
    except Exception as error:
        raise ValueError(
            f"{source!r} could not be fetched; a folder with {_WEIGHTS} and the .json "
            f"files needs no network. Reason: {type(error).__name__}: {error}"
        ) from error
    return source
