"""The architecture of a preset, a model or a dict of arguments. Nothing is built."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_softmoe import catalogue
from keras_softmoe.architecture import BY_NAME, Settings, TwoTowers, kind_of, read
from keras_softmoe.routers.scores import MUTABLE_SETTINGS

_PAIR_TASKS = ("keras_softmoe>LIMoEContrastive", "keras_softmoe>TwoTowerContrastive")


class Described(NamedTuple):
    """A model: its record of `architecture`, its name and its head."""

    architecture: Settings
    name: str
    num_classes: int | None
    head_dtype: Any


def described(model, num_classes=None, **changes):
    """Describe a preset, a model or a dict of arguments.

    `model` is as in `evaluation.cost`, `num_classes` defaults to a classifier's own,
    and `changes` are arguments of the backbone and settings of its routers.
    """
    routing = {name: changes.pop(name) for name in MUTABLE_SETTINGS if name in changes}
    found, name, classes, head_dtype = _read(model, changes)
    if routing:
        found = _with_routing(found, routing)
    num_classes = classes if num_classes is None else num_classes
    if head_dtype is None:
        head_dtype = found.dtype
    return Described(found, name, num_classes, head_dtype)


def _read(model, changes):
    """Return record and name of a backbone, classes and dtype of a head."""
    if isinstance(model, Mapping):
        arguments = {**model, **changes}
        name = model.get("name") or "model"
        return read(kind_of(model), arguments), name, None, None
    if isinstance(model, str | Path):
        kind, arguments = catalogue.read_config(model)
        if kind not in BY_NAME:
            raise ValueError(
                f"`cost` counts backbones of the classes {', '.join(BY_NAME)}. "
                f"Received: the preset {str(model)!r} of a {kind!r}."
            )
        return read(kind, {**arguments, **changes}), Path(model).name, None, None
    backbone = getattr(model, "backbone", model)
    found = getattr(backbone, "architecture", None)
    num_classes = getattr(model, "num_classes", None)
    classes = map(keras.saving.get_registered_name, type(model).__mro__)
    is_task = num_classes is not None or not set(_PAIR_TASKS).isdisjoint(classes)
    if not isinstance(found, Settings) or (backbone is not model and not is_task):
        raise ValueError(
            "`cost` counts the name or directory of a preset, a backbone of this "
            "library, a `ViTMoEImageClassifier`, a `LIMoEContrastive`, a "
            "`TwoTowerContrastive` or a dict of a backbone's arguments. Received: "
            f"model={model!r}."
        )
    if changes:
        found = found.replace(**changes)
    return found, model.name, num_classes, getattr(model, "head_dtype", None)


def _with_routing(found, routing):
    """Return the same architecture with other settings of its routers."""
    if isinstance(found, TwoTowers):
        raise ValueError(
            "The routers of two towers are set one tower at a time. Received: "
            f"{', '.join(routing)}."
        )
    router = found.router
    if not router:
        raise ValueError(
            f"A dense model has no routers to set. Received: {', '.join(routing)}."
        )
    is_list = isinstance(router, list | tuple)
    routers = [r.with_settings(**routing) for r in (router if is_list else [router])]
    return found.replace(router=routers if is_list else routers[0])
