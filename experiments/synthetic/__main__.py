"""Write the samples that `keras_softmoe.datasets.sample` reads.

They are the first images of seeds that no preset was trained with. Another release of
NumPy, Pillow or matplotlib may round some grey values differently.
"""

import io
import zipfile
from pathlib import Path

import numpy as np

import keras_softmoe as ksm
from experiments.synthetic import (
    GLYPH_CLASSES,
    SHAPE_COLOR_CLASSES,
    captioned_shapes,
    glyphs,
)

DIRECTORY = Path(ksm.datasets.__file__).parent / "samples"
NUM_GLYPHS, NUM_SHAPES = 512, 256
# As in `experiments.glyph_presets` and `experiments.limoe_presets`.
GLYPH_SEED, SHAPE_SEED, NEW_SHAPE_SEED = 10_000, 101, 102


def samples():
    """Dict from names of the samples to their arrays."""
    images, labels = glyphs(NUM_GLYPHS, seed=GLYPH_SEED, verbose=0)
    names = np.array(GLYPH_CLASSES)
    return {
        "glyphs": {
            # The channels are equal.
            "images": images[..., :1],
            "labels": labels,
            "class_names": names,
            "captions": names[labels],
        },
        "shapes": _scenes(SHAPE_SEED, "train"),
        "new_shapes": _scenes(NEW_SHAPE_SEED, "held_out"),
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
    for name, arrays in samples().items():
        write(DIRECTORY / f"{name}.npz", arrays)
