"""Check of the names in the files of a preset: unknown ones are refused."""

import json
from pathlib import Path

import keras

from keras_softmoe.checks import did_you_mean, quote
from keras_softmoe.models.arguments import arguments_of

# KerasHub's names. Other files of a directory belong to the user.
_FILES = (
    "config.json",
    "task.json",
    "preprocessor.json",
    "image_converter.json",
    "tokenizer.json",
)
# Names of an object that Keras has serialized.
_OF_AN_OBJECT = (
    *("module", "class_name", "config", "registered_name"),
    *("build_config", "compile_config", "shared_object_id"),
)
# Names that Keras adds to the arguments of an object.
_NOT_ARGUMENTS = ("build_config", "compile_config")
_PACKAGE = "keras_softmoe>"


def check_keys(directory):
    """Raise if a file of a preset has an unknown, misspelt or misplaced name.

    Keras ignores names beside the arguments of an object, and KerasHub ignores whole
    files: a task is read from `task.json` alone.

    Args:
        directory: `pathlib.Path` or str.

    Raises:
        ValueError: with the name, the nearest one that is accepted, and all of them.
    """
    for name in _FILES:
        try:
            content = json.loads(Path(directory, name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            # The reader of this file raises, if there is one.
            continue
        # Parts to visit; a file may be nested deeper than Python can recurse.
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
    # Classes of others and of users check their own arguments.
    registered = str(part.get("registered_name"))
    is_own = registered.startswith(_PACKAGE) and isinstance(part["config"], dict)
    cls = keras.saving.get_registered_object(registered) if is_own else None
    if isinstance(cls, type) and issubclass(cls, keras.Layer):
        accepted = [
            *arguments_of(cls),
            *getattr(cls, "former_settings", ()),
            *getattr(cls, "further_keys", ()),
        ]
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
