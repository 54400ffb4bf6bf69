"""What the models of a study learn first: glyphs, or a data set of TFDS."""

import math

import keras
import numpy as np

from keras_softmoe.datasets.glyph_bank import GLYPH_CLASSES
from keras_softmoe.datasets.glyphs import glyphs
from keras_softmoe.datasets.tfds import from_tfds
from keras_softmoe.training.pretraining_recipes import vmoe_pretraining

# No model is trained on the images of this seed.
VALIDATION_SEED = 10_000


def upstream_task(scale, directory):
    """The task of a scale.

    Args:
        scale: `Scale`.
        directory: path, where images may be kept.

    Returns:
        `GlyphTask` or `TfdsTask`.
    """
    return TfdsTask(scale) if scale.tfds else GlyphTask(scale, directory)


class GlyphTask:
    """Letters and signs (`datasets.glyphs`), each image seen once.

    Args:
        scale: `Scale`.
        directory: path, where the images are kept once they are drawn.
    """

    num_classes = len(GLYPH_CLASSES)
    head_bias = 0.0

    def __init__(self, scale, directory):
        self.scale = scale
        self.directory = str(directory)

    def compile(self, model, learning_rate):
        """Compile a model with AdamW and a cosine schedule."""
        scale = self.scale
        compile_with_cosine(
            model, scale, scale.steps, scale.warmup_steps, learning_rate
        )

    def fit(self, model, seed, callbacks):
        """Train a model on the images of a seed; returns Keras' `History`."""

        def images(epoch):
            number = self.scale.steps_per_epoch * self.scale.batch_size
            return self._glyphs(number, seed, epoch * number)

        batches = Batches(images, self.scale.batch_size)
        return model.fit(
            batches,
            epochs=self.scale.epochs,
            shuffle=False,
            verbose=0,
            callbacks=[batches.callback(), *callbacks],
        )

    def accuracy(self, model):
        """Accuracy on images that no model is trained on, a float."""
        images, labels = self._glyphs(self.scale.validation_images, VALIDATION_SEED)
        return accuracy(model, images, labels)

    def images(self, number):
        """Some of those images, uint8 `(number, height, width, 3)`."""
        return self._glyphs(self.scale.validation_images, VALIDATION_SEED)[0][:number]

    def _glyphs(self, number, seed, start=0):
        return glyphs(
            number, self.scale.image_size, seed, start, self.directory, verbose=0
        )


class TfdsTask:
    """A data set of TensorFlow Datasets, learned with the recipe of V-MoE.

    Its splits are `"train"` and `"validation"`, or `"test"` if there is none of that
    name.

    Args:
        scale: `Scale` with `tfds`.
    """

    def __init__(self, scale):
        import tensorflow_datasets as tfds

        self.scale = scale
        builder = tfds.builder(scale.tfds)
        # What is not prepared does not know its splits.
        builder.download_and_prepare()
        info = builder.info
        self.num_classes = info.features[info.supervised_keys[1]].num_classes
        self.head_bias = -math.log(self.num_classes)
        self.validation = "validation" if "validation" in info.splits else "test"

    def compile(self, model, learning_rate):
        """Compile a model with V-MoE's optimizer, schedule, loss and metric."""
        self._recipe(learning_rate).compile(model)

    def fit(self, model, seed, callbacks):
        """Train a model with the order of a seed; returns Keras' `History`."""
        recipe, train = self._recipe(), self._images("train").unbatch()

        def stream(epoch):
            # An interrupted training goes on with the next epoch: it has its own order.
            (state,) = np.random.SeedSequence((seed, epoch)).generate_state(1)
            return recipe.training_data(train, seed=int(state)).as_numpy_iterator()

        batches = Stream(stream, self.scale.steps_per_epoch)
        return model.fit(
            batches,
            epochs=self.scale.epochs,
            shuffle=False,
            verbose=0,
            callbacks=[batches.callback(), *callbacks],
        )

    def accuracy(self, model):
        """Accuracy on the validation split, a float."""
        right = [
            np.argmax(model.predict_on_batch(images), axis=-1) == labels
            for images, labels in self._validation(self.scale.validation_images)
        ]
        return float(np.mean(np.concatenate(right)))

    def images(self, number):
        """Some images of the validation split, uint8 `(number, height, width, 3)`."""
        return np.concatenate([images for images, _ in self._validation(number)])

    def _validation(self, number):
        rows = self._images(self.validation).unbatch().take(number)
        return rows.batch(self.scale.batch_size).as_numpy_iterator()

    def _images(self, split):
        scale = self.scale
        return from_tfds(
            scale.tfds,
            split,
            scale.image_size,
            scale.batch_size,
            crop_to_aspect_ratio=True,
        )

    def _recipe(self, learning_rate=None):
        scale = self.scale
        return vmoe_pretraining(
            self.num_classes,
            scale.steps,
            peak_learning_rate=learning_rate or scale.learning_rate,
            warmup_steps=scale.warmup_steps,
            weight_decay=scale.weight_decay,
            clip_norm=scale.clip_norm,
            image_size=scale.image_size,
            batch_size=scale.batch_size,
            steps_per_epoch=scale.steps_per_epoch,
        )


# === Parts ===


class Epochs(keras.utils.PyDataset):
    """Data that are others in each epoch: those that a function gives for it.

    Args:
        draw: callable from the number of an epoch to its data.
    """

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.start(0)

    def start(self, epoch):
        """Take the data of an epoch."""
        self.data = self.draw(epoch)

    def callback(self):
        """What takes the right data at the beginning of each epoch."""
        return keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self.start(epoch)
        )


class Batches(Epochs):
    """Batches of arrays: images and labels, as many in each epoch.

    Args:
        draw: callable from the number of an epoch to images and labels.
        batch_size: int. A last, smaller batch is left out.
    """

    def __init__(self, draw, batch_size):
        self.batch_size = batch_size
        super().__init__(draw)

    def __len__(self):
        return len(self.data[1]) // self.batch_size

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        images, labels = (array[rows] for array in self.data)
        return images.astype("float32"), labels


class Stream(Epochs):
    """The first batches of an iterator, one after the other.

    Args:
        draw: callable from the number of an epoch to an iterator.
        length: int, batches of an epoch.
    """

    def __init__(self, draw, length):
        self.length = length
        super().__init__(draw)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return next(self.data)


def compile_with_cosine(model, scale, steps, warmup_steps, learning_rate):
    """Compile a classifier with AdamW, whose rate rises and then falls to 0."""
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        decay_steps=max(steps - warmup_steps, 1),
        warmup_target=learning_rate,
        warmup_steps=warmup_steps,
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(
            schedule, weight_decay=scale.weight_decay, global_clipnorm=scale.clip_norm
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def accuracy(model, images, labels):
    """Share of images that a classifier puts into their class, a float."""
    logits = model.predict(images, batch_size=64, verbose=0)
    return float(np.mean(np.argmax(logits, axis=-1) == labels))
