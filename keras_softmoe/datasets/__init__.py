"""Image data: bundled digits, synthetic glyphs and scenes, TensorFlow Datasets.

All of them give uint8 images of shape (images, height, width, 3), 0 to 255, and int32
labels; those called captioned give a text for each image, too. What a loader needs is
imported when it is called.
"""

from keras_softmoe.datasets._captioned_digits import (
    captioned_digits as captioned_digits,
)
from keras_softmoe.datasets._captioned_shapes import (
    captioned_shapes as captioned_shapes,
)
from keras_softmoe.datasets._digits import digits as digits
from keras_softmoe.datasets._glyph_bank import GLYPH_CLASSES as GLYPH_CLASSES
from keras_softmoe.datasets._glyphs import glyphs as glyphs
from keras_softmoe.datasets._scenes import COLOR_NAMES as COLOR_NAMES
from keras_softmoe.datasets._scenes import (
    HELD_OUT_COMBINATIONS as HELD_OUT_COMBINATIONS,
)
from keras_softmoe.datasets._scenes import SHAPE_COLOR_CLASSES as SHAPE_COLOR_CLASSES
from keras_softmoe.datasets._tfds import from_tfds as from_tfds
from keras_softmoe.datasets._vocabulary import train_vocabulary as train_vocabulary
