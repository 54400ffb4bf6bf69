"""Released checkpoints, converted to presets when they are first used."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import keras_hub

from keras_softmoe import catalogue
from keras_softmoe.backbones import (
    ViTMoEBackbone,
    ViTMoEImageClassifier,
    ViTMoEImageClassifierPreprocessor,
    ViTMoEImageConverter,
)
from keras_softmoe.checkpoints import (
    CheckpointError,
    download_checkpoint,
    is_one_file,
    read_parameters,
    read_vit_settings,
    web_address,
)
from keras_softmoe.files import WriteError, atomic_directory, one_process
from keras_softmoe.keras_adapter import zero_initialization
from keras_softmoe.models.vmoe_params import load_vmoe_params
from keras_softmoe.sharding.variables import room_for


def convert(
    name: str, prefix: str | os.PathLike | None = None, verbose: int = 1
) -> str:
    """Convert a released checkpoint to the preset of this name, once.

    `from_preset` does it when the preset is first loaded, and downloads the checkpoint.
    Without a network, fetch the files elsewhere and call this with the `prefix` of the
    copies; `from_preset` then finds the preset.

    Presets are kept in `keras_softmoe/` below the directory of Keras: the variable
    `KERAS_HOME`, or `~/.keras`. Delete a directory there to convert it again.

    Args:
        name: str, the name of a convertible preset.
        prefix: str or path, the common part of the checkpoint's files, before
            `.index`, or its one `.npz` file. `None`: download them.
        verbose: 0 or 1, whether to show progress.

    Returns:
        str, the preset's directory in the cache. An existing one is returned as it is.

    Raises:
        ValueError: if the preset is not a convertible one, the checkpoint cannot be
            fetched (the message gives the steps by hand), or it is damaged or another
            model's.

    Examples:
        >>> name = "vmoe_small_patch32_last2_8e_384_imagenet_light"
        >>> prefix = "downloads/vmoe_s32_last2_ilsvrc2012_randaug_light1_ft_ilsvrc2012"
        >>> ksm.presets.convert(name, prefix)
        >>> model = ksm.models.ViTMoEImageClassifier.from_preset(name)
    """
    preset = catalogue.describe(name)
    if preset.kind != "convertible":
        raise ValueError(
            f"The preset {name!r} is not converted from a checkpoint: its kind is "
            f"{preset.kind!r}. Convertible are: "
            f"{', '.join(catalogue.names_of_kind('convertible'))}."
        )
    target = _cache() / name
    lock = target.with_name(f".{name}.lock")
    waiting = f"Another process converts {name!r}: waiting for it ..."
    try:
        # Perhaps nothing can be written there. (A lock is left by a killed process.)
        if target.is_dir() and not os.access(lock, os.W_OK):
            return str(target)
        with one_process(lock, verbose and waiting):
            # It is put there as a whole, or not at all; perhaps by that process.
            if target.is_dir():
                return str(target)
            if prefix is not None:
                return _convert(preset, prefix, target, verbose)
            return _fetch_and_convert(preset, target, verbose)
    except OSError as error:
        raise ValueError(
            f"The converted preset {name!r} cannot be kept in '{target.parent}', below "
            "the directory of Keras. Make room there, or set the variable `KERAS_HOME` "
            "to a directory that this program may write to. Reason: "
            f"{type(error).__name__}: {error}"
        ) from error


def _fetch_and_convert(preset, target, verbose):
    name = preset.name
    prefix = f".{name}.download."
    # Left by a killed process; no other one is here.
    for left in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as folder:
        try:
            copy = download_checkpoint(preset.checkpoint, folder, verbose)
        except WriteError:
            raise
        except (OSError, CheckpointError) as error:
            raise ValueError(
                f"The weights of the preset {name!r} come from a released checkpoint, "
                "which could not be fetched. Where there is a network, fetch "
                f"{_by_hand(preset.checkpoint)} Then convert, once: "
                f'`keras_softmoe.presets.convert("{name}", '
                f'prefix="FOLDER/{preset.checkpoint.rpartition("/")[2]}")`. '
                f"Reason: {error}"
            ) from error
        return _convert(preset, copy, target, verbose)


def _by_hand(url):
    """Return the instructions for fetching the files of a checkpoint."""
    if is_one_file(url):
        return (
            f"this file to FOLDER: {web_address(url) or url} (`gcloud storage cp "
            f'"{url}" FOLDER`, for example).'
        )
    return (
        f"these files: {url}.index and all of {url}.data-00000-of-... (the last number "
        f'is how many there are), for example with `gcloud storage cp "{url}.index" '
        f'"{url}.data-*" FOLDER`.'
    )


def _convert(preset, prefix, target, verbose):
    checkpoint = read_parameters(prefix)
    found = read_vit_settings(checkpoint.shapes)
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
        return write_converted(
            model, checkpoint, target, preset.checkpoint, verbose=verbose
        )
    except ValueError as error:
        error.add_note(f"The checkpoint of {preset.name!r} is {preset.checkpoint}.")
        raise


def _check_same_model(found, row):
    """Raise unless a checkpoint's sizes are those of a convertible preset."""
    settings = row.architecture().flat()
    expected = {
        **settings,
        "num_experts": settings["router"] and settings["router"].num_experts,
        "num_classes": row.release.num_classes,
    }
    found = {
        **found.settings,
        "num_experts": found.num_experts,
        "num_classes": found.num_classes,
    }
    differing = [
        f"{name} is {value}, not {expected[name]}"
        for name, value in found.items()
        if name != "representation_dim" and value != expected[name]
    ]
    if differing:
        raise ValueError(
            f"The checkpoint is that of another model: {'; '.join(differing)}."
        )


def write_converted(model, checkpoint, directory, origin, preprocessor=None, verbose=1):
    """Load a checkpoint into a model and save it as a preset that names its origin.

    Args:
        model: backbone or task of this library.
        checkpoint: `Checkpoint` with its parameters, under V-MoE's names.
        directory: str or path to write, which appears when all is written.
        origin: str or path of the checkpoint.
        preprocessor: the preprocessor to save, if the model has none.
        verbose: 0 or 1, whether to show a progress bar.

    Returns:
        str, `directory`.
    """
    load_vmoe_params(model, checkpoint, verbose=verbose)
    with atomic_directory(
        directory, catalogue.PRESET_MARKS, room=room_for(model.variables)
    ) as new:
        # KerasHub's own methods: the directory is already written aside.
        is_task = isinstance(model, keras_hub.models.Task)
        base = keras_hub.models.Task if is_task else keras_hub.models.Backbone
        base.save_to_preset(model, str(new))
        if preprocessor is not None:
            preprocessor.save_to_preset(str(new))
        _note_origin(new, origin)
    return str(directory)


def _note_origin(directory, origin):
    file = directory / catalogue.METADATA_FILE
    metadata = json.loads(file.read_text(encoding="utf-8"))
    metadata |= {"kind": "converted", "checkpoint": str(origin)}
    file.write_text(json.dumps(metadata, indent=4), encoding="utf-8")


def _cache():
    home = os.environ.get("KERAS_HOME") or Path("~", ".keras").expanduser()
    return Path(home, "keras_softmoe")
