"""A model and the settings of its routers, in words."""

import re
from typing import NamedTuple

import keras

from keras_softmoe import drawing
from keras_softmoe.analysis._inputs import backbone_of
from keras_softmoe.analysis._streaming import routers_of
from keras_softmoe.evaluation import cost

# In the configuration of a router, but no settings of how it routes.
_NO_SETTINGS = ("name", "trainable", "num_experts")
# Names for models of Keras' own classes.
_KINDS = {"Functional": "this model", "Sequential": "this model"}


class ModelCard(NamedTuple):
    """A model and the settings of its routers, in words.

    Attributes:
        name: str, the name of the model if it was given one, else its class.
        facts: list of pairs of str: its parameters, its cost, ...
        routers: list of tuples of str and int: blocks, class of the router, number of
            experts, settings.
    """

    name: str
    facts: list
    routers: list


def card_of(model):
    """Return the `ModelCard` of a model."""
    backbone, _ = backbone_of(model)
    kind, name = type(model).__name__, _given_name(model)
    facts = [
        ("model", f"{kind} {name}".rstrip()),
        ("parameters", f"{model.count_params():,}"),
    ]
    try:
        gflop = cost(model).gflop_per_image
        facts.append(("GFLOP for an image (or a pair)", f"{gflop:.3g}"))
    except ValueError:
        # A model of another kind, or one that was quantized.
        pass
    if hasattr(backbone, "patch_grid"):
        grid = " × ".join(map(str, backbone.patch_grid))
        facts.append(("patches of an image", grid))
    facts.append(("Keras", f"{keras.version()}, {keras.backend.backend()}"))
    # Equal routers in one row.
    rows = {}
    for block, router in routers_of(backbone).items():
        settings = _settings(router.get_config())
        row = type(router).__name__, router.num_experts, settings
        rows.setdefault(row, []).append(drawing.block_title(block))
    routers = [(", ".join(blocks), *row) for row, blocks in rows.items()]
    return ModelCard(name or _KINDS.get(kind, kind), facts, routers)


def _given_name(model):
    """Return the name of a model, "" if Keras made it up: `vi_t_mo_e_backbone_1`."""
    made_up = re.sub(r"_|\d", "", model.name) == type(model).__name__.lower()
    return "" if made_up else model.name


def _settings(config):
    return ", ".join(
        f"{name}={_setting(value)}"
        for name, value in config.items()
        if name not in _NO_SETTINGS and value not in (None, False)
    )


def _setting(value):
    """Write a value in a configuration; of an object its class and settings."""
    if isinstance(value, dict) and "class_name" in value:
        return f"{value['class_name']}({_settings(value['config'])})"
    if isinstance(value, list | tuple):
        return " + ".join(str(_setting(x)) for x in value)
    return f"{value:.4g}" if isinstance(value, float) else value
