"""Names in the files of a preset: those that nothing reads are refused."""

import json
from pathlib import Path

import keras

from keras_softmoe.backbones.arguments import arguments_of
from keras_softmoe.checks import did_you_mean, quote

# KerasHub's names. What else is in a directory belongs to the user.
_FILES = (
    "config.json",
    "task.json",
    "preprocessor.json",
    "image_converter.json",
    "tokenizer.json",
)
# Those of an object that Keras has serialized.
_OF_AN_OBJECT = (
    *("module", "class_name", "config", "registered_name"),
    *("build_config", "compile_config", "shared_object_id"),
)
# What Keras keeps beside the arguments of an object, for itself.
_NOT_ARGUMENTS = ("build_config", "compile_config")
_PACKAGE = "keras_softmoe>"


def check_keys(directory):
    """Raise if a file of a preset has a name that is none, misspelt or out of place.

    Keras passes over names beside the arguments of an object, and KerasHub over whole
    files: of a task, all is read from `task.json`.

    Args:
        directory: `pathlib.Path` or str.

    Raises:
        ValueError: with the name, the nearest one that is accepted, and all of them.
    """
    for name in _FILES:
        try:
            content = json.loads(Path(directory, name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            # Whoever needs it says so.
            continue
        # What is still to be looked at; a file may be nested deeper than Python calls.
        parts = [content]
        while parts:
            part = parts.pop()
            if isinstance(part, dict):
                if "class_name" in part and "config" in part:
                    _check_object(name, part)
                parts += [x for key, x in part.items() if key not in _NOT_ARGUMENTS]
            elif isinstance(part, list):
                parts += part


def _check_object(file, part):
    """Raise unless the names of a serialized object are known, see `check_keys`."""
    class_name = str(part["class_name"])[:80]
    _check_names(file, class_name, part, _OF_AN_OBJECT)
    # Others than ours, and a user's, say themselves what they take.
    registered = str(part.get("registered_name"))
    is_own = registered.startswith(_PACKAGE) and isinstance(part["config"], dict)
    cls = keras.saving.get_registered_object(registered) if is_own else None
    if isinstance(cls, type) and issubclass(cls, keras.Layer):
        accepted = [*arguments_of(cls), *getattr(cls, "former_settings", ())]
        if not issubclass(cls, keras.Model):
            # Preprocessors and tokenizers remember the file that they are in.
            accepted.append("config_file")
        _check_names(file, class_name, part["config"], accepted)


def _check_names(file, class_name, given, accepted):
    unknown = [name for name in given if name not in accepted]
    if unknown:
        raise ValueError(
            f"'{file}' has a key that {class_name} does not know."
            f"{did_you_mean(unknown, accepted)} Accepted: "
            f"{', '.join(dict.fromkeys(accepted))}. Received: "
            f"{', '.join(map(quote, unknown[:12]))}. Correct the file or leave the key "
            "out."
        )
