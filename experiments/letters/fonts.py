"""The fonts inside matplotlib: characters as ink, and as distance fields.

A distance field turns "how thick, how sharp is this stroke" into one comparison
with a number, so that a glyph is rendered once and then drawn in any weight.
"""

import glob
import os

import numpy as np
from scipy.ndimage import distance_transform_edt

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


def import_matplotlib():
    """The module, or an error that says how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Letters are drawn with the fonts inside matplotlib, which is not "
            "installed. Install the extra `viz`: `pip install 'keras-softmoe[viz]'`."
        ) from error
    return matplotlib


def find_fonts():
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


def open_font(path):
    # Pillow is a dependency of matplotlib. The basic layout engine is always there.
    from PIL import ImageFont

    return ImageFont.truetype(path, 3 * BOX, layout_engine=ImageFont.Layout.BASIC)


def render(font, character):
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


def distance_to(mask):
    """Euclidean distance of every pixel to the nearest True one, float32."""
    distances = [distance_transform_edt(~picture) for picture in mask]
    return np.stack(distances).astype("float32")


def encode(distance):
    return np.clip((distance + OFFSET) * STEPS + 0.5, 0, 255).astype("uint8")


# === Distortions: where each pixel looks in the field of its glyph ===


# Smooth warps are sums of the first cosines, this many along each axis.
_WAVES = 4


def warped_grid(image_size, uniform, rng, count):
    """For every pixel the place in the glyph's field to look at: x, y (B, size, size).

    From the frame inwards: coordinates run from -1 to 1 in both frame and glyph box.
    """
    line = ((np.arange(image_size) + 0.5) * 2 / image_size - 1).astype("float32")
    x, y = line[None, None, :], line[None, :, None]

    x, y = x + uniform(-0.12, 0.12), y + uniform(-0.12, 0.12)
    depth = 1 + uniform(-0.2, 0.2) * x + uniform(-0.2, 0.2) * y
    angle = uniform(-0.35, 0.35)
    cos, sin = np.cos(angle) / depth, np.sin(angle) / depth
    x, y = x * cos + y * sin, y * cos - x * sin
    x = x + uniform(-0.35, 0.35) * y
    # Heights near the frame's, widths from narrow to full, as writers' digits are.
    height = uniform(0.85, 1.15)
    width = height * np.exp(uniform(-0.5, 0.15))

    # (waves, size)
    frequency = np.arange(_WAVES, dtype="float32")
    waves = np.cos(np.pi / 2 * frequency[:, None] * (line + 1))
    decay = 1 + frequency[:, None] + frequency
    bend = rng.standard_normal((2, count, _WAVES, _WAVES), "float32") / decay
    bend_x, bend_y = waves.T @ (bend * uniform(0.0, 0.15)) @ waves

    centre = (FIELD - 1) / 2
    x = centre + BOX / 2 * (x / width + bend_x)
    y = centre + BOX / 2 * (y / height + bend_y)
    return x, y


def sample_fields(fields, field, x, y):
    """Bilinear values of field `field` (B,) at x, y (B, size, size); edges held."""
    x, y = (np.clip(place, 0, FIELD - 1.001) for place in (x, y))
    left, top = x.astype("int32"), y.astype("int32")
    x, y = x - left, y - top
    index = (field[:, None, None] * FIELD + top) * FIELD + left
    fields = fields.reshape(-1)
    upper = fields[index] * (1 - x) + fields[index + 1] * x
    index += FIELD
    lower = fields[index] * (1 - x) + fields[index + 1] * x
    return upper * (1 - y) + lower * y
