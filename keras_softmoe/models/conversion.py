"""Conversion of checkpoints, of released ones too, to models and preset directories."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from keras_softmoe import catalogue, checkpoints, files
from keras_softmoe.keras_adapter.layers import zero_initialization
from keras_softmoe.models.configuration import preset_is_saved
from keras_softmoe.models.image_classifier import ViTMoEImageClassifier
from keras_softmoe.models.image_preprocessor import (
    ViTMoEImageClassifierPreprocessor,
    ViTMoEImageConverter,
)
from keras_softmoe.models.vit import ViTMoEBackbone
from keras_softmoe.models.vmoe_params import load_vmoe_params
from keras_softmoe.ops.capacity import RELEASED
from keras_softmoe.routers import Router, SoftmaxTokenChoiceRouter, SoftRouter
from keras_softmoe.sharding.variables import room_for


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

    Names and shapes of the parameters determine nearly all of the model; the arguments
    default to the settings of the released V-MoE models.

    Args:
        prefix: str or path: the common part of a sharded checkpoint's files
            (`PREFIX.index`, ...), or a Vision Transformer's `.npz` or `.safetensors`.
            Or a URL (`gs://bucket/name`), or the result of `read_checkpoint`.
        preset_dir: str or path of a directory to write, new or empty.
        image_shape: `(height, width, channels)`. By default a square, by the positions.
        router: a router from `keras_softmoe.routers`. By default the released models'
            `SoftmaxTokenChoiceRouter`, or the `SoftRouter` of the parameters.
        group_images: int, images routed together. By default 8; 1 for a `SoftRouter`.
        dispatch_dtype: `"bfloat16"` (as the released code) or `None`, see `layers.MoE`.
        pooling: `"gap"` (default) or `"first"`, if the parameters do not tell.
        position_embedding: `"sincos2d"` (default) or `"none"`, if none is learned.
        preprocessor: by default one that resizes, and maps 0..255 to -1..1.
        verbose: 0 or 1, whether to show a progress bar.

    Returns:
        str, `preset_dir`: a classifier if the checkpoint has a head, else a backbone.

    Raises:
        CheckpointError: (a `ValueError`) if the checkpoint is damaged or foreign.
        ValueError: if an argument contradicts it, or `preset_dir` is not empty.

    Source: V-MoE's released code (names, format and settings of its checkpoints).

    Examples:
        >>> ksm.converters.convert_vmoe_checkpoint("downloads/vmoe_b16", "my_vmoe_b16")
        >>> model = ksm.models.ViTMoEImageClassifier.from_preset("my_vmoe_b16")
    """
    target = Path(preset_dir)
    with files.wrap_os_errors(target):
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_taken:
        raise ValueError(
            "`preset_dir` must be a new or an empty directory. Received: "
            f"preset_dir={str(preset_dir)!r}, which is not empty."
        )
    checkpoint = checkpoints.read_parameters(prefix, image_shape=image_shape)
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
    return _write(model, checkpoint, target, prefix, preprocessor, verbose)


def model_for(
    checkpoint,
    router=None,
    group_images=None,
    dispatch_dtype="bfloat16",
    preprocessor=None,
    activation=None,
    **given,
):
    """Create the model of a checkpoint, without its parameters, and its preprocessor.

    `given` is as in `read_vit_settings`, the rest as in `convert_vmoe_checkpoint`. A
    classifier has its preprocessor itself, so the second result is `None`.
    """
    given = {name: value for name, value in given.items() if value is not None}
    given = {**checkpoint.settings, **given}
    found = checkpoints.read_vit_settings(checkpoint.shapes, **given)
    settings = {**found.settings, "dtype": "float32"}
    if found.num_experts is not None:
        is_soft = found.slots_per_expert is not None
        if router is None and is_soft:
            router = SoftRouter(found.num_experts, found.slots_per_expert)
        elif router is None:
            router = SoftmaxTokenChoiceRouter(
                found.num_experts,
                num_selected_experts=2,
                capacity_factor=1.05,
                **RELEASED,
            )
        elif router.num_experts != found.num_experts:
            raise ValueError(
                f"The checkpoint has {found.num_experts} experts. Received: a "
                f"router with num_experts={router.num_experts}."
            )
        if group_images is None:
            group_images = 1 if is_soft else 8
        settings |= {
            "router": router,
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


def _write(model, checkpoint, directory, origin, preprocessor=None, verbose=1):
    """Load a checkpoint into a model and save it as a preset that names its origin."""
    load_vmoe_params(model, checkpoint, verbose=verbose)
    room = room_for(model.variables)
    with (
        files.atomic_directory(directory, catalogue.PRESET_MARKS, room=room) as new,
        preset_is_saved(),
    ):
        model.save_to_preset(str(new))
        if preprocessor is not None:
            preprocessor.save_to_preset(str(new))
        file = new / catalogue.METADATA_FILE
        about = json.loads(file.read_text(encoding="utf-8"))
        about |= {"kind": "converted", "checkpoint": str(origin)}
        file.write_text(json.dumps(about, indent=4), encoding="utf-8")
    return str(directory)


def convert(
    name: str, prefix: str | os.PathLike | None = None, verbose: int = 1
) -> str:
    """Convert a released checkpoint to the preset of this name, once.

    `from_preset` does it when the preset is first loaded, and downloads the checkpoint.
    Presets are kept in `keras_softmoe/` below `KERAS_HOME` (default `~/.keras`).

    Args:
        name: str, the name of a convertible preset.
        prefix: str or path, of copies that you have: the common part of their names
            before `.index`, or the one `.npz` file. `None`: download them.
        verbose: 0 or 1, whether to show progress.

    Returns the preset's directory in the cache, a str; an existing one is unchanged.

    Raises:
        ValueError: if the preset is not convertible, or the checkpoint damaged or not
            to be fetched (the message gives the steps by hand).

    Examples:
        >>> name = "vmoe_small_patch32_last2_8e_384_imagenet_light"
        >>> prefix = "downloads/vmoe_s32_last2_ilsvrc2012_randaug_light1_ft_ilsvrc2012"
        >>> ksm.presets.convert(name, prefix)
    """
    preset = catalogue.describe(name)
    if preset.kind != "convertible":
        raise ValueError(
            "Only these presets are converted from a checkpoint: "
            f"{', '.join(catalogue.names_of_kind('convertible'))}. Received: "
            f"name={name!r}, of kind {preset.kind!r}."
        )
    home = os.environ.get("KERAS_HOME") or Path("~", ".keras").expanduser()
    target = Path(home, "keras_softmoe", name)
    lock = target.with_name(f".{name}.lock")
    waiting = f"Another process converts {name!r}: waiting for it ..."
    try:
        # Perhaps nothing can be written there. (A lock is left by a killed process.)
        if target.is_dir() and not os.access(lock, os.W_OK):
            return str(target)
        with files.one_process(lock, verbose and waiting):
            # It is put there as a whole, or not at all; perhaps by that process.
            if target.is_dir():
                return str(target)
            if prefix is not None:
                return _convert(preset, prefix, target, verbose)
            return _fetch_and_convert(preset, target, verbose)
    except OSError as error:
        raise ValueError(
            f"The converted preset {name!r} cannot be kept in '{target.parent}'. Make "
            "room there, or set the variable `KERAS_HOME` to a directory that this "
            f"program may write to. Reason: {type(error).__name__}: {error}"
        ) from error


def _fetch_and_convert(preset, target, verbose):
    name, url = preset.name, preset.checkpoint
    prefix = f".{name}.download."
    # Left by a killed process; no other one is here.
    for left in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as folder:
        try:
            copy = checkpoints.download_checkpoint(url, folder, verbose)
        except files.WriteError:
            raise
        except (OSError, checkpoints.CheckpointError) as error:
            by_hand = (
                f"these files: {url}.index and all of {url}.data-00000-of-... (the "
                "last number is their count), for example with `gcloud storage cp "
                f'"{url}.index" "{url}.data-*" FOLDER`.'
            )
            if checkpoints.is_one_file(url):
                address = checkpoints.web_address(url) or url
                by_hand = (
                    f"this file to FOLDER: {address} (`gcloud storage cp "
                    f'"{url}" FOLDER`, for example).'
                )
            raise ValueError(
                f"The weights of the preset {name!r} come from a released checkpoint, "
                f"which could not be fetched. Where there is a network, fetch {by_hand}"
                f' Then convert, once: `keras_softmoe.presets.convert("{name}", '
                f'prefix="FOLDER/{url.rpartition("/")[2]}")`. Reason: {error}'
            ) from error
        return _convert(preset, copy, target, verbose)


def _convert(preset, prefix, target, verbose):
    checkpoint = checkpoints.read_parameters(prefix)
    found = checkpoints.read_vit_settings(checkpoint.shapes)
    row = catalogue.rows()[preset.name]
    try:
        _check_same_model(found, row)
        _, config = catalogue.read_config(preset.name)
        # Only the checkpoint tells whether there are pre-logits.
        width = found.settings["representation_dim"]
        config |= {"representation_dim": width, "dtype": "float32"}
        converter = ViTMoEImageConverter(
            config["image_shape"][:2], crop_to_aspect_ratio=row.release.crop
        )
        with zero_initialization():
            model = ViTMoEImageClassifier(
                ViTMoEBackbone(**config),
                row.release.num_classes,
                preprocessor=ViTMoEImageClassifierPreprocessor(converter),
                name=f"{preset.name}_classifier",
            )
        return _write(model, checkpoint, target, preset.checkpoint, verbose=verbose)
    except ValueError as error:
        error.add_note(f"The checkpoint of {preset.name!r} is {preset.checkpoint}.")
        raise


def _check_same_model(found, row):
    """Raise unless a checkpoint's sizes are those of a convertible preset."""
    expected = row.architecture().flat()
    router = expected["router"]
    expected["num_experts"] = router and router.num_experts
    expected["num_classes"] = row.release.num_classes
    counts = {name: getattr(found, name) for name in ("num_experts", "num_classes")}
    differing = [
        f"{name} is {value}, not {expected[name]}"
        for name, value in {**found.settings, **counts}.items()
        if name != "representation_dim" and value != expected[name]
    ]
    if differing:
        raise ValueError(
            f"The checkpoint is that of another model: {'; '.join(differing)}."
        )
