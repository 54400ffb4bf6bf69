"""Generators of the pictures that the presets were trained on.

`glyphs` draws letters and signs, `captioned_shapes` scenes of colored shapes with
captions: uint8 images of shape (images, height, width, 3), 0 to 255, and int32 labels.
`python -m experiments.synthetic` writes the samples in `keras_softmoe.datasets`.
"""

from experiments.synthetic._glyph_bank import GLYPH_CLASSES as GLYPH_CLASSES
from experiments.synthetic._glyphs import glyphs as glyphs
from keras_softmoe.datasets.captioned import (
    captioned_shapes as captioned_shapes,
)
from keras_softmoe.datasets.scenes import (
    COLOR_NAMES as COLOR_NAMES,
    HELD_OUT_COMBINATIONS as HELD_OUT_COMBINATIONS,
    SHAPE_COLOR_CLASSES as SHAPE_COLOR_CLASSES,
)
