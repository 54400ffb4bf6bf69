"""The gallery of presets with weights: pictures of their routing, and their cards."""

import re

from experiments.lib.cards import CARD, with_front_matter
from keras_softmoe import catalogue, presets


def gallery():
    """A section for each preset that was trained here, Markdown."""
    parts = []
    for name in catalogue.names_of_kind("trained"):
        parts.append(f"### {name}")
        if drawn(name):
            parts.append(f"![How {name} routes](images/routing_{name}.png)")
        parts.append(_card(name))
    return "\n\n".join(parts) + "\n"


def cards():
    """Dict from the paths of the cards, below the root, to texts with today's heads."""
    return {
        f"presets/{name}/{CARD}": with_front_matter(
            presets.describe(name).path, name, _read(name)
        )
        for name in catalogue.names_of_kind("trained")
    }


def drawn(name):
    """Whether a preset has routing to draw."""
    return "dense" not in name and not name.startswith("vit_")


def _read(name):
    return (presets.describe(name).path / CARD).read_text(encoding="utf-8")


def _card(name):
    """The card of a preset without its head and its title."""
    card = catalogue.without_front_matter(_read(name))
    return re.sub(r"^# .*\n", "", card).strip()
