"""The way from a name, a directory or a handle to a model.

Every `from_preset` of this library begins here: `open_preset` finds the files, and
KerasHub makes the object. A preset without a directory (an architecture) gets a
temporary one. A released checkpoint is converted to a directory when it is first asked
for, by `convert`, and that is loaded like any other.

This module imports none of our classes, because they are decorated with what is here:
preprocessing with `load_from_presets`, models with `load_and_save_presets`. Where
`convert` needs a model, KerasHub makes it from the preset's own configuration.
`conversion.py` imports the classes, and makes directories of checkpoints that are in no
catalogue.
"""

import contextlib
import functools
import json
import os
import tempfile
from pathlib import Path

import keras_hub

from keras_softmoe import catalogue
from keras_softmoe.checkpoints import (
    CheckpointError,
    download_checkpoint,
    read_architecture,
    read_parameters,
)
from keras_softmoe.files import replaced_directory
from keras_softmoe.layers.feedforward import weights_will_be_loaded
from keras_softmoe.models.mutable_routing import pop_mutable_settings
from keras_softmoe.models.vmoe_params import load_vmoe_params
from keras_softmoe.sharding import save_in_one_process

TASK_FILE = "task.json"
TASK_WEIGHTS_FILE = "task.weights.h5"
WEIGHTS_FILES = ("model.weights.h5", "model.weights.json")

_FROM_PRESET = """Load a model from a preset.

Args:
    preset: str: a name from `keras_softmoe.presets.names()`, the path of a preset
        directory, or a KerasHub handle (`"hf://user/model"`).
    load_weights: bool, whether to load weights or start from random ones.
    **kwargs: arguments of the class to change (with another `image_shape` the position
        embeddings are resampled), and settings of the routers, see `set_routing`.

Returns:
    A model of this class.

Raises:
    ValueError: if the name is unknown (the message offers the nearest), the preset has
        no weights, or a file is missing, damaged or foreign.

Example:

>>> name = "soft_moe_small_patch16_128e_224"
>>> backbone = ksm.models.ViTMoEBackbone.from_preset(name, load_weights=False)
"""

_SAVE_TO_PRESET = """Save as a preset directory. If that fails, an existing one is kept.

Where several processes share the model, all of them have to call this, and the first
one writes.

Args:
    preset_dir: str, the directory.
    max_shard_size: int or float, the size in GB over which weights are split into
        several files, or `None`.
"""


def load_from_presets(cls):
    """Class decorator: `from_preset` takes whatever `open_preset` does.

    For classes without weights: converters, tokenizers, preprocessors. (A mixin would
    have to come first, but KerasHub takes the first base of a class for its kind.)
    """
    read = cls.from_preset.__func__

    @functools.wraps(read)
    def from_preset(cls, preset, **kwargs):
        with open_preset(preset, load_weights=False) as directory:
            return read(cls, directory, **kwargs)

    cls.from_preset = classmethod(from_preset)
    return cls


def load_and_save_presets(cls):
    """Class decorator of models: `from_preset` and `save_to_preset` of all of them.

    `from_preset` takes whatever `open_preset` does, and settings of the routers. If the
    class has a `from_preset` of its own, that is given the directory of the preset.
    """
    read, save = cls.from_preset.__func__, cls.save_to_preset

    @functools.wraps(read)
    def from_preset(cls, preset, load_weights=True, **kwargs):
        settings = pop_mutable_settings(kwargs)
        opened = open_preset(preset, load_weights)
        with opened as directory, weights_will_be_loaded(load_weights):
            model = read(cls, directory, load_weights=load_weights, **kwargs)
        model.set_routing(**settings)
        return model

    if "from_preset" not in vars(cls):
        from_preset.__doc__ = _FROM_PRESET

    @functools.wraps(save)
    def save_to_preset(self, preset_dir, max_shard_size=10):
        save_in_one_process(
            lambda new: save(self, str(new), max_shard_size=max_shard_size),
            lambda: replaced_directory(preset_dir, keep=_is_no_weights_file),
        )

    save_to_preset.__doc__ = _SAVE_TO_PRESET
    cls.from_preset = classmethod(from_preset)
    cls.save_to_preset = save_to_preset
    return cls


def _is_no_weights_file(path):
    # In one file or in several: weights of the other kind would be older ones.
    return not path.match("model*.weights.*")


@contextlib.contextmanager
def open_preset(preset, load_weights=True):
    """Find the files of a preset, and explain what goes wrong while they are read.

    Args:
        preset: str or path: a name of the catalogue, a directory, or a handle that
            KerasHub resolves (`hf://...`, `kaggle://...`).
        load_weights: bool, whether weights are wanted.

    Yields:
        str, a directory, or the handle. For a convertible preset with weights that is
        a directory of the cache, where it is put first if it is not there yet. For an
        architecture it is a temporary one.

    Raises:
        ValueError: if the name is unknown, the directory is not a preset of this
            library, or weights are wanted that do not exist or cannot be fetched.
    """
    with contextlib.ExitStack() as stack:
        if catalogue.is_handle(preset):
            place = directory = str(preset)
        elif path := catalogue.find_directory(preset):
            if load_weights and not has_weights(path):
                path = _with_weights(path)
            place = directory = path
        else:
            place = str(preset)
            if load_weights:
                raise _never_released(place)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            directory = catalogue.write(place, Path(folder, place))
        with catalogue.explain_errors(place):
            yield str(directory)


def has_weights(path):
    """Whether a preset directory (`pathlib.Path`) has weights."""
    return any((path / file).is_file() for file in WEIGHTS_FILES)


def _with_weights(path):
    """A directory with the weights that the one of this path does not have."""
    kind = catalogue.read_metadata(path).get("kind")
    if kind == "convertible":
        return Path(convert(path.name))
    if kind == "architecture":
        raise _never_released(path.name)
    raise ValueError(
        f"The preset directory '{path}' has no weights: expected one of "
        f"{', '.join(WEIGHTS_FILES)}. Copy the missing file there, save the "
        "preset again, or pass `load_weights=False`."
    )


def _never_released(name):
    return ValueError(
        f"The preset {name!r} describes an architecture whose weights were never "
        "released. Received: load_weights=True. Use "
        "`from_preset(..., load_weights=False)` and train it, or choose a preset with "
        f"weights: {', '.join(catalogue.names_of_kind('trained'))}."
    )


def check_task(directory, load_weights=True):
    """Raise unless a preset holds a whole task: a backbone and its head.

    Args:
        directory: str, as `open_preset` yields it. A handle passes.
        load_weights: bool, whether weights are wanted.

    Raises:
        ValueError: if the preset holds a backbone only, or no weights for the head.
    """
    if catalogue.is_handle(directory):
        return
    path = Path(directory)
    if not (path / TASK_FILE).is_file():
        raise ValueError(
            f"The preset {path.name!r} is a backbone without a head: it has no "
            f"{TASK_FILE}. Say what the new head is for: "
            "`from_preset(..., num_classes=10)`."
        )
    if load_weights and not (path / TASK_WEIGHTS_FILE).is_file():
        raise ValueError(
            f"The preset {path.name!r} has no weights for its head: "
            f"{TASK_WEIGHTS_FILE} is missing. Copy the file there, save the preset "
            "again, or start from a new head: `from_preset(..., num_classes=10)`."
        )


# === Released checkpoints ===


def convert(name, prefix=None, verbose=1):
    """Convert a released checkpoint to the preset of this name, once.

    `from_preset` does it when the preset is first loaded, downloading the checkpoint
    from where it was released. Where that is out of reach, fetch the files elsewhere
    and call this with the `prefix` of the copies; `from_preset` then finds the preset.

    Presets are kept in `keras_softmoe/` below the directory of Keras: the one that the
    variable `KERAS_HOME` names, or `~/.keras`. Delete a directory there to have it
    made anew.

    Args:
        name: str, the name of a convertible preset.
        prefix: str or path, the common part of the checkpoint's files, before
            `.index`. `None`: download them.
        verbose: 0 or 1, whether to show progress.

    Returns:
        str, the preset's directory in the cache. If it is there already, nothing else
        is done.

    Raises:
        ValueError: if the preset is none that is converted, the checkpoint cannot be
            fetched (the message says what to do by hand), or it is damaged or another
            model's.

    Example:

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
    # It is put there as a whole, or not at all.
    if target.is_dir():
        return str(target)
    if prefix is not None:
        return _convert(preset, prefix, target, verbose)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download.") as folder:
        try:
            prefix = download_checkpoint(preset.checkpoint, folder, verbose)
        except (OSError, CheckpointError) as error:
            url, file = preset.checkpoint, preset.checkpoint.rpartition("/")[2]
            raise ValueError(
                f"The weights of the preset {name!r} come from a released checkpoint, "
                "which could not be fetched. Where there is a network, fetch these "
                f"files: {url}.index and all of {url}.data-00000-of-... (the last "
                f"number is how many there are), for example with `gcloud storage cp "
                f'"{url}.index" "{url}.data-*" FOLDER`. Then convert them, once: '
                f'`keras_softmoe.presets.convert("{name}", prefix="FOLDER/{file}")`. '
                f"Reason: {error}"
            ) from error
        return _convert(preset, prefix, target, verbose)


def _convert(preset, prefix, target, verbose):
    checkpoint = read_parameters(prefix)
    found = read_architecture(checkpoint.shapes)
    try:
        _check_same_model(found, preset)
        # Whether there are pre-logits is left to the checkpoint.
        with catalogue.explain_errors(preset.path), weights_will_be_loaded():
            backbone = keras_hub.models.Backbone.from_preset(
                str(preset.path),
                load_weights=False,
                dtype="float32",
                representation_dim=found.representation_dim,
            )
            model = keras_hub.models.ImageClassifier.from_preset(
                str(preset.path), load_weights=False, backbone=backbone
            )
        return write_converted(
            model, checkpoint, target, preset.checkpoint, verbose=verbose
        )
    except ValueError as error:
        error.add_note(f"The checkpoint of {preset.name!r} is {preset.checkpoint}.")
        raise


def _check_same_model(found, preset):
    """Raise unless a checkpoint's sizes are those of a convertible preset."""
    _, config = catalogue.read_config(preset.path)
    with catalogue.explain_errors(preset.path):
        task = json.loads((preset.path / TASK_FILE).read_text(encoding="utf-8"))
        expected = {
            **config,
            "num_experts": config["router"]["config"]["num_experts"],
            "num_classes": task["config"]["num_classes"],
        }
    differing = [
        f"{key} is {value}, not {expected[key]}"
        for key, value in found._asdict().items()
        if key in expected and key != "representation_dim"
        # In JSON all sequences are lists.
        if (list(value) if isinstance(value, tuple) else value) != expected[key]
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
        origin: str or path, where the checkpoint comes from.
        preprocessor: what to save beside the model, if the model has none.
        verbose: 0 or 1, whether to show a progress bar.

    Returns:
        str, `directory`.
    """
    load_vmoe_params(model, checkpoint, verbose=verbose)
    with replaced_directory(directory) as new:
        model.save_to_preset(str(new))
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
