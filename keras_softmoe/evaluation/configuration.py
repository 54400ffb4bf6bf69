"""The layers of whatever stands for a model: a preset, a model, a dict of arguments."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_softmoe import catalogue
from keras_softmoe.layers.parts import ImageParts, PairParts, arguments_of
from keras_softmoe.routers import LIMoERouter, Router
from keras_softmoe.routers.token_choice import TokenChoiceRouter

# The classes of backbones by the names that presets have for them.
_PARTS = {
    "keras_softmoe>ViTMoEBackbone": ImageParts,
    "keras_softmoe>LIMoEBackbone": PairParts,
}
_PAIR_TASK = "keras_softmoe>LIMoEContrastive"

MUTABLE_SETTINGS = tuple(
    dict.fromkeys((*TokenChoiceRouter.mutable_settings, *LIMoERouter.mutable_settings))
)
# Arguments of the backbones that say nothing about their layers.
_IRRELEVANT = ("name", "trainable")


class Configuration(NamedTuple):
    """What is known of a model, before it is built.

    Attributes:
        parts: `layers.parts.ImageParts` or `PairParts`.
        arguments: dict of the arguments that they were made from.
        name: str or `None`, name of the model.
        num_classes: int, classes of the head. `None` without one.
        head_dtype: dtype of the head, `None` for the backbone's.
    """

    parts: Any
    arguments: dict
    name: str | None = None
    num_classes: int | None = None
    head_dtype: Any = None

    @property
    def is_pair(self):
        """Whether the model takes pairs of image and caption."""
        return isinstance(self.parts, PairParts)

    @property
    def dtype(self):
        """`keras.DTypePolicy` of the layers."""
        dtype = self.arguments.get("dtype") or keras.config.dtype_policy()
        return keras.dtype_policies.get(dtype)

    @property
    def group_images(self):
        """Int, images that are routed together, or `None` for the whole batch."""
        return self.parts.encoder.moe_settings["group_images"]

    def cost(self, batch_size, training=False):
        """What the layers cost for a batch of images (or pairs): `costs.LayerCost`."""
        images = (batch_size, *self.arguments["image_shape"])
        if not self.is_pair:
            return self.parts.cost(images, training)
        texts = (batch_size, self.arguments["sequence_length"])
        return self.parts.cost({"image": images, "text": texts}, training)


def configuration(model, **changes):
    """The `Configuration` of a model, a preset or a dict of arguments.

    Args:
        model: as in `evaluation.cost`.
        **changes: arguments of the backbone to change and settings of its routers.

    Raises:
        ValueError: if it is none of these, or of a class that is not known here, or
            arguments are missing, unknown or do not go together.
    """
    kind, arguments, **rest = _found(model)
    settings = {name: changes.pop(name) for name in MUTABLE_SETTINGS if name in changes}
    arguments = {**arguments, **changes}
    arguments = {k: v for k, v in arguments.items() if k not in _IRRELEVANT}
    _check_arguments(kind, arguments)
    if "router" in arguments:
        arguments["router"] = _routers(arguments["router"], settings)
    if settings and not arguments.get("router"):
        raise ValueError(
            "A dense model has no routers to set. Received: "
            f"{', '.join(settings)}. Leave these settings out."
        )
    return Configuration(_PARTS[kind].make(**arguments), arguments, **rest)


def _found(model):
    """Class, arguments, name, number of classes and dtype of the head of a model."""
