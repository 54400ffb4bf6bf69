"""Records of serialized backbones."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_softmoe.architecture.pairs import LIMoE, TwoTowers
from keras_softmoe.architecture.settings import Settings
from keras_softmoe.architecture.towers import TextTower, ViT
from keras_softmoe.routers import Router

BY_NAME = {
    f"keras_softmoe>{cls.backbone}": cls for cls in (ViT, TextTower, LIMoE, TwoTowers)
}

# Arguments of all backbones besides the settings of their layers.
_OF_MODELS = ("name", "trainable")


def read(kind: str, config: Mapping) -> Settings:
    """Return the record of a serialized backbone. No model is built.

    `kind` is one of `BY_NAME`, `config` a dict of arguments (routers, or serialized).
    """
    config = {name: x for name, x in config.items() if name not in _OF_MODELS}
    cls = BY_NAME[kind]
    if cls is TwoTowers:
        for name in ("image_backbone", "text_backbone"):
            if isinstance(tower := config.get(name), Mapping):
                config[name] = read(tower["registered_name"], tower["config"])
    elif "router" in config:
        config["router"] = revive_router(config["router"])
    return cls.of(config)


def revive_router(router: Any) -> Router | list | None:
    """Return a router of its serialized form; routers and `None` are returned as is."""
    if router is None or isinstance(router, Router):
        return router
    if isinstance(router, list | tuple):
        return [revive_router(one) for one in router]
    try:
        found = keras.saving.deserialize_keras_object(router)
        if isinstance(found, Router):
            return found
        reason = None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        reason = error
    raise ValueError(
        "The router of this configuration cannot be made. Import the module of a "
        f"router of your own first. Received: router={router!r}."
    ) from reason


def kind_of(arguments: Mapping) -> str:
    """Return the registered name of the backbone that a dict of arguments is for."""
    takes_images = not {"image_shape", "patch_size"}.isdisjoint(arguments)
    cls = ViT
    if "image_backbone" in arguments:
        cls = TwoTowers
    elif "vocabulary_size" in arguments:
        cls = LIMoE if takes_images else TextTower
    return f"keras_softmoe>{cls.backbone}"
