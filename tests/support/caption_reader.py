"""Reads captions of synthetic scenes, word by word, knowing nothing of their making."""

import re

import numpy as np

from experiments.synthetic import COLOR_NAMES
from experiments.synthetic.scenes import (
    PLACE_NAMES,
    RELATION_NAMES,
    SHAPE_NAMES,
    SIZE_NAMES,
)

_SIZES = {
    **dict.fromkeys(("small", "little", "tiny"), "small"),
    **dict.fromkeys(("large", "big", "huge"), "large"),
}
_COUNTS = {"two": 2, "2": 2, "pair": 2, "three": 3, "3": 3}
_RELATIONS = {
    **dict.fromkeys(("above", "over"), "above"),
    **dict.fromkeys(("below", "under", "beneath"), "below"),
    "left of": "left of",
    "right of": "right of",
}
_OPPOSITE = {"left of": "right of", "above": "below"}
_OPPOSITE |= {value: key for key, value in _OPPOSITE.items()}


def read_caption(text):
    """(mentions, relation): one dict of attributes for each thing, relation or None."""
    text = re.sub(r"\b(to|on) the (?=(left|right) of\b)", "", text.replace(",", ""))
    between = r"\b(left of|right of|above|over|below|under|beneath|and)\b"
    first, *rest = re.split(between, text)
    mentions = [_read_mention(first)]
    relation = None
    if rest:
        relation, second = rest
        relation = _RELATIONS.get(relation)
        mentions.append(_read_mention(second))
    return mentions, relation


def _read_mention(text):
    words = text.replace("upper", "top").replace("lower", "bottom").split()
    shapes = [re.sub(r"(?<=s)es$|(?<!s)s$", "", word) for word in words]
    place = [word for word in words if word in ("top", "bottom")]
    place += [word for word in words if word in ("left", "right")]
    if "middle" in words or "center" in words:
        place = ["center"]
    return {
        "color": _only(word for word in words if word in COLOR_NAMES),
        "shape": _only(word for word in shapes if word in SHAPE_NAMES),
        "size": _only(_SIZES[word] for word in words if word in _SIZES),
        "count": _only({_COUNTS[word] for word in words if word in _COUNTS}),
        "place": " ".join(place) or None,
    }


def _only(values):
    values = list(values)
    assert len(values) < 2, values
    return values[0] if values else None


def scene_of(data, index):
    """(things, relation): the same dicts from the attributes, complete."""
    row = {name: np.asarray(part)[index] for name, part in data._asdict().items()}

    def thing(label, size):
        shape, color = divmod(int(label), len(COLOR_NAMES))
        return {
            "color": COLOR_NAMES[color],
            "shape": SHAPE_NAMES[shape],
            "size": SIZE_NAMES[size],
            "count": int(row["counts"]),
            "place": PLACE_NAMES[row["places"]] if row["places"] >= 0 else None,
        }

    things = [thing(row["labels"], row["sizes"])]
    if row["relations"] < 0:
        return things, None
    things.append(thing(row["second_labels"], row["second_sizes"]))
    return things, RELATION_NAMES[row["relations"]]


def is_true(caption, scene):
    """Whether what `read_caption` gave holds for what `scene_of` gave."""
    (mentions, said), (things, relation) = caption, scene
    if len(mentions) != len(things):
        return False
    orders = [(things, relation)]
    if relation:
        orders.append((things[::-1], _OPPOSITE[relation]))
    return any(
        said in (None, seen)
        and all(
            value in (None, thing[name])
            for mention, thing in zip(mentions, order, strict=True)
            for name, value in mention.items()
        )
        for order, seen in orders
    )
