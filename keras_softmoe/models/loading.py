"""`from_preset` and `save_to_preset` of all classes.

`open_preset` finds the files, and KerasHub makes the object. A preset without a
directory (an architecture) gets a temporary one; a released checkpoint is converted
when it is first loaded. `models/__init__.py` attaches these methods to the classes.
"""

import contextlib
import functools
import json
import math
import os
import re
import tempfile
from pathlib import Path

import keras
import keras_hub
import numpy as np

from keras_softmoe import catalogue
from keras_softmoe.checks import check_names, did_you_mean, quote
from keras_softmoe.files import atomic_directory, read_whole
from keras_softmoe.keras_adapter.exports import has_preset_file
from keras_softmoe.models.arguments import arguments_of
from keras_softmoe.models.backbone import weights_follow
from keras_softmoe.models.configuration import IN_PRESET, preset_is_saved
from keras_softmoe.models.contrastive_preprocessor import fit_preprocessor
from keras_softmoe.models.conversion import convert
from keras_softmoe.routers.scores import MUTABLE_SETTINGS
from keras_softmoe.sharding import variables as sharding

WEIGHTS_FILES = ("model.weights.h5", "model.weights.json")
# These, and the parts that the second one lists.
_WEIGHTS = re.compile(r"model(_\d+)?\.weights\.(h5|json)")

_FROM_PRESET = """Load a model from a preset.

Args:
    preset: str: a name from `keras_softmoe.presets.names()`, the path of a preset
        directory, or a KerasHub handle (`"hf://user/model"`).
    load_weights: bool, whether to load weights or start from random ones.
    **kwargs: arguments that replace those of the preset: of the class and, for a task,
        of its backbone. With another `image_shape` position embeddings are resampled;
        with `num_classes` a classifier has a new head. And settings of the routers,
        see `set_routing`.

Returns:
    A model of this class.

Raises:
    ValueError: if the name is unknown (the message offers the nearest), the preset has
        no weights, or a file is missing, damaged or foreign.
    TypeError: if there is no such argument (the message offers the nearest).

Examples:
    >>> name = "soft_moe_tiny_patch8_16e_32_icons"
    >>> backbone = ksm.models.ViTMoEBackbone.from_preset(name, load_weights=False)
"""

_SAVE_TO_PRESET = """Save as a preset directory. If that fails, an existing one is kept.

In an existing directory, the files of a preset are replaced one after the other, and
all others stay. If the program is killed meanwhile, the next `from_preset` replaces the
rest.

Where several processes share the model, all of them have to call this, and the first
one writes.

Args:
    preset_dir: str, the directory. Symbolic links are followed.
    max_shard_size: int or float, the size in GB over which weights are split into
        several files, or `None`.

Raises:
    OSError: (also a `ValueError`) if the directory cannot be written, the path is that
        of a file or a device, or files of something other than a preset would be
        replaced. Nothing is changed then.
"""


def _load(read, cls, directory, load_weights, arguments):
    return read(cls, directory, load_weights=load_weights, **arguments)


def attach(cls, load=_load):
    """Give a class of models `from_preset` and `save_to_preset`, and its subclasses.

    `load(read, cls, directory, load_weights, arguments)` returns a model by KerasHub's
    `from_preset`, `read`.
    """
    read, save = cls.from_preset.__func__, cls.save_to_preset

    @functools.wraps(read)
    def from_preset(cls, preset, load_weights=True, **kwargs):
        accepted = [*arguments_of(cls), *MUTABLE_SETTINGS]
        if hasattr(cls, "backbone_cls"):
            accepted += arguments_of(cls.backbone_cls)
        check_names(f"`{cls.__name__}.from_preset`", kwargs, accepted)
        settings = {n: kwargs.pop(n) for n in MUTABLE_SETTINGS if n in kwargs}
        with open_preset(preset, load_weights) as directory:
            files = Path(directory).glob("model*.weights.h5")
            size = sum(file.stat().st_size for file in files if file.is_file())
            size = size if Path(directory).is_dir() else math.inf
            with weights_follow(size if load_weights else None):
                model = read_whole(
                    directory, lambda: load(read, cls, directory, load_weights, kwargs)
                )
            for variable in model.variables if load_weights else ():
                is_float = keras.backend.is_float_dtype(variable.dtype)
                if not is_float or sharding.is_sharded(variable):
                    continue
                # One NaN would spread to every output.
                if not np.isfinite(keras.ops.convert_to_numpy(variable.value)).all():
                    raise ValueError(
                        f"The weights of the preset {str(preset)!r} are not all finite:"
                        " its file is damaged, or its training had failed. Received: "
                        f"NaN or infinity in {variable.path!r}. Restore the file, or "
                        "start anew with `load_weights=False`."
                    )
            _check_dtypes(getattr(model, "preprocessor", None), preset)
        if settings:
            model.set_routing(**settings)
        return model

    @functools.wraps(save)
    def save_to_preset(self, preset_dir, max_shard_size=10):
        if IN_PRESET.get():
            # The backbone of a task, whose directory is already written aside.
            save(self, preset_dir, max_shard_size=max_shard_size)
            return
        with preset_is_saved():
            sharding.save_in_one_process(
                lambda new: save(self, str(new), max_shard_size=max_shard_size),
                lambda: atomic_directory(
                    preset_dir,
                    catalogue.PRESET_MARKS,
                    # One file or several: those of the other form have old weights.
                    keep=lambda path: not _WEIGHTS.fullmatch(path.as_posix()),
                    room=sharding.room_for(self.variables),
                ),
            )

    from_preset.__doc__, save_to_preset.__doc__ = _FROM_PRESET, _SAVE_TO_PRESET
    cls.from_preset = classmethod(from_preset)
    cls.save_to_preset = save_to_preset


def attach_without_weights(cls):
    """Give a class without weights `from_preset` and `save_to_preset`."""
    read, save = cls.from_preset.__func__, cls.save_to_preset

    @functools.wraps(read)
    def from_preset(cls, preset, **kwargs):
        accepted = [*arguments_of(cls), "config_file"]
        check_names(f"`{cls.__name__}.from_preset`", kwargs, accepted)
        with open_preset(preset, load_weights=False) as directory:
            found = read(cls, directory, **kwargs)
            _check_dtypes(found, preset)
        return found

    @functools.wraps(save)
    def save_to_preset(self, preset_dir, *args, **kwargs):
        if IN_PRESET.get():
            save(self, preset_dir, *args, **kwargs)
            return
        with (
            preset_is_saved(),
            atomic_directory(preset_dir, catalogue.PRESET_MARKS) as new,
        ):
            save(self, str(new), *args, **kwargs)

    cls.from_preset = classmethod(from_preset)
    cls.save_to_preset = save_to_preset


def load_classifier(read, cls, directory, load_weights, arguments):
    """Load a classifier or a segmenter, see `attach`."""
    folder = Path(directory)
    name = folder.name if folder.is_dir() else directory
    if "num_classes" not in arguments:
        if not has_preset_file(directory, "task.json"):
            raise ValueError(
                f"The preset {name!r} is a backbone without a head: it has no "
                "task.json. Give the new head its classes: "
                "`from_preset(..., num_classes=10)`."
            )
        if load_weights and not has_preset_file(directory, "task.weights.h5"):
            # KerasHub would continue with a new head.
            raise ValueError(
                f"The preset {name!r} has no weights for its head: task.weights.h5 is "
                "missing. Restore it, or start from a new head: "
                "`from_preset(..., num_classes=10)`."
            )
    elif "preprocessor" not in arguments and folder.is_dir():
        if not (folder / "image_converter.json").is_file():
            raise ValueError(
                f"The preset {name!r} holds a backbone only, without preprocessing of "
                f"images. Pass `preprocessor={cls.preprocessor_cls.__name__}("
                "ViTMoEImageConverter())` for pixels from 0 to 255, or "
                "`preprocessor=None` for images as the backbone expects them."
            )
    arguments = _with_backbone(cls, directory, load_weights, arguments)
    return read(cls, directory, load_weights=load_weights, **arguments)


def load_contrastive(read, cls, directory, load_weights, arguments):
    """Load a contrastive task, see `attach`."""
    folder = Path(directory)
    if "preprocessor" not in arguments and folder.is_dir():
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"The preset {folder.name!r} has no tokenizer. Pass "
                "`preprocessor=LIMoEPreprocessor(LIMoETokenizer('spiece.model'))`, or "
                "`preprocessor=None` to give the model token ids."
            )
    # KerasHub would read the preset's vocabulary into the tokenizer of another one.
    preprocessor = arguments.get("preprocessor")
    if preprocessor is not None:
        arguments = {**arguments, "preprocessor": None}
    arguments = _with_backbone(cls, directory, load_weights, arguments)
    model = read(cls, directory, load_weights=load_weights, **arguments)
    if preprocessor is not None:
        fit_preprocessor(preprocessor, model.backbone)
        model.preprocessor = preprocessor
    return model


def _with_backbone(cls, directory, load_weights, arguments):
    """Replace arguments of the backbone by a backbone that has them."""
    # KerasHub hands on these alone.
    handed_on = ("dtype", "image_shape")
    own = {*arguments_of(cls), *handed_on}
    of_backbone = {n: x for n, x in arguments.items() if n not in own}
    if not of_backbone:
        return arguments
    arguments = {n: x for n, x in arguments.items() if n in own}
    of_backbone |= {n: arguments[n] for n in handed_on if n in arguments}
    backbone = keras_hub.models.Backbone.from_preset(
        directory, load_weights=load_weights, **of_backbone
    )
    return {**arguments, "backbone": backbone}


def _check_dtypes(preprocessing, preset):
    """Raise if a dtype policy is invalid, which Keras notices in the first call."""
    for name in ("", "image_converter", "tokenizer"):
        layer = getattr(preprocessing, name, None) if name else preprocessing
        if not isinstance(layer, keras.Layer):
            continue
        policy = getattr(layer, "dtype_policy", None)
        try:
            keras.backend.standardize_dtype(policy.compute_dtype)
        except (AttributeError, ValueError) as error:
            raise ValueError(
                f"The preset {str(preset)!r} is damaged: the {name or 'preprocessor'} "
                f"has an invalid dtype policy. Received: dtype={quote(policy)}."
            ) from error


@contextlib.contextmanager
def open_preset(preset, load_weights=True):
    """Yield the directory or handle of a preset, and name it in errors meanwhile.

    It is of the cache for a converted preset, and temporary for an architecture.
    """
    if not isinstance(preset, str | os.PathLike):
        raise ValueError(
            "`preset` must be a name, the path of a directory or a handle. Received: "
            f"preset={quote(preset)}. See `keras_softmoe.presets.names()`."
        )
    with contextlib.ExitStack() as stack:
        if catalogue.is_handle(preset):
            place = directory = str(preset)
        else:
            path = catalogue.find_directory(preset)
            place = path or str(preset)
            has_weights = path and any((path / f).is_file() for f in WEIGHTS_FILES)
            if load_weights and not has_weights:
                place = directory = _converted(preset, path)
            elif path:
                directory = path
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                directory = catalogue.write(place, Path(folder, place))
        with catalogue.explain_errors(place):
            if not catalogue.is_handle(preset):
                check_keys(directory)
            yield str(directory)


def _converted(preset, path):
    """Return the directory of a converted preset; raise if it is not convertible."""
    kind, name = catalogue.read_metadata(preset).get("kind"), Path(preset).name
    if kind == "convertible":
        return Path(convert(name))
    if kind == "architecture":
        raise ValueError(
            f"The preset {name!r} describes an architecture whose weights were never "
            "released. Received: load_weights=True. Use "
            "`from_preset(..., load_weights=False)` and train it, or choose a preset "
            f"with weights: {', '.join(catalogue.names_of_kind('trained'))}."
        )
    raise ValueError(
        f"The preset directory '{path}' has no weights: expected one of "
        f"{', '.join(WEIGHTS_FILES)}. Restore the file, or pass `load_weights=False`."
    )


# KerasHub's files. Others in a directory belong to the user.
_FILES = (
    *("config.json", "task.json", "preprocessor.json", "image_converter.json"),
    "tokenizer.json",
)
# Names that Keras adds to the arguments of an object, and all of a serialized one.
_NOT_ARGUMENTS = ("build_config", "compile_config")
_OF_AN_OBJECT = (
    *("module", "class_name", "config", "registered_name", "shared_object_id"),
    *_NOT_ARGUMENTS,
)


def check_keys(directory):
    """Raise if a file of a preset has an unknown, misspelt or misplaced name.

    Keras ignores names beside the arguments of an object, and KerasHub whole files.
    """
    for file in _FILES:
        try:
            content = json.loads(Path(directory, file).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            # The reader of this file raises, if there is one.
            continue
        # Parts to visit; a file may be nested deeper than Python can recurse.
        parts = [content]
        while parts:
            part = parts.pop()
            parts += part if isinstance(part, list) else []
            if not isinstance(part, dict):
                continue
            parts += [x for key, x in part.items() if key not in _NOT_ARGUMENTS]
            if not {"class_name", "config"} <= part.keys():
                continue
            checked = [(part, _OF_AN_OBJECT)]
            # Classes of others and of users check their own arguments.
            registered = str(part.get("registered_name"))
            is_own = registered.startswith("keras_softmoe>")
            cls = keras.saving.get_registered_object(registered) if is_own else None
            if isinstance(cls, type) and issubclass(cls, keras.Layer):
                accepted = [*arguments_of(cls), *getattr(cls, "further_keys", ())]
                if not issubclass(cls, keras.Model):
                    # Preprocessors and tokenizers remember the file that they are in.
                    accepted.append("config_file")
                if isinstance(part["config"], dict):
                    checked.append((part["config"], accepted))
            for given, accepted in checked:
                unknown = [name for name in given if name not in accepted]
                if unknown:
                    raise ValueError(
                        f"'{file}' has a key that {str(part['class_name'])[:80]} does "
                        f"not know.{did_you_mean(unknown, accepted)} Accepted: "
                        f"{', '.join(dict.fromkeys(accepted))}. Received: "
                        f"{', '.join(map(quote, unknown[:12]))}."
                    )
