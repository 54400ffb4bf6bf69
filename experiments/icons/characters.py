"""Make the bank of Chinese characters, the second task of the study.

    apt-get install fonts-noto-cjk fonts-arphic-ukai fonts-arphic-uming \\
        fonts-wqy-microhei fonts-wqy-zenhei fonts-lxgw-wenkai fonts-hanazono
    python -m experiments.icons.characters
    python -m experiments.icons.characters --fonts FOLDER   # where they are unpacked

Needs `fonttools` and `pillow`. Takes half a minute. The bank, a concept for each
character and a set for each face, is written to `build/icons/characters.npz`.
"""

import argparse
from pathlib import Path

import numpy as np

from experiments.icons.bank import SPLITS, Bank, write
from experiments.icons.sources import SIZE
from keras_softmoe.checks import quote

FONTS = Path("/usr/share/fonts")
BANK = Path("build", "icons", "characters.npz")
# Debian's package, file, number of the face in it, and licence.
FACES = (
    ("noto-cjk", "opentype/noto/NotoSansCJK-Regular.ttc", 2, "OFL-1.1"),
    ("noto-cjk", "opentype/noto/NotoSerifCJK-Bold.ttc", 2, "OFL-1.1"),
    ("arphic-ukai", "truetype/arphic/ukai.ttc", 0, "Arphic"),
    ("arphic-uming", "truetype/arphic/uming.ttc", 0, "Arphic"),
    ("wqy-microhei", "truetype/wqy/wqy-microhei.ttc", 0, "Apache-2.0"),
    ("wqy-zenhei", "truetype/wqy/wqy-zenhei.ttc", 0, "GPL-2.0 with font exception"),
    ("lxgw-wenkai", "truetype/lxgw-wenkai/LXGWWenKai-Regular.ttf", 0, "OFL-1.1"),
    ("hanazono", "truetype/hanazono/HanaMinA.ttf", 0, "Hanazono"),
)
# Never trained on: a face of brush strokes, as ukai is, drawn by others.
HELD_OUT = "LXGWWenKai-Regular.ttf"
# Rows of GB 2312 with the 3,755 characters of its first level, the common ones.
_FIRST_LEVEL = range(0xB0, 0xD8)
_SEED = 57


def common_characters():
    """The characters of the first level of GB 2312, a str in an order by chance."""
    codes = [bytes((row, cell)) for row in _FIRST_LEVEL for cell in range(0xA1, 0xFF)]
    found = "".join(code.decode("gb2312", "ignore") for code in codes)
    order = np.random.default_rng(_SEED).permutation(len(found))
    return "".join(found[index] for index in order)


def make_bank(folder, characters):
    """Return a `Bank` of characters in all faces.

    Args:
        folder: path of the fonts.
        characters: str, a concept each. Those that a face lacks are left out.
    """
    from fontTools.ttLib import TTFont
    from PIL import ImageFont

    fonts = []
    for package, file, number, _ in FACES:
        path = Path(folder, file)
        if not path.exists():
            raise ValueError(
                f"There is no {quote(str(path))}. `apt-get install fonts-{package}` "
                "installs it, or name the folder with `--fonts`."
            )
        with TTFont(path, fontNumber=number, lazy=True) as of:
            known = of.getBestCmap()
        characters = "".join(c for c in characters if ord(c) in known)
        fonts.append(ImageFont.truetype(str(path), SIZE, index=number))
    count = len(characters)
    pictures = [draw(font, character) for font in fonts for character in characters]
    face = np.repeat(np.arange(len(FACES), dtype="int32"), count)
    held_out = [Path(file).name == HELD_OUT for _, file, _, _ in FACES]
    rows = np.arange(len(pictures), dtype="int32")
    return Bank(
        pictures=np.stack(pictures) // 16 * 17,
        label=rows % count,
        set=face,
        family=face,
        split=np.array(held_out, "int8")[face] * SPLITS.index("held_out_styles"),
        caption_start=np.arange(len(rows) + 1, dtype="int32"),
        caption=rows % count,
        concepts=np.array(list(characters)),
        held_out=np.zeros(count, bool),
        captions=np.array(list(characters)),
        sets=np.array([(p, Path(file).stem, "", of, "") for p, file, _, of in FACES]),
    )


def draw(font, character):
    """A character in the middle of 32 x 32 pixels, uint8, ink bright."""
    from PIL import Image, ImageDraw

    side = 2 * SIZE
    image = Image.new("L", (side, side))
    middle = (side // 2, side // 2)
    ImageDraw.Draw(image).text(middle, character, font=font, fill=255, anchor="mm")
    left, top, right, bottom = image.getbbox() or (0, 0, side, side)
    left, top = (left + right - SIZE) // 2, (top + bottom - SIZE) // 2
    return np.asarray(image.crop((left, top, left + SIZE, top + SIZE)))


def main(arguments=None):
    """Command line: see the top of the file."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.icons.characters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fonts", type=Path, default=FONTS, help=f"[{FONTS}]")
    parser.add_argument("--bank", type=Path, default=BANK, help=f"[{BANK}]")
    chosen = parser.parse_args(arguments)
    bank = make_bank(chosen.fonts, common_characters())
    write(bank, chosen.bank)
    print(f"{len(bank.concepts)} characters in {len(bank.sets)} faces: {chosen.bank}")


if __name__ == "__main__":
    main()
