"""Letters and signs of the fonts inside matplotlib, as distance fields."""

import functools
from typing import NamedTuple

import numpy as np

from experiments.synthetic.fonts import (
    distance_to,
    encode,
    find_fonts,
    open_font,
    render,
)

# Every class is one shape: a capital stands for its lower case where the two differ
# in size alone (C, O, S, ...), and one script stands for all that share a shape.
# No digit of any script is here. Outside the Latin alphabet, letters that are drawn
# like a digit are left out too (Cyrillic Ze is a 3, Armenian Oh is a 0, ...).
GLYPH_CLASSES = (
    *"ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghijmnqrty",
    *"ΓΔΛΞΠΣΦΨΩαβγεζηλμξπφω",
    *"ДЖИЙЦШЩЪЫЮЯЂЉЊ",
    *"ԲԳԴԵԹԺԻԽԾԿՀՃՄՊՌՎՔՖ",
    *"ადთლრტუფქღჭჯჰ",
    *"אגהטלמעצקש",
    *"!?&@#$%*+-=/<>()[]{}§¶‡~«»;^\\€£¥¢©",
    *"±÷∇∞∫∮√∈∉∩¬∀∃≈≠≤≥≡∝∠⊥⊕→←↑↓↔⇒",
)


class GlyphBank(NamedTuple):
    """All classes in all fonts; one row per (class, font) pair, sorted by class.

    Args:
        fields: uint8 (2, F, FIELD, FIELD). First the distance to the glyph's centre
            line, second that to its ink, negative inside.
        first: int array (number of classes,), a class's first row.
        count: int array (number of classes,), how many rows, i.e. fonts, it has.
    """

    fields: np.ndarray
    first: np.ndarray
    count: np.ndarray


@functools.cache
def glyph_bank(classes=GLYPH_CLASSES):
    """Renders the classes in every font that has them; kept for the process."""
    fonts = [(open_font(path), *rest) for path, *rest in find_fonts()]
    ink, count = [], []
    for character in classes:
        drawn = [
            render(font, character)
            for font, known, latin_only in fonts
            if ord(character) in known
            and (not latin_only or (character.isascii() and character.isalpha()))
        ]
        ink += drawn
        count.append(len(drawn))
    missing = [c for c, n in zip(classes, count, strict=True) if not n]
    if missing:
        raise ImportError(
            "No font of the installed matplotlib has some of the glyph classes. "
            f"Received: missing={missing}. Install a matplotlib release that ships "
            "the DejaVu and STIX fonts: `pip install 'keras-softmoe[viz]'`."
        )
    ink = np.stack(ink)
    count = np.array(count)
    centre_line = distance_to(_thin(ink))
    outline = distance_to(ink) - distance_to(~ink)
    return GlyphBank(
        fields=encode(np.stack([centre_line, outline])),
        first=np.cumsum(count) - count,
        count=count,
    )


def _thin(ink):
    """Centre lines of the ink, one pixel wide (Zhang and Suen, 1984), all at once."""
    ink = ink.copy()
    alive = np.arange(len(ink))
    while len(alive):
        work = ink[alive]
        changed = np.zeros(len(alive), bool)
        for second in (False, True):
            remove = _removable(work, second)
            work &= ~remove
            changed |= remove.any(axis=(1, 2))
        ink[alive] = work
        alive = alive[changed]
    return ink


def _removable(ink, second):
    """Border pixels that one half step of the thinning takes away."""
    padded = np.pad(ink, ((0, 0), (1, 1), (1, 1)))
    size = ink.shape[1]
    # The eight neighbours, clockwise from north.
    offsets = ((0, 1), (0, 2), (1, 2), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0))
    n = [padded[:, y : y + size, x : x + size] for y, x in offsets]
    north, east, south, west = n[0], n[2], n[4], n[6]
    neighbours = sum(pixel.astype("int8") for pixel in n)
    turns = sum((~n[i] & n[(i + 1) % 8]).astype("int8") for i in range(8))
    if second:
        corner = ~(north & east & west) & ~(north & south & west)
    else:
        corner = ~(north & east & south) & ~(east & south & west)
    return ink & (neighbours >= 2) & (neighbours <= 6) & (turns == 1) & corner
