"""The way from a name, a directory or a handle to a model.

Every `from_preset` of this library begins here: `open_preset` finds the files, and
KerasHub makes the object. A preset without a directory (an architecture) gets a
temporary one. A released checkpoint is converted when it is first asked for
(`released.py`), and the directory that this gives is loaded like any other.

The classes are decorated with what is here, preprocessing with `load_from_presets`,
models with `load_and_save_presets`. So nothing below them imports one, and
`conversion.py`, which does, makes directories of checkpoints that are in no catalogue.
"""

import contextlib
import functools
import os
import re
import tempfile
from pathlib import Path

import keras
import keras_hub
import numpy as np

from keras_softmoe import catalogue
from keras_softmoe.checks import check_names, quote
from keras_softmoe.files import read_whole, replaced_directory
from keras_softmoe.models._compilation import preset_is_saved
from keras_softmoe.models._mutable_routing import pop_mutable_settings
from keras_softmoe.models._preset_keys import check_keys
from keras_softmoe.models._size import weights_from
from keras_softmoe.models.arguments import arguments_of
from keras_softmoe.models.released import convert
from keras_softmoe.routers.settings import MUTABLE_SETTINGS
from keras_softmoe.sharding.variables import (
    is_sharded,
    room_for,
    save_in_one_process,
)

WEIGHTS_FILES = ("model.weights.h5", "model.weights.json")
# These, and the parts that the second one lists.
_WEIGHTS = re.compile(r"model(_\d+)?\.weights\.(h5|json)")

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
    TypeError: if there is no such argument (the message offers the nearest).

Examples:
    >>> name = "soft_moe_tiny_patch4_16e_32_glyphs"
    >>> backbone = ksm.models.ViTMoEBackbone.from_preset(name, load_weights=False)
"""

_SAVE_TO_PRESET = """Save as a preset directory. If that fails, an existing one is kept.

A preset in that directory is replaced, and whatever else is there stays. A directory
that holds files only is replaced in one step. In others (a mount point such as a
volume of a container, one with links or directories of yours, one in a directory that
cannot be written to) the files are replaced one after the other: if the program is
killed between two of them, the next `from_preset` replaces the rest, but programs that
do not use this library find files of two versions until then.

Where several processes share the model, all of them have to call this, and the first
one writes.

Args:
    preset_dir: str, the directory. Of a symbolic link the target is written.
    max_shard_size: int or float, the size in GB over which weights are split into
        several files, or `None`.

Raises:
    OSError: (also a `ValueError`) if the directory cannot be written, the path is that
        of a file or a device, or files of something that is no preset would be
        replaced. Nothing is changed then.
"""


def load_from_presets(cls):
    """Class decorator: `from_preset` takes whatever `open_preset` does.

    `save_to_preset` writes all files or none, and replaces those of presets only. For
    classes without weights: converters, tokenizers, preprocessors. (A mixin would
    have to come first, but KerasHub takes the first base of a class for its kind.)
    """
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
        with replaced_directory(preset_dir, catalogue.PRESET_MARKS) as new:
            save(self, str(new), *args, **kwargs)

    cls.from_preset = classmethod(from_preset)
    cls.save_to_preset = save_to_preset
    return cls


def load_and_save_presets(cls):
    """Class decorator of models: `from_preset` and `save_to_preset` of all of them.

    `from_preset` takes whatever `open_preset` does, and settings of the routers. If the
    class has a `from_preset` of its own, that is given the directory of the preset.
    """
    read, save = cls.from_preset.__func__, cls.save_to_preset

    @functools.wraps(read)
    def from_preset(cls, preset, load_weights=True, **kwargs):
        accepted = [*arguments_of(cls), *MUTABLE_SETTINGS]
        if hasattr(cls, "backbone_cls"):
            accepted += arguments_of(cls.backbone_cls)
        check_names(f"`{cls.__name__}.from_preset`", kwargs, accepted)
        settings = pop_mutable_settings(kwargs)
        with (
            open_preset(preset, load_weights) as directory,
            weights_from(directory if load_weights else None),
        ):
            model = read_whole(
                directory,
                lambda: read(cls, directory, load_weights=load_weights, **kwargs),
            )
            if load_weights:
                _check_finite(model, preset)
            _check_dtypes(getattr(model, "preprocessor", None), preset)
        model.set_routing(**settings)
        return model

    if "from_preset" not in vars(cls):
        from_preset.__doc__ = _FROM_PRESET

    @functools.wraps(save)
    def save_to_preset(self, preset_dir, max_shard_size=10):
        with preset_is_saved():
            save_in_one_process(
                lambda new: save(self, str(new), max_shard_size=max_shard_size),
                lambda: replaced_directory(
                    preset_dir,
                    catalogue.PRESET_MARKS,
                    keep=_is_no_weights_file,
                    room=room_for(self.variables),
                ),
            )

    save_to_preset.__doc__ = _SAVE_TO_PRESET
    cls.from_preset = classmethod(from_preset)
    cls.save_to_preset = save_to_preset
    return cls


def _check_finite(model, preset):
    """Raise if a weight is not a number: the model would say nothing else any more."""
    for variable in model.variables:
        is_float = keras.backend.is_float_dtype(variable.dtype)
        if not is_float or is_sharded(variable):
            continue
        if not np.isfinite(keras.ops.convert_to_numpy(variable.value)).all():
            raise ValueError(
                f"The weights of the preset {str(preset)!r} are not all finite: its "
                "file is damaged, or its training had failed. Received: NaN or "
                f"infinity in {variable.path!r}. Restore the file, or start anew with "
                "`load_weights=False`."
            )


def _check_dtypes(preprocessing, preset):
    """Raise if a dtype is none. Until it is called, Keras takes anything for one."""
    for name in ("", "image_converter", "tokenizer"):
        layer = getattr(preprocessing, name, None) if name else preprocessing
        policy = getattr(layer, "dtype_policy", None)
        if isinstance(layer, keras.Layer) and not _is_policy(policy):
            raise ValueError(
                f"The preset {str(preset)!r} is damaged: the dtype of its "
                f"{name or 'preprocessor'} is no policy of Keras. Received: dtype="
                f"{quote(policy)}. Restore its files."
            )


def _is_policy(policy):
    try:
        keras.backend.standardize_dtype(policy.compute_dtype)
    except (AttributeError, ValueError):
        return False
    return True


def with_backbone(cls, preset, load_weights, arguments):
    """Arguments of a task's `from_preset`, with a backbone in place of its arguments.

    KerasHub hands on two of them, `dtype` and `image_shape`: with those alone, nothing
    is changed.

    Args:
        cls: class of the task.
        preset: str, directory or handle.
        load_weights: bool, whether the backbone is to have weights.
        arguments: dict, what `from_preset` was given.
    """
    handed_on = ("dtype", "image_shape")
    own = {*arguments_of(cls), *handed_on}
    of_backbone = {n: x for n, x in arguments.items() if n not in own}
    if not of_backbone:
        return arguments
    arguments = {n: x for n, x in arguments.items() if n in own}
    of_backbone |= {n: arguments[n] for n in handed_on if n in arguments}
    backbone = keras_hub.models.Backbone.from_preset(
        preset, load_weights=load_weights, **of_backbone
    )
    return {**arguments, "backbone": backbone}


def _is_no_weights_file(path):
    # In one file or in several: weights of the other kind would be older ones.
    return not _WEIGHTS.fullmatch(path.as_posix())


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
            library, a file in it has a key that is not known, or weights are wanted
            that do not exist or cannot be fetched.
    """
    if not isinstance(preset, str | os.PathLike):
        raise ValueError(
            "`preset` must be a name, the path of a directory or a handle. Received: "
            f"preset={quote(preset)}. See `keras_softmoe.presets.names()`."
        )
    with contextlib.ExitStack() as stack:
        if catalogue.is_handle(preset):
            place = directory = str(preset)
        elif path := catalogue.find_directory(preset):
            if load_weights and not _has_weights(path):
                path = _with_weights(path)
            place = directory = path
        else:
            place = str(preset)
            if load_weights:
                raise _never_released(place)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            directory = catalogue.write(place, Path(folder, place))
        with catalogue.explain_errors(place):
            if not catalogue.is_handle(preset):
                check_keys(directory)
            yield str(directory)


def _has_weights(path):
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
