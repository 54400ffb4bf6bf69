"""Write the samples that `keras_softmoe.datasets.sample` reads.

They are the first images of seeds that no preset was trained with. Another release of
NumPy, Pillow or matplotlib may round some grey values differently.
"""

import io
import zipfile
from functools import partial
from pathlib import Path

import numpy as np

import keras_softmoe as ksm
from experiments.letters.bank import make_bank
from experiments.letters.measures import TEST_SEED
from experiments.letters.pictures import Letters
from experiments.synthetic import (
    GLYPH_CLASSES,
    SHAPE_COLOR_CLASSES,
    captioned_shapes,
    glyphs,
)

DIRECTORY = Path(ksm.datasets.__file__).parent / "samples"
NUM_GLYPHS, NUM_LETTERS, NUM_SHAPES = 512, 512, 256
# As in `experiments.glyph_presets` and `experiments.limoe_presets`.
GLYPH_SEED, SHAPE_SEED, NEW_SHAPE_SEED = 10_000, 101, 102


def _glyphs():
    images, labels = glyphs(NUM_GLYPHS, seed=GLYPH_SEED)
    return _signs(images, labels, np.array(GLYPH_CLASSES))


def _letters():
    bank = make_bank()
    images, labels = Letters(bank, "anywhere").take(NUM_LETTERS, TEST_SEED)
    return _signs(images, labels, np.array(list(bank.characters))[~bank.new])


def _signs(images, labels, names):
    return {
        # The channels are equal.
        "images": images[..., :1],
        "labels": labels,
        "class_names": names,
        "captions": names[labels],
    }


def _scenes(seed, combinations):
    scenes = captioned_shapes(
        NUM_SHAPES, seed=seed, combinations=combinations, verbose=0
    )
    return {
        "images": scenes.images,
        "labels": scenes.labels,
        "class_names": np.array(SHAPE_COLOR_CLASSES),
        "captions": scenes.captions,
    }


# Functions that return the arrays of a sample.
SAMPLES = {
    "glyphs": _glyphs,
    # Takes half a minute.
    "letters": _letters,
    "shapes": partial(_scenes, SHAPE_SEED, "train"),
    "new_shapes": partial(_scenes, NEW_SHAPE_SEED, "held_out"),
}


def write(path, arrays):
    """Write an `.npz` that `np.load` reads, a third smaller than NumPy would."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array)
            # No date: equal arrays are equal files.
            info = zipfile.ZipInfo(f"{name}.npy")
            file.writestr(info, content.getvalue(), zipfile.ZIP_LZMA)


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for name, draw in SAMPLES.items():
        write(DIRECTORY / f"{name}.npz", draw())
