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
    # Each epoch draws its own images.
    one_stream = False

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

    one_stream = True

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
        recipe = self._recipe()
        train = self._images("train").unbatch()
        return model.fit(
            recipe.training_data(train, seed=seed),
            verbose=0,
            callbacks=callbacks,
            **recipe.fit_arguments,
        )

    def accuracy(self, model):
        """Accuracy on the validation split, a float."""
        split = f"{self.validation}[:{self.scale.validation_images}]"
        right = [
            np.argmax(model.predict_on_batch(images), axis=-1) == labels
            for images, labels in self._images(split).as_numpy_iterator()
        ]
        return float(np.mean(np.concatenate(right)))

    def images(self, number):
        """Some images of the validation split, uint8 `(number, height, width, 3)`."""
        images = self._images(f"{self.validation}[:{number}]").as_numpy_iterator()
        return np.concatenate([batch for batch, _ in images])

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


class Batches(keras.utils.PyDataset):
    """Batches of images that a function gives for each epoch.

    Args:
        draw: callable from the number of an epoch to images and labels, as many in
            each.
        batch_size: int. A last, smaller batch is left out.
    """

    def __init__(self, draw, batch_size):
        super().__init__()
        self.draw = draw
        self.batch_size = batch_size
        self.start(0)

    def __len__(self):
        return len(self.labels) // self.batch_size

    def start(self, epoch):
        """Take the images of an epoch."""
        self.images, self.labels = self.draw(epoch)

    def callback(self):
        """What takes the right images at the beginning of each epoch."""
        return keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self.start(epoch)
        )

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.images[rows].astype("float32"), self.labels[rows]


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
