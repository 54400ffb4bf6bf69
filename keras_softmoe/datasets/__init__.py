"""Image data: bundled digits, synthetic glyphs, TensorFlow Datasets.

All of them give uint8 images of shape (images, height, width, 3), 0 to 255, and int32
labels. What a loader needs is imported when it is called.
"""

from keras_softmoe.datasets.digits import digits as digits
from keras_softmoe.datasets.glyph_bank import GLYPH_CLASSES as GLYPH_CLASSES
from keras_softmoe.datasets.glyphs import glyphs as glyphs
from keras_softmoe.datasets.tfds import from_tfds as from_tfds
