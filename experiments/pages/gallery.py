"""The gallery of presets with weights: pictures of their routing, and their cards."""

import re

from keras_softmoe import catalogue, presets


def gallery():
    """A section for each preset that was trained here, Markdown."""
    parts = []
    for name in catalogue.names():
        if catalogue.read_metadata(name)["kind"] != "trained":
            continue
        parts.append(f"### {name}")
        if drawn(name):
            parts.append(f"![How {name} routes](images/routing_{name}.png)")
        parts.append(_card(name))
    return "\n\n".join(parts) + "\n"


def drawn(name):
    """Whether a preset has routing to draw."""
    return "dense" not in name and not name.startswith("vit_")


def _card(name):
    """The card of a preset without its title."""
    card = (presets.describe(name).path / "README.md").read_text(encoding="utf-8")
    return re.sub(r"^# .*\n", "", card).strip()
