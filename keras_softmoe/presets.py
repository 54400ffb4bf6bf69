"""The catalogue of presets: names, where they are kept, and what they are.

A preset is a directory in KerasHub's format: `config.json` (architecture),
`metadata.json`, and, where they exist, `model.weights.h5`, `task.json`,
`task.weights.h5`, `preprocessor.json`, `image_converter.json` and a `README.md` (the
model card). In ours, `metadata.json` also tells the `kind`:

- `"trained"`: real weights, trained with the script that is named in its card.
- `"convertible"`: weights released by others. They are downloaded and converted when
  they are first asked for, and kept in the cache of Keras.
- `"architecture"`: the weights were never released. Load with `load_weights=False`.
"""

import contextlib
import difflib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from keras_softmoe import converters

CONFIG_FILE = "config.json"
METADATA_FILE = "metadata.json"
PREPROCESSOR_FILE = "preprocessor.json"
TASK_FILE = "task.json"
TASK_WEIGHTS_FILE = "task.weights.h5"
WEIGHTS_FILES = ("model.weights.h5", "model.weights.json")
_MODEL_WEIGHTS = "model*.weights.*"

# Handles that KerasHub resolves itself.
_REMOTE = ("hf://", "kaggle://", "modelscope://")


class Preset(NamedTuple):
    """One entry of the catalogue.

    Attributes:
        name: str, what `from_preset` takes.
        kind: `"trained"`, `"convertible"` or `"architecture"`.
        description: str, one sentence.
        source: str, paper and section, or the training script.
        licence: str, of the weights.
        parameters: int, parameters of the backbone.
        path: `pathlib.Path` of the directory.
        checkpoint: str or `None`, where a convertible preset's weights come from.
        accuracy: dict from data set to the published accuracy, from 0 to 1. Empty if
            none was published; what it was measured on is in the card.
    """

    name: str
    kind: str
    description: str
    source: str
    licence: str
    parameters: int
    path: Path
    checkpoint: str | None = None
    accuracy: dict = {}


def names():
    """Names of all presets, sorted.

    Returns:
        list of str.

    Example:

    >>> "vit_base_patch16_224" in ksm.presets.names()
    True
    """
    return sorted(path.parent.name for path in _root().glob(f"*/{CONFIG_FILE}"))


def describe(name):
    """What a preset is.

    Args:
        name: str, one of `names()`.

    Returns:
        `Preset`.

    Raises:
        ValueError: if the name is unknown (the message offers the nearest ones) or its
            metadata is damaged.
    """
    path = _directory(name)
    with explained(path):
        metadata = json.loads((path / METADATA_FILE).read_text(encoding="utf-8"))
        return Preset(
            name=name,
            kind=metadata["kind"],
            description=metadata["description"],
            source=metadata["source"],
            licence=metadata["licence"],
            parameters=metadata["parameter_count"],
            path=path,
            checkpoint=metadata.get("checkpoint"),
            accuracy=metadata.get("accuracy", {}),
        )


def resolve(preset, load_weights=True):
    """Find the directory of a preset and check that it can be loaded.

    Args:
        preset: str or path: a name of the catalogue, a directory, or a handle that
            KerasHub resolves (`hf://...`, `kaggle://...`).
        load_weights: bool, whether weights are wanted.

    Returns:
        str, a directory or the handle. For a convertible preset with weights that is
        a directory of the cache, where it is put first if it is not there yet.

    Raises:
        ValueError: if the name is unknown, the directory is not a preset of this
            library, or weights are wanted that do not exist or cannot be fetched.
    """
    if str(preset).startswith(_REMOTE):
        return str(preset)
    path = Path(preset)
    # A directory of the user's goes first, as for KerasHub.
    if not path.is_dir():
        path = _directory(str(preset))
    _check_config(path)
    if load_weights and not any((path / file).is_file() for file in WEIGHTS_FILES):
        if _kind(path) == "convertible":
            return convert(path.name)
        if _kind(path) == "architecture":
            raise ValueError(
                f"The preset {path.name!r} describes an architecture whose weights "
                "were never released. Received: load_weights=True. Use "
                "`from_preset(..., load_weights=False)` and train it, or choose a "
                "preset with weights: "
                f"{', '.join(n for n in names() if _kind(_root() / n) == 'trained')}."
            )
        raise ValueError(
            f"The preset directory '{path}' has no weights: expected one of "
            f"{', '.join(WEIGHTS_FILES)}. Copy the missing file there, save the "
            "preset again, or pass `load_weights=False`."
        )
    return str(path)


def check_task(preset, load_weights=True):
    """Raise unless a preset holds a whole task: a backbone and its head.

    Args:
        preset: as in `resolve`. A handle that KerasHub resolves passes.
        load_weights: bool, whether weights are wanted.

    Raises:
        ValueError: if the preset holds a backbone only, or no weights for the head.
    """
    if str(preset).startswith(_REMOTE):
        return
    path = Path(resolve(preset, load_weights))
    if not (path / TASK_FILE).is_file():
        raise ValueError(
            f"The preset in '{path}' is a backbone without a head: it has no "
            f"{TASK_FILE}. Say what the new head is for: "
            "`from_preset(..., num_classes=10)`."
        )
    if load_weights and not (path / TASK_WEIGHTS_FILE).is_file():
        raise ValueError(
            f"The preset in '{path}' has no weights for its head: {TASK_WEIGHTS_FILE} "
            "is missing. Copy the file there, save the preset again, or start from a "
            "new head: `from_preset(..., num_classes=10)`."
        )


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
    preset = describe(name)
    if preset.kind != "convertible":
        convertible = [n for n in names() if _kind(_root() / n) == "convertible"]
        raise ValueError(
            f"The preset {name!r} is not converted from a checkpoint: its kind is "
            f"{preset.kind!r}. Convertible are: {', '.join(convertible)}."
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
            prefix = converters.download_checkpoint(preset.checkpoint, folder, verbose)
        except (OSError, converters.CheckpointError) as error:
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
    with explained(preset.path):
        backbone, task, preprocessor = (
            json.loads((preset.path / file).read_text(encoding="utf-8"))
            for file in (CONFIG_FILE, TASK_FILE, PREPROCESSOR_FILE)
        )
    checkpoint = converters.read_checkpoint(prefix)
    config = {**backbone["config"], "num_classes": task["config"]["num_classes"]}
    try:
        converters.convert_as_configured(
            checkpoint, target, config, preprocessor, verbose
        )
    except ValueError as error:
        error.add_note(f"The checkpoint of {preset.name!r} is {preset.checkpoint}.")
        raise
    return str(target)


def _cache():
    home = os.environ.get("KERAS_HOME") or Path("~", ".keras").expanduser()
    return Path(home, "keras_softmoe")


@contextlib.contextmanager
def opened(preset, load_weights=True):
    """Find a preset, and explain what goes wrong while it is read.

    Args:
        preset: as in `resolve`.
        load_weights: bool, whether weights are wanted.

    Yields:
        str, as `resolve` returns it.
    """
    directory = resolve(preset, load_weights)
    with explained(directory):
        yield directory


@contextlib.contextmanager
def explained(directory):
    """Turn what goes wrong while a preset is read into an error that says so."""
    try:
        yield
    except (OSError, EOFError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"The preset in '{directory}' cannot be read: a file is damaged, "
            "truncated, or belongs to another model. Restore it or save the preset "
            f"again. Reason: {type(error).__name__}: {error}"
        ) from error
    except ValueError as error:
        error.add_note(f"This happened while the preset in '{directory}' was read.")
        raise


@contextlib.contextmanager
def replaced_directory(directory):
    """Write a directory aside and put it in place when all of it is written.

    Files that are already there and are not written again are kept. If writing
    fails, the directory stays as it was.

    Args:
        directory: str or path, created if it does not exist.

    Yields:
        str, an empty directory to write to.
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=directory.parent, prefix=f".{directory.name}."
    ) as aside:
        new, old = Path(aside, "new"), Path(aside, "old")
        new.mkdir()
        yield str(new)
        if directory.exists():
            _copy_missing(directory, new)
            directory.rename(old)
        try:
            new.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise


def _copy_missing(source, target):
    # In one file or in several: weights of the other kind would be older ones.
    has_weights = any(target.glob(_MODEL_WEIGHTS))
    for path in source.rglob("*"):
        copy = target / path.relative_to(source)
        if has_weights and path.match(_MODEL_WEIGHTS):
            continue
        if path.is_file() and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def _root():
    package = Path(__file__).parent
    # In a wheel the presets lie inside the package, in a checkout beside it.
    inside = package / "_presets"
    return inside if inside.is_dir() else package.parent / "presets"


def _directory(name):
    path = _root() / name
    # A name is one path component: nothing outside the catalogue.
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=3, cutoff=0.3)
        raise ValueError(
            f"Unknown preset {name!r}. "
            + (f"Did you mean {' or '.join(map(repr, near))}? " if near else "")
            + "See `keras_softmoe.presets.names()`, or pass the path of an existing "
            f"preset directory. Received: preset={name!r}."
        )
    return path


def _check_config(path):
    file = path / CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"The directory '{path}' is not a preset: it has no {CONFIG_FILE}. Save "
            "one with `model.save_to_preset(directory)`."
        )
    with explained(path):
        config = json.loads(file.read_text(encoding="utf-8"))
    name = config.get("registered_name") if isinstance(config, dict) else None
    if not str(name).startswith("keras_softmoe>"):
        raise ValueError(
            f"The preset in '{path}' is not one of keras_softmoe: its {CONFIG_FILE} "
            f"was made for {name!r}. Load it with the library it belongs to."
        )


def _kind(path):
    file = path / METADATA_FILE
    if not file.is_file():
        return None
    with explained(path):
        return json.loads(file.read_text(encoding="utf-8")).get("kind")
