"""The layers of whatever stands for a model: a preset, a model, a dict of arguments."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_softmoe import catalogue
from keras_softmoe.checks import did_you_mean
from keras_softmoe.layers.parts import ImageParts, PairParts, arguments_of
from keras_softmoe.routers import Router
from keras_softmoe.routers.settings import MUTABLE_SETTINGS

# The classes of backbones by the names that presets have for them.
_PARTS = {
    "keras_softmoe>ViTMoEBackbone": ImageParts,
    "keras_softmoe>LIMoEBackbone": PairParts,
}
_PAIR_TASK = "keras_softmoe>LIMoEContrastive"

# Arguments of the backbones that say nothing about their layers.
_IRRELEVANT = ("name", "trainable")


class Configuration(NamedTuple):
    """A model whose layers are not built.

    Attributes:
        parts: `layers.parts.ImageParts` or `PairParts`.
        arguments: dict of the arguments that they were made from.
        name: str, name of the model.
        num_classes: int, classes of the head. `None` without one.
        head_dtype: dtype of the head, `None` for the backbone's.
    """

    parts: Any
    arguments: dict
    name: str
    num_classes: int | None
    head_dtype: Any

    @property
    def is_pair(self):
        """Whether the model takes pairs of image and caption: bool."""
        return isinstance(self.parts, PairParts)

    @property
    def dtype(self):
        """The dtype or policy of the layers, `None` for the global one."""
        return self.arguments.get("dtype")

    @property
    def group_images(self):
        """Images (or pairs) that are routed together: int, `None` for all."""
        return self.parts.encoder.moe_settings["group_images"]

    @property
    def feature_dim(self):
        """Width of what a head is put on: int."""
        pre_logits = getattr(self.parts, "pre_logits", None)
        return pre_logits.units if pre_logits else self.arguments["hidden_dim"]

    def cost(self, batch_size, training=False):
        """What the layers cost for a batch of images (or pairs): `costs.LayerCost`."""
        images = (batch_size, *self.arguments["image_shape"])
        if not self.is_pair:
            return self.parts.cost(images, training)
        texts = (batch_size, self.arguments["sequence_length"])
        return self.parts.cost({"image": images, "text": texts}, training)


def configuration(model, num_classes=None, **changes):
    """The `Configuration` of a model, a preset or a dict of arguments.

    Args:
        model: as in `evaluation.cost`.
        num_classes: int or `None`, classes of the head. A classifier's own, otherwise
            no head, if `None`.
        **changes: arguments of the backbone to change and settings of its routers.

    Raises:
        ValueError: if it is none of these, or of a class that is not known here, or
            arguments are missing, unknown or do not go together.
    """
    kind, arguments, name, classes, head_dtype = _read(model)
    settings = {name: changes.pop(name) for name in MUTABLE_SETTINGS if name in changes}
    arguments = {**arguments, **changes}
    for irrelevant in _IRRELEVANT:
        arguments.pop(irrelevant, None)
    _check_arguments(kind, arguments)
    router = _revived(arguments.get("router"))
    if settings and not router:
        raise ValueError(
            "A dense model has no routers to set. Received: "
            f"{', '.join(settings)}. Leave these settings out."
        )
    if settings:
        is_list = isinstance(router, list)
        changed = [
            r.with_settings(**settings) for r in (router if is_list else [router])
        ]
        router = changed if is_list else changed[0]
    parts = _PARTS[kind].make(**{**arguments, "router": router})
    num_classes = classes if num_classes is None else num_classes
    return Configuration(parts, arguments, name, num_classes, head_dtype)


def _read(model):
    """Class, arguments and name of a backbone, classes and dtype of a head."""
    if isinstance(model, Mapping):
        # Only one of them knows words.
        kind = "LIMoEBackbone" if "vocabulary_size" in model else "ViTMoEBackbone"
        name = model.get("name") or "model"
        return f"keras_softmoe>{kind}", dict(model), name, None, None
    if isinstance(model, str | Path):
        kind, arguments = catalogue.read_config(model)
        if kind not in _PARTS:
            raise ValueError(
                f"`cost` counts backbones of the classes {', '.join(_PARTS)}. Received:"
                f" the preset {str(model)!r} of a {kind!r}."
            )
        return kind, arguments, Path(model).name, None, None
    backbone = getattr(model, "backbone", model)
    kind = next(iter(_registered_names(backbone) & _PARTS.keys()), None)
    num_classes = getattr(model, "num_classes", None)
    is_task = num_classes is not None or _PAIR_TASK in _registered_names(model)
    if kind is None or (backbone is not model and not is_task):
        raise ValueError(
            "`cost` counts the name or directory of a preset, a `ViTMoEBackbone`, a "
            "`ViTMoEImageClassifier`, a `LIMoEBackbone`, a `LIMoEContrastive` or a "
            f"dict of a backbone's arguments. Received: model={model!r}."
        )
    head_dtype = getattr(model, "head_dtype", None)
    return kind, backbone.get_config(), model.name, num_classes, head_dtype


def _registered_names(model):
    classes = type(model).__mro__
    return {keras.saving.get_registered_name(cls) for cls in classes}


def _check_arguments(kind, arguments):
    required, optional = arguments_of(_PARTS[kind])
    missing = [name for name in required if name not in arguments]
    unknown = sorted(arguments.keys() - {*required, *optional})
    if missing or unknown:
        raise ValueError(
            f"The arguments of `{kind.partition('>')[2]}` are "
            f"{', '.join(required)}, and optionally {', '.join(optional)}. Received: "
            + ("also " + ", ".join(unknown) if unknown else "no " + ", ".join(missing))
            + f".{did_you_mean(unknown, [*required, *optional])}"
        )


def _revived(router):
    """Routers from their serialized form, without weights."""
    if router is None or isinstance(router, Router):
        return router
    if isinstance(router, list | tuple):
        return [_revived(one) for one in router]
    try:
        router = keras.saving.deserialize_keras_object(router)
        if isinstance(router, Router):
            return router
        reason = None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        reason = error
    raise ValueError(
        "The router of this configuration cannot be made. It has to be a router of "
        "`keras_softmoe.routers`, or serialized from one; import the module of one of "
        f"your own first. Received: router={router!r}."
    ) from reason
