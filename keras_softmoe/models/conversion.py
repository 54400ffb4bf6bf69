"""Conversion of a checkpoint of another library to a model and a preset directory."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from keras_softmoe.backbones import (
    ViTMoEBackbone,
    ViTMoEImageClassifier,
    ViTMoEImageClassifierPreprocessor,
    ViTMoEImageConverter,
)
from keras_softmoe.checkpoints import read_parameters, read_vit_settings
from keras_softmoe.files import wrap_os_errors
from keras_softmoe.keras_adapter import zero_initialization
from keras_softmoe.models.released import write_converted
from keras_softmoe.ops.capacity import RELEASED
from keras_softmoe.routers import Router, SoftmaxTokenChoiceRouter, SoftRouter


def convert_vmoe_checkpoint(
    prefix: str | os.PathLike,
    preset_dir: str | os.PathLike,
    image_shape: Sequence[int] | None = None,
    router: Router | None = None,
    group_images: int | None = None,
    dispatch_dtype: str | None = "bfloat16",
    pooling: str | None = None,
    position_embedding: str | None = None,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> str:
    """Convert a checkpoint of a V-MoE or a Vision Transformer to a preset directory.

    Names and shapes of the parameters determine nearly all of the model: sizes, blocks
    with experts and their number, class token or pooling, pre-logits and head. The
    arguments determine the rest. They default to the settings of the released V-MoE
    models, and can be overridden when the preset is loaded.

    The model is built once in memory, and the arrays are read one at a time. The
    directory appears when all of it is written, or not at all.

    Args:
        prefix: str or path: the common part of a sharded checkpoint's files
            (`PREFIX.index`, `PREFIX.data-00000-of-00001`, ...), or a file of a Vision
            Transformer: `.npz` (original, AugReg, big_vision) or `.safetensors`
            (`timm`, `transformers`). Or a URL of these (`gs://bucket/name`). Or the
            result of `read_checkpoint`, under V-MoE's names.
        preset_dir: str or path of the directory to write. It must not exist yet, or be
            empty.
        image_shape: `(height, width, channels)` in pixels. By default a square, from
            the number of learned positions.
        router: a router from `keras_softmoe.routers`, a template. By default
            `SoftmaxTokenChoiceRouter(num_experts, num_selected_experts=2,
            capacity_factor=1.05, rounding="ceil", multiple_of=4)`, or the `SoftRouter`
            that the parameters belong to.
        group_images: int, images whose tokens are routed together. By default 8, and 1
            for a `SoftRouter`.
        dispatch_dtype: `"bfloat16"` or `None`, see `layers.MoE`. The released code
            rounds to bfloat16.
        pooling: `"gap"` (default) or `"first"`, for a checkpoint that has neither a
            class token nor attention pooling.
        position_embedding: `"sincos2d"` (default) or `"none"`, for a checkpoint
            without learned positions.
        preprocessor: a preprocessor of an image classifier. By default one that
            resizes to `image_shape` and maps pixels from 0..255 to -1..1.
        verbose: 0 or 1, whether to show a progress bar.

    Returns:
        str, `preset_dir`: with a classifier if the checkpoint has a head, otherwise
        with a backbone.

    Raises:
        CheckpointError: (a `ValueError`) if the checkpoint is damaged, or that of
            another kind of model.
        ValueError: if an argument contradicts the checkpoint, or `preset_dir` is not
            empty.

    Source: V-MoE's released code (names, format and settings of its checkpoints).

    Examples:
        >>> ksm.converters.convert_vmoe_checkpoint("downloads/vmoe_b16", "my_vmoe_b16")
        >>> model = ksm.models.ViTMoEImageClassifier.from_preset("my_vmoe_b16")
    """
    target = Path(preset_dir)
    with wrap_os_errors(target):
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_taken:
        raise ValueError(
            f"The directory '{target}' is not empty. Received: "
            f"preset_dir={str(preset_dir)!r}. Choose another one, or remove it."
        )
    checkpoint = read_parameters(prefix, image_shape=image_shape)
    model, preprocessor = model_for(
        checkpoint,
        image_shape=image_shape,
        router=router,
        group_images=group_images,
        dispatch_dtype=dispatch_dtype,
        pooling=pooling,
        position_embedding=position_embedding,
        preprocessor=preprocessor,
    )
    return write_converted(
        model, checkpoint, target, prefix, preprocessor=preprocessor, verbose=verbose
    )


def model_for(
    checkpoint,
    router=None,
    group_images=None,
    dispatch_dtype="bfloat16",
    preprocessor=None,
    activation=None,
    **given,
):
    """Create the model of a checkpoint, still without its parameters.

    Args:
        checkpoint: `Checkpoint` under V-MoE's names.
        router: as in `convert_vmoe_checkpoint`, as `group_images`, `dispatch_dtype`
            and `preprocessor`.
        group_images: int.
        dispatch_dtype: `"bfloat16"` or `None`.
        preprocessor: a preprocessor.
        activation: of the head of a classifier, `None` for logits.
        **given: settings that parameters do not determine, as in `read_vit_settings`.

    Returns:
        `(model, preprocessor)`: a classifier that has its preprocessor, and `None`, or
        a backbone and the preprocessor that belongs to it.

    Raises:
        CheckpointError: if these are not the parameters of such a model.
        ValueError: if an argument contradicts them.
    """
    given = {name: value for name, value in given.items() if value is not None}
    found = read_vit_settings(checkpoint.shapes, **{**checkpoint.settings, **given})
    settings = {**found.settings, "dtype": "float32"}
    if found.num_experts is not None:
        if group_images is None:
            group_images = 8 if found.slots_per_expert is None else 1
        settings |= {
            "router": _router(found, router),
            "group_images": group_images,
            "dispatch_dtype": dispatch_dtype,
        }
    if preprocessor is None:
        preprocessor = ViTMoEImageClassifierPreprocessor(
            ViTMoEImageConverter(image_size=settings["image_shape"][:2])
        )
    # Its weights are loaded over the initial ones.
    with zero_initialization():
        backbone = ViTMoEBackbone(**settings)
    if found.num_classes is None:
        return backbone, preprocessor
    classifier = ViTMoEImageClassifier(
        backbone, found.num_classes, preprocessor=preprocessor, activation=activation
    )
    return classifier, None


def _router(found, given):
    """Return the router: `given`, or that of the released models.

    Raises:
        ValueError: if `given` is for another number of experts.
    """
    if given is None:
        if found.slots_per_expert is not None:
            return SoftRouter(found.num_experts, found.slots_per_expert)
        return SoftmaxTokenChoiceRouter(
            found.num_experts,
            num_selected_experts=2,
            capacity_factor=1.05,
            **RELEASED,
        )
    if given.num_experts != found.num_experts:
        raise ValueError(
            f"The checkpoint has {found.num_experts} experts. Received: a "
            f"router with num_experts={given.num_experts}."
        )
    return given
