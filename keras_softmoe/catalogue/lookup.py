"""Entries of the catalogue: names, descriptions and directories.

An entry is a directory in KerasHub's format, with weights, or a `Row`.
"""

import contextlib
import difflib
import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

from keras_softmoe.catalogue.released import released
from keras_softmoe.catalogue.unreleased import unreleased
from keras_softmoe.checks import check_choice, check_whole_numbers, quote, received
from keras_softmoe.files import atomic_directory, restore_interrupted

CONFIG_FILE = "config.json"
METADATA_FILE = "metadata.json"
_TASK_FILE = "task.json"
# Files that identify the directory of a preset. (A `config.json` may be another's.)
PRESET_MARKS = (
    *(METADATA_FILE, _TASK_FILE, "preprocessor.json", "image_converter.json"),
    *("tokenizer.json", "model*.weights.*"),
)

# Directory of the trained presets: in a wheel in the package, in a checkout beside it.
ROOT = Path(__file__).parent.parent / "_presets"
if not ROOT.is_dir():
    ROOT = ROOT.parent.parent / "presets"

# Size limit for JSON files, which are read into memory; the largest here have 20 kB.
_MAX_TEXT_BYTES = 1 << 22
# Length limit for errors of presets: some quote the whole configuration.
_MAX_MESSAGE = 2000

# Handles that KerasHub resolves itself.
_REMOTE = ("hf://", "kaggle://", "modelscope://")


class Preset(NamedTuple):
    """Entry of the catalogue.

    Attributes:
        name: str, the argument of `from_preset`.
        kind: `"trained"`, `"convertible"` or `"architecture"`.
        description: str, one sentence.
        source: str, paper and section, or the training script.
        licence: str, licence of the weights.
        parameters: int, parameters of the backbone.
        path: `pathlib.Path` of the directory of a trained preset, or `None`.
        checkpoint: str or `None`, source of a convertible preset's weights.
        accuracy: dict from data set to accuracy, from 0 to 1, published or measured.
        image_size: `(height, width)` of the images. Others are resized.

    Examples:
        >>> preset = ksm.presets.describe("soft_moe_tiny_patch8_16e_32_icons")
        >>> preset.kind, preset.parameters
    """

    name: str
    kind: str
    description: str
    source: str
    licence: str
    parameters: int
    path: Path | None
    checkpoint: str | None = None
    accuracy: dict = {}
    image_size: tuple | None = None


def names(
    containing: str = "", weights: bool | None = None, image_size: int | None = None
) -> list:
    """Return the names of all presets, or of some, sorted.

    Args:
        containing: str, a part of the name, such as `"soft_moe"` or `"tiny"`.
        weights: `True` for presets with weights, `False` for architectures, or `None`.
        image_size: int, height and width of the images in pixels.

    Examples:
        >>> "vit_base_patch16_224" in ksm.presets.names()
        True
        >>> ksm.presets.names("soft_moe", weights=True)
        ['soft_moe_micro_patch4_25e_20_letters', 'soft_moe_tiny_patch8_16e_32_icons']
    """
    if not isinstance(containing, str):
        raise ValueError(
            f"`containing` must be part of a name. {received(containing=containing)}"
        )
    check_choice("weights", weights, (None, True, False))
    if image_size is not None:
        check_whole_numbers(1, image_size=image_size)
    return [
        name
        for name in sorted(_trained() | rows().keys())
        if containing in name
        and weights in (None, name not in rows() or rows()[name].release is not None)
        and (image_size is None or _image_size(name) == (image_size, image_size))
    ]


def describe(name: str) -> Preset:
    """Return the description of a preset.

    Args:
        name: str, one of `names()`.

    Raises:
        ValueError: if the name is unknown (the message offers the nearest ones).

    Examples:
        >>> ksm.presets.describe("vmoe_small_patch32_last2_32e_224").kind
        'architecture'
    """
    path = _directory(name)
    about = _metadata(path, name)
    with explain_errors(path or name):
        return Preset(
            name=name,
            **{key: about[key] for key in ("kind", "description", "source", "licence")},
            parameters=about["parameter_count"],
            path=path,
            checkpoint=about.get("checkpoint"),
            accuracy=about.get("accuracy", {}),
            image_size=_image_size(name),
        )


def write(name: str, directory: str | os.PathLike) -> str:
    """Write a preset without weights as a directory in KerasHub's format.

    It has configuration and image preprocessing, for KerasHub's classes and tools.

    Args:
        name: str, the name of a preset of the kind `"architecture"` or `"convertible"`.
        directory: str or path, created if needed. In a preset, files are replaced.

    Returns `directory` as a str.

    Raises:
        ValueError: if the name is unknown, has a directory, or that cannot be written.

    Examples:
        >>> ksm.presets.write("vit_base_patch16_224", "my_vit")
        >>> options = {"load_weights": False, "num_layers": 1}
        >>> model = ksm.models.ViTMoEBackbone.from_preset("my_vit", **options)
    """
    path = _directory(name)
    if path is not None:
        raise ValueError(
            f"The preset is a directory already: copy '{path}'. Received: name={name!r}"
        )
    with atomic_directory(directory, PRESET_MARKS) as new:
        for file, text in rows()[name].files().items():
            (new / file).write_text(text, encoding="utf-8")
    return str(directory)


@functools.cache
def rows():
    """Return a dict from name to `Row` of presets without a directory."""
    return {each.name: each for each in (*unreleased(), *released())}


def names_of_kind(kind):
    """Return the names of the presets of a kind, sorted."""
    if kind == "trained":
        return sorted(_trained())
    is_released = kind == "convertible"
    return sorted(n for n, row in rows().items() if bool(row.release) == is_released)


def is_handle(preset):
    """Return whether KerasHub resolves this itself (`hf://...`, `kaggle://...`)."""
    return str(preset).startswith(_REMOTE)


def find_directory(preset):
    """Return the directory of a name or path, `None` for a row, which has none."""
    path = Path(preset)
    restore_interrupted(path)
    # A directory of the user has precedence, as in KerasHub.
    if not os.path.isdir(path):
        path = _directory(str(preset))
    if path is not None:
        _read_config_file(path)
    return path


def read_config(preset):
    """Return class and arguments of a preset's backbone, for `from_config`.

    No model is built. The router among the arguments may be a serialized one.
    """
    if is_handle(preset):
        raise ValueError(
            "The configuration of a preset is read by name or from a directory on this "
            f"machine. Received: preset={str(preset)!r}. Load it, then pass the model."
        )
    path = find_directory(preset)
    if path is None:
        # The router is not serialized, as that would import TensorFlow.
        saved = rows()[preset].config()
    else:
        saved = _read_config_file(path)
    with explain_errors(path or preset):
        return saved["registered_name"], saved["config"]


def read_metadata(preset):
    """Return the metadata of a preset, a dict; empty if it has no `metadata.json`."""
    return _metadata(find_directory(preset), preset)


def task_of(preset):
    """Return the name of the class of a preset's task, `None` for a backbone alone."""
    path = find_directory(preset)
    if path is None:
        has_head = rows()[str(preset)].release is not None
        return "keras_softmoe>ViTMoEImageClassifier" if has_head else None
    has_task = (path / _TASK_FILE).is_file()
    with explain_errors(path):
        return _read_json(path, _TASK_FILE)["registered_name"] if has_task else None


@contextlib.contextmanager
def explain_errors(preset):
    """Add the name or the path of a preset to errors while its files are read."""
    where = f"in '{preset}'" if isinstance(preset, Path) else repr(preset)
    try:
        yield
    # Libraries that fetch, unpack or read files raise many kinds of errors.
    except Exception as error:
        # Without its middle, as the reason may be at the end.
        message, half = str(error), _MAX_MESSAGE // 2
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:half]} [...] {message[-half:]}"
        is_damage = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        if isinstance(error, ValueError) and not is_damage:
            error.args = (message,)
            error.add_note(
                f"This happened while the preset {where} was read. If nothing was "
                "changed on purpose, restore it or save it again."
            )
            raise
        raise ValueError(
            f"The preset {where} cannot be read: a file is damaged, truncated, could "
            "not be fetched, or belongs to another model. Restore it, save it or fetch "
            f"it again. Reason: {type(error).__name__}: {message}"
        ) from error


def _trained():
    """Return the set of names of trained presets."""
    return {path.parent.name for path in ROOT.glob(f"*/{CONFIG_FILE}")}


def _directory(name):
    """Return the directory of a name of the catalogue, `None` for a row."""
    # A name is one path component, without access outside the catalogue.
    if name in _trained():
        return ROOT / name
    if name in rows():
        return None
    near = difflib.get_close_matches(name[:200], names(), n=3, cutoff=0.3)
    raise ValueError(
        f"Unknown preset {quote(name)}. "
        + (f"Did you mean {' or '.join(map(repr, near))}? " if near else "")
        + "See `keras_softmoe.presets.names()`, or pass the path of an existing "
        f"preset directory. Received: preset={quote(name)}."
    )


def _image_size(name):
    """Return `(height, width)` of the images of a preset, `None` if unknown."""
    path = _directory(name)
    config = _read_config_file(path)["config"] if path else rows()[name].arguments
    shape = config.get("image_shape")
    return tuple(shape[:2]) if shape else None


def _metadata(path, name):
    return _read_json(path, METADATA_FILE) if path else rows()[name].metadata()


def _read_json(path, name):
    """Return the content of a JSON file of a preset, `{}` without this file."""
    file = path / name
    with explain_errors(path):
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _read_config_file(path):
    """Return the content of `config.json`, checked to be of a model of this library."""
    file = path / CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"The directory '{path}' is not a preset: it has no {CONFIG_FILE}. "
            "Save one with `model.save_to_preset(directory)`."
        )
    for folder, folders, files in os.walk(path):
        # Other processes write aside, below such names.
        folders[:] = [name for name in folders if not name.startswith("..")]
        wrong = [name for name in folders if name.endswith((".json", ".h5"))]
        for entry in (Path(folder, name) for name in (*wrong, *files)):
            # Reading a pipe would block forever. (A file may be gone by now.)
            if not entry.is_file() and os.path.lexists(entry):
                raise ValueError(
                    f"The preset in '{path}' is damaged: '{entry.name}' is no file, or "
                    "a link to nothing. Restore it or save the preset again."
                )
            if entry.suffix == ".json" and entry.stat().st_size > _MAX_TEXT_BYTES:
                raise ValueError(
                    f"The preset in '{path}' is damaged: '{entry.name}' has "
                    f"{entry.stat().st_size:,} bytes, and no configuration has more "
                    f"than {_MAX_TEXT_BYTES:,}. Restore it or save the preset again."
                )
    saved = _read_json(path, CONFIG_FILE)
    name = saved.get("registered_name") if isinstance(saved, dict) else None
    if not str(name).startswith("keras_softmoe>"):
        raise ValueError(
            f"The preset in '{path}' is not one of keras_softmoe: its {CONFIG_FILE} "
            f"was made for {quote(name)}. Load it with the library it belongs to."
        )
    return saved
