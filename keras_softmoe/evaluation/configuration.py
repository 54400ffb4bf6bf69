"""The arguments that a model was made with, from whatever stands for the model."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import keras

from keras_softmoe import presets
from keras_softmoe.routers import LIMoERouter, Router
from keras_softmoe.routers.token_choice import TokenChoiceRouter

VIT = "keras_softmoe>ViTMoEBackbone"
LIMOE = "keras_softmoe>LIMoEBackbone"
LIMOE_TASK = "keras_softmoe>LIMoEContrastive"

LIVE_SETTINGS = tuple(
    dict.fromkeys((*TokenChoiceRouter.mutable_settings, *LIMoERouter.mutable_settings))
)

# What the backbones take, and their defaults, which a preset may leave out. Asking the
# classes would import KerasHub and TensorFlow; a test compares them.
_LAYERS = ("num_layers", "num_heads", "hidden_dim", "mlp_dim")
_BLOCKS = {
    "dropout_rate": 0.0,
    "dispatcher": "auto",
    "equal_experts": False,
    "expert_dropout_rate": 0.0,
    "remat_experts": False,
    "dispatch_dtype": None,
    "dtype": None,
    "name": None,
    "trainable": True,
    "moe_layers": (),
    "router": None,
    "use_qk_norm": False,
}
REQUIRED = {
    VIT: ("image_shape", "patch_size", *_LAYERS),
    LIMOE: (
        "image_shape",
        "patch_size",
        "vocabulary_size",
        "sequence_length",
        *_LAYERS,
    ),
}
DEFAULTS = {
    VIT: {
        **_BLOCKS,
        "pooling": "token",
        "position_embedding": "learned",
        "representation_dim": None,
        "group_images": 1,
    },
    LIMOE: {
        **_BLOCKS,
        "embedding_dim": 512,
        "image_pooling": "gap",
        "text_pooling": "gap",
        "logit_scale": 10.0,
        "logit_bias": None,
        "group_images": 32,
    },
}


class Configuration(NamedTuple):
    """What is known of a model.

    Attributes:
        kind: `VIT` or `LIMOE`.
        arguments: dict, those that the backbone was made with.
        num_classes: int, classes of the head. `None` without one.
        head_dtype: dtype of the head, `None` for the backbone's.
    """

    kind: str
    arguments: dict
    num_classes: int | None = None
    head_dtype: object = None


def configuration(model):
    """The `Configuration` of a model, a preset or a dict of arguments.

    Raises:
        ValueError: if it is none of these, or of a class that is not known here.
    """
    if isinstance(model, Mapping):
        # Only one of them knows words.
        kind = LIMOE if "vocabulary_size" in model else VIT
        return Configuration(kind, dict(model))
    if isinstance(model, str | Path):
        return Configuration(*_preset_config(model))
    backbone = getattr(model, "backbone", model)
    kind = next(iter(_names(backbone) & REQUIRED.keys()), None)
    num_classes = getattr(model, "num_classes", None)
    is_task = num_classes is not None if kind == VIT else LIMOE_TASK in _names(model)
    if kind is None or (backbone is not model and not is_task):
        raise ValueError(
            "`cost` counts the name or directory of a preset, a `ViTMoEBackbone`, a "
            "`ViTMoEImageClassifier`, a `LIMoEBackbone`, a `LIMoEContrastive` or a "
            f"dict of a backbone's arguments. Received: model={model!r}."
        )
    head_dtype = getattr(model, "head_dtype", None)
    return Configuration(kind, backbone.get_config(), num_classes, head_dtype)


def _names(model):
    classes = type(model).__mro__
    return {keras.saving.get_registered_name(cls) for cls in classes}


def _preset_config(preset):
    path = Path(presets.resolve(preset, load_weights=False), presets.CONFIG_FILE)
    if not path.is_file():
        raise ValueError(
            "A preset is counted by name or from a directory on this machine. "
            f"Received: model={str(preset)!r}. Load it, then count the model."
        )
    with presets.explained(path.parent):
        saved = json.loads(path.read_text(encoding="utf-8"))
        name, config = saved["registered_name"], saved["config"]
    if name not in REQUIRED:
        raise ValueError(
            f"`cost` counts backbones of the classes {', '.join(REQUIRED)}. Received: "
            f"the preset {str(preset)!r} of a {name!r}."
        )
    return name, config


# === Arguments ===


def complete(kind, config, settings):
    """A backbone's arguments, complete and checked as far as counting needs.

    Args:
        kind: `VIT` or `LIMOE`.
        config: dict of arguments.
        settings: dict of live settings of the routers, to change.

    Returns:
        Namespace of the arguments, and of `num_patches`, `patch_numbers` (numbers in a
        patch) and `routers`, one for each MoE block.

    Raises:
        ValueError: if arguments are missing, unknown, or do not go together.
    """
    required, defaults = REQUIRED[kind], DEFAULTS[kind]
    missing = [name for name in required if name not in config]
    unknown = sorted(config.keys() - {*required, *defaults})
    if missing or unknown:
        raise ValueError(
            f"The arguments of `{kind.partition('>')[2]}` are "
            f"{', '.join(required)}, and optionally {', '.join(defaults)}. Received: "
            + ("no " + ", ".join(missing) if missing else "also " + ", ".join(unknown))
            + "."
        )
    a = SimpleNamespace(**{**defaults, **config})
    height, width, channels = a.image_shape
    size = a.patch_size
    patch_height, patch_width = (size, size) if isinstance(size, int) else size
    if height % patch_height or width % patch_width:
        raise ValueError(
            "The patch size has to divide height and width of the image. Received: "
            f"image_shape={tuple(a.image_shape)}, patch_size={size}."
        )
    a.num_patches = (height // patch_height) * (width // patch_width)
    a.patch_numbers = patch_height * patch_width * channels
    a.routers = _routers(a, settings)
    return a


def _routers(a, settings):
    """One router for each MoE block, with their settings changed."""
    is_list = isinstance(a.router, list | tuple)
    given = a.router if is_list else [a.router] if a.router is not None else []
    routers = [_revived(router) for router in given]
    if not is_list:
        routers *= len(a.moe_layers)
    if len(routers) != len(a.moe_layers) or bool(given) != bool(a.moe_layers):
        raise ValueError(
            "`moe_layers` and `router` go together: give both for mixtures of experts "
            "(one router, or a list of one for each block), neither for a dense model. "
            f"Received: moe_layers={a.moe_layers}, router={a.router!r}."
        )
    if settings and not routers:
        raise ValueError(
            "A dense model has no routers to set. Received: "
            f"{', '.join(settings)}. Leave these settings out."
        )
    return [r.with_settings(**settings) for r in routers] if settings else routers


def _revived(router):
    """A router from its serialized form. It has no weights before it is built."""
    try:
        if not isinstance(router, Router):
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
