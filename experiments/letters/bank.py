"""Letters and signs that occur in several fonts and differ by sight, as fields."""

import hashlib
import importlib
import unicodedata
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.ndimage import gaussian_filter

from experiments.letters.fonts import (
    BOX,
    FIELD,
    distance_to,
    encode,
    find_fonts,
    import_matplotlib,
    open_font,
    render,
)
from keras_softmoe.files import atomic_file

# Raise with any change to the bank: old files are then left alone.
_VERSION = 1
# A class occurs in as many fonts, of which as many are trained on.
LEAST_FONTS, LEAST_TRAINED_FONTS = 4, 3
# Never trained on: one of each family.
NEW_FONTS = ("DejaVuSansMono-Bold", "DejaVuSerif-BoldItalic", "STIXGeneralBol")
# Classes that are never trained on, drawn with this seed.
NUM_NEW_CLASSES, _SPLIT_SEED = 256, 40
# Letters, numbers, punctuation and symbols.
_CATEGORIES = "LNPS"
# Boxes and Braille differ in the place of their parts in a line of text, which is lost.
# The last one stands for an object that is missing.
_LEFT_OUT = (range(0x2500, 0x25A0), range(0x2800, 0x2900), range(0xFFFC, 0xFFFE))
# Two signs look alike if, in some font, the squared difference of their blurred ink is
# a smaller part of the ink.
_LEAST_DIFFERENCE = 0.08
_COARSE = 16
SPLITS = ("train", "new_fonts", "new_classes")


class Bank(NamedTuple):
    """One row for each pair of a class and a font, sorted by class.

    Attributes:
        characters: str, the classes.
        fonts: `(fonts,)` str array, their names.
        fields: `(rows, FIELD, FIELD)` uint8 array, encoded distances to the ink.
        label: `(rows,)` int32 array, the class.
        font: `(rows,)` int32 array, the index of the font.
        new: `(classes,)` bool array, classes that are never trained on.
    """

    characters: str
    fonts: np.ndarray
    fields: np.ndarray
    label: np.ndarray
    font: np.ndarray
    new: np.ndarray

    def rows(self, split):
        """Return the rows of a split, and their labels, counted from 0.

        Args:
            split: `"train"`, `"new_fonts"` (trained classes in fonts never seen) or
                `"new_classes"` (classes never seen, in fonts that are trained on).
        """
        is_new_font = np.isin(self.fonts[self.font], NEW_FONTS)
        is_new_class = self.new[self.label]
        chosen = {
            "train": ~is_new_font & ~is_new_class,
            "new_fonts": is_new_font & ~is_new_class,
            "new_classes": ~is_new_font & is_new_class,
        }[split]
        rows = np.flatnonzero(chosen)
        # Position of each class among those that are new, or not
        number = np.where(self.new, np.cumsum(self.new), np.cumsum(~self.new)) - 1
        return rows, number[self.label[rows]].astype("int32")

    @property
    def num_classes(self):
        """Number of classes that are trained on."""
        return int((~self.new).sum())


def load_bank(directory, candidates=None):
    """Read the bank, or make it, which takes half a minute, and keep it.

    Args:
        directory: path, where it is kept. The name of the file changes with the
            candidates and the releases of the libraries that it depends on.
        candidates: as in `make_bank`.

    Returns:
        `Bank`.
    """
    libraries = (import_matplotlib(), importlib.import_module("PIL"), np)
    versions = (_VERSION, candidates, *(x.__version__ for x in libraries))
    digest = hashlib.sha256("/".join(map(str, versions)).encode()).hexdigest()[:12]
    path = Path(directory, f"bank_{digest}.npz")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        bank = make_bank(candidates)
        content = {**bank._asdict(), "characters": np.array(list(bank.characters))}
        with atomic_file(path) as aside, open(aside, "wb") as file:
            np.savez(file, **content)
    with np.load(path) as stored:
        content = {name: stored[name] for name in Bank._fields}
    return Bank(**{**content, "characters": "".join(content["characters"])})


def make_bank(candidates=None):
    """Render all characters that are asked for and keep those that differ by sight.

    Args:
        candidates: optional str, characters; all that the fonts have if `None`.

    Returns:
        `Bank`.
    """
    paths = [path for path, _, latin_only in find_fonts() if not latin_only]
    known = [known for _, known, latin_only in find_fonts() if not latin_only]
    names = np.array([Path(path).stem for path in paths])
    is_trained = ~np.isin(names, NEW_FONTS)
    if candidates is None:
        candidates = map(chr, sorted(set().union(*known)))
    candidates = [c for c in candidates if _is_sign(c)]
    # (characters, fonts)
    has = np.array([[ord(c) in codes for codes in known] for c in candidates])
    enough = _in_enough_fonts(has, is_trained)
    candidates = [c for c, keep in zip(candidates, enough, strict=True) if keep]
    has = has[enough]
    ink = np.zeros((len(paths), len(candidates), FIELD, FIELD), bool)
    for font, path in enumerate(paths):
        opened = open_font(path)
        for index in np.flatnonzero(has[:, font]):
            ink[font, index] = render(opened, candidates[index])
    # Some are blank there.
    has &= ink.any((2, 3)).T
    enough = np.flatnonzero(_in_enough_fonts(has, is_trained))
    kept = enough[distinct(ink[:, enough], has[enough])]
    label, font = np.nonzero(has[kept])
    ink = ink[font, kept[label]]
    parts = [ink[start : start + 512] for start in range(0, len(ink), 512)]
    fields = [encode(distance_to(part) - distance_to(~part)) for part in parts]
    new = np.zeros(len(kept), bool)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(kept))
    new[order[: min(NUM_NEW_CLASSES, len(kept) // 4)]] = True
    return Bank(
        "".join(candidates[index] for index in kept),
        names,
        np.concatenate(fields),
        label.astype("int32"),
        font.astype("int32"),
        new,
    )


def _in_enough_fonts(has, is_trained):
    trained = has[:, is_trained].sum(1) >= LEAST_TRAINED_FONTS
    return (has.sum(1) >= LEAST_FONTS) & trained


def distinct(ink, has):
    """Return indices of characters of which no two look alike in any font.

    Of those that do the first one is kept.

    Args:
        ink: `(fonts, characters, FIELD, FIELD)` bool array.
        has: `(characters, fonts)` bool array, whether a font has a character.
    """
    count = len(has)
    least = np.full((count, count), np.inf, "float32")
    for font in range(has.shape[1]):
        index = np.flatnonzero(has[:, font])
        picture = _blurred(ink[font, index])
        squared = (picture**2).sum(1)
        difference = squared[:, None] + squared - 2 * picture @ picture.T
        difference /= np.minimum(squared[:, None], squared)
        pairs = np.ix_(index, index)
        least[pairs] = np.minimum(least[pairs], difference)
    is_free, kept = np.ones(count, bool), []
    for index in range(count):
        if is_free[index]:
            kept.append(index)
            is_free &= least[index] >= _LEAST_DIFFERENCE
    return np.array(kept)


def _blurred(ink):
    """Return `(N, pixels)` coarse pictures of the box, a little blurred."""
    start = (FIELD - BOX) // 2 - 2
    box = ink[:, start:-start, start:-start].astype("float32")
    side = box.shape[1] // _COARSE
    parts = box.reshape(len(ink), _COARSE, side, _COARSE, side)
    return gaussian_filter(parts.mean((2, 4)), (0, 0.6, 0.6)).reshape(len(ink), -1)


def _is_sign(character):
    return unicodedata.category(character)[0] in _CATEGORIES and not any(
        ord(character) in codes for codes in _LEFT_OUT
    )
