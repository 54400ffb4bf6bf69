"""Images that need no network, TensorFlow Datasets, and vocabularies.

Images are uint8 of shape (images, height, width, 3), 0 to 255, labels int32.
"""

from keras_softmoe.datasets.samples import (
    digits as digits,
    sample as sample,
    train_vocabulary as train_vocabulary,
)
from keras_softmoe.datasets.tfds import from_tfds as from_tfds
