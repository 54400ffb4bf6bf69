"""`from_preset` and `save_to_preset` of all classes.

`open_preset` finds the files of a name, a directory or a handle, and KerasHub makes the
object. A preset without a directory (an architecture) gets a temporary one. A released
checkpoint is converted when it is first loaded (`conversion.py`), and its directory is
then loaded like any other.

The classes know nothing of files: `models/__init__.py` attaches these methods to them.
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
from keras_softmoe.files import atomic_directory, read_whole
from keras_softmoe.models.arguments import arguments_of
from keras_softmoe.models.backbone import weights_follow
from keras_softmoe.models.configuration import preset_is_saved
from keras_softmoe.models.contrastive_preprocessor import fit_preprocessor
from keras_softmoe.models.conversion import convert
from keras_softmoe.models.preset_keys import check_keys
from keras_softmoe.routers.scores import MUTABLE_SETTINGS
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


def attach(cls, load=None):
    """Give a class of models `from_preset` and `save_to_preset`, and its subclasses.

    (A mixin would have to come first, but KerasHub takes the first base of a class for
    its kind.)

    Args:
        cls: class of models.
        load: callable `(read, cls, directory, load_weights, arguments)` that returns a
            model, where `read` is KerasHub's `from_preset` as a function of a class.
            Defaults to `read` alone.
    """
    read, save = cls.from_preset.__func__, cls.save_to_preset
    load = load or _load

    @functools.wraps(read)
    def from_preset(cls, preset, load_weights=True, **kwargs):
        accepted = [*arguments_of(cls), *MUTABLE_SETTINGS]
        if hasattr(cls, "backbone_cls"):
            accepted += arguments_of(cls.backbone_cls)
        check_names(f"`{cls.__name__}.from_preset`", kwargs, accepted)
        settings = {n: kwargs.pop(n) for n in MUTABLE_SETTINGS if n in kwargs}
        with (
            open_preset(preset, load_weights) as directory,
            _weights_of(directory) if load_weights else contextlib.nullcontext(),
        ):
            model = read_whole(
                directory, lambda: load(read, cls, directory, load_weights, kwargs)
            )
            if load_weights:
                _check_finite(model, preset)
            _check_dtypes(getattr(model, "preprocessor", None), preset)
        model.set_routing(**settings)
        return model

    @functools.wraps(save)
    def save_to_preset(self, preset_dir, max_shard_size=10):
        with preset_is_saved():
            save_in_one_process(
                lambda new: save(self, str(new), max_shard_size=max_shard_size),
                lambda: atomic_directory(
                    preset_dir,
                    catalogue.PRESET_MARKS,
                    keep=_is_no_weights_file,
                    room=room_for(self.variables),
                ),
            )

    from_preset.__doc__, save_to_preset.__doc__ = _FROM_PRESET, _SAVE_TO_PRESET
    cls.from_preset = classmethod(from_preset)
    cls.save_to_preset = save_to_preset


def attach_without_weights(cls):
    """Give a converter, tokenizer or preprocessor `from_preset` and `save_to_preset`.

    `save_to_preset` writes all files or none, and replaces those of presets only.
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
        with atomic_directory(preset_dir, catalogue.PRESET_MARKS) as new:
            save(self, str(new), *args, **kwargs)

    cls.from_preset = classmethod(from_preset)
    cls.save_to_preset = save_to_preset


def _weights_of(directory):
    """Scope in which models are made for the weights of a directory or a handle."""
    if not Path(directory).is_dir():
        return weights_follow()
    files = Path(directory).glob("model*.weights.h5")
    return weights_follow(sum(f.stat().st_size for f in files if f.is_file()))


def load_classifier(read, cls, directory, load_weights, arguments):
    """Load a classifier, see `attach`."""
    if "num_classes" not in arguments:
        catalogue.check_task(directory, load_weights)
    elif "preprocessor" not in arguments and Path(directory).is_dir():
        _check_image_converter(Path(directory))
    arguments = _with_backbone(cls, directory, load_weights, arguments)
    return _load(read, cls, directory, load_weights, arguments)


def _check_image_converter(folder):
    """Raise unless the directory (`pathlib.Path`) of a preset has a converter."""
    if not (folder / "image_converter.json").is_file():
        raise ValueError(
            f"The preset {folder.name!r} holds a backbone only, and nothing of the "
            "preprocessing of its images. Pass one, `preprocessor="
            "ViTMoEImageClassifierPreprocessor(ViTMoEImageConverter())` for pixels "
            "from 0 to 255, or `preprocessor=None` for images as the backbone takes "
            "them."
        )


def load_contrastive(read, cls, directory, load_weights, arguments):
    """Load a contrastive task, see `attach`."""
    folder = Path(directory)
    if "preprocessor" not in arguments and folder.is_dir():
        _check_tokenizer(folder)
    # KerasHub would read the preset's vocabulary into the tokenizer of another one.
    preprocessor = arguments.get("preprocessor")
    if preprocessor is not None:
        arguments = {**arguments, "preprocessor": None}
    arguments = _with_backbone(cls, directory, load_weights, arguments)
    model = _load(read, cls, directory, load_weights, arguments)
    if preprocessor is not None:
        fit_preprocessor(preprocessor, model.backbone)
        model.preprocessor = preprocessor
    return model


def _check_tokenizer(folder):
    """Raise unless the directory (`pathlib.Path`) of a preset has a tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"The preset {folder.name!r} has no tokenizer. Pass one, "
            "`preprocessor=LIMoEPreprocessor(LIMoETokenizer('spiece.model'), ...)`, or "
            "`preprocessor=None` to give the model token ids."
        )


def _load(read, cls, directory, load_weights, arguments):
    return read(cls, directory, load_weights=load_weights, **arguments)


def _check_finite(model, preset):
    """Raise if a weight is NaN or infinity: so would be every output."""
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
    """Raise if a dtype policy is invalid, which Keras notices in the first call."""
    for name in ("", "image_converter", "tokenizer"):
        layer = getattr(preprocessing, name, None) if name else preprocessing
        policy = getattr(layer, "dtype_policy", None)
        if isinstance(layer, keras.Layer) and not _is_policy(policy):
            raise ValueError(
                f"The preset {str(preset)!r} is damaged: the {name or 'preprocessor'} "
                f"has an invalid dtype policy. Received: dtype={quote(policy)}. "
                "Restore its files."
            )


def _is_policy(policy):
    try:
        keras.backend.standardize_dtype(policy.compute_dtype)
    except (AttributeError, ValueError):
        return False
    return True


def _with_backbone(cls, directory, load_weights, arguments):
    """Replace arguments of the backbone by a backbone that has them.

    KerasHub hands on two of them, `dtype` and `image_shape`: with those alone, nothing
    is changed.
    """
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


def _is_no_weights_file(path):
    # One file or several: a file of the other form has old weights.
    return not _WEIGHTS.fullmatch(path.as_posix())


@contextlib.contextmanager
def open_preset(preset, load_weights=True):
    """Find the files of a preset, and name it in errors while they are read.

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
        else:
            path = catalogue.find_directory(preset)
            place = path or str(preset)
            if load_weights and not (path and _has_weights(path)):
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


def _has_weights(path):
    """Return whether a preset directory (`pathlib.Path`) has weights."""
    return any((path / file).is_file() for file in WEIGHTS_FILES)


def _converted(preset, path):
    """Return the directory of a converted preset (`pathlib.Path`).

    Raises:
        ValueError: if the preset is not a convertible one.
    """
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
        f"{', '.join(WEIGHTS_FILES)}. Copy the missing file there, save the "
        "preset again, or pass `load_weights=False`."
    )
