"""Letters and signs of the fonts inside matplotlib, as distance fields.

A distance field turns "how thick, how sharp is this stroke" into one comparison
with a number, so that a glyph is rendered once and then drawn in any weight.
"""

import functools
import glob
import os
from typing import NamedTuple

import numpy as np
from scipy.ndimage import distance_transform_edt

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

BOX = 44
MARGIN = 10
# Side of a field, in bank pixels: the glyph's box with room around it.
FIELD = BOX + 2 * MARGIN
# A field value v (uint8) is the signed distance v / STEPS - OFFSET in bank pixels.
STEPS = 8
OFFSET = 8

# Fonts whose character map is Unicode. Patterns, because versions of matplotlib differ
# in what they ship. The Computer Modern text fonts map only the Latin letters as
# Unicode does, and LastResort maps every code to a placeholder.
_UNICODE_FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-*.ttf",
    "DejaVuSansMono*.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-*.ttf",
    "STIXGeneral*.ttf",
)
_LATIN_FONTS = ("cmb10.ttf", "cmmi10.ttf", "cmr10.ttf", "cmss10.ttf", "cmt[it]10.ttf")


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
    fonts = [(_open_font(path), *rest) for path, *rest in _find_fonts()]
    ink, count = [], []
    for character in classes:
        drawn = [
            _render(font, character)
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
    centre_line = _distance(_thin(ink))
    outline = _distance(ink) - _distance(~ink)
    return GlyphBank(
        fields=_encode(np.stack([centre_line, outline])),
        first=np.cumsum(count) - count,
        count=count,
    )


def import_matplotlib():
    """The module, or an error that says how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "glyphs() draws with the fonts that ship inside matplotlib, which is not "
            "installed. Install the extra `viz`: `pip install 'keras-softmoe[viz]'`."
        ) from error
    return matplotlib


def _find_fonts():
    """(path, codes it has, whether only its Latin letters count) for every font."""
    matplotlib = import_matplotlib()
    from matplotlib.ft2font import FT2Font

    folder = os.path.join(matplotlib.get_data_path(), "fonts", "ttf")
    fonts = []
    for patterns, latin_only in ((_UNICODE_FONTS, False), (_LATIN_FONTS, True)):
        for pattern in patterns:
            for path in sorted(glob.glob(os.path.join(folder, pattern))):
                fonts.append((path, FT2Font(path).get_charmap(), latin_only))
    return fonts


def _open_font(path):
    # Pillow is a dependency of matplotlib. The basic layout engine is always there.
    from PIL import ImageFont

    return ImageFont.truetype(path, 3 * BOX, layout_engine=ImageFont.Layout.BASIC)


def _render(font, character):
    """Boolean (FIELD, FIELD) ink that fills the box, most of it in height."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = font.getbbox(character)
    width, height = right - left, bottom - top
    drawn = Image.new("L", (width, height))
    ImageDraw.Draw(drawn).text((-left, -top), character, fill=255, font=font)
    # Letters fill the height, squeezed if need be; a dash or an arrow keeps its shape.
    scale = BOX / max(height, 0.5 * width)
    width, height = min(BOX, round(width * scale)), max(1, round(height * scale))
    drawn = np.asarray(drawn.resize((width, height), Image.Resampling.BOX))
    field = np.zeros((FIELD, FIELD), bool)
    top, left = (FIELD - height) // 2, (FIELD - width) // 2
    # A third rather than a half: hairlines must not break.
    field[top : top + height, left : left + width] = drawn > 85
    return field


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


def _distance(mask):
    """Euclidean distance of every pixel to the nearest True one, float32."""
    distances = [distance_transform_edt(~picture) for picture in mask]
    return np.stack(distances).astype("float32")


def _encode(distance):
    return np.clip((distance + OFFSET) * STEPS + 0.5, 0, 255).astype("uint8")
