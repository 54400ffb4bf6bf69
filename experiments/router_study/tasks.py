"""What the models of a study learn first: glyphs, or a data set of TFDS."""

import math

import keras
import numpy as np

import keras_softmoe as ksm
from experiments import synthetic
from experiments.lib.runs import adamw, batches_of

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
    """Letters and signs (`synthetic.glyphs`), each image seen once.

    Args:
        scale: `Scale`.
        directory: path, where the images are kept once they are drawn.
    """

    head_bias = 0.0

    def __init__(self, scale, directory):
        self.scale = scale
        self.directory = str(directory)
        self.num_classes = len(synthetic.GLYPH_CLASSES)

    def compile(self, model, learning_rate):
        """Compile a model with AdamW and a cosine schedule."""
        scale = self.scale
        compile_with_cosine(
            model, scale, scale.steps, scale.warmup_steps, learning_rate
        )

    def batches(self, seed, epoch, share=1.0):
        """Iterator over the batches that the models of a seed see in an epoch.

        Under a share of 1 the images of the first epochs come again, in other orders.
        """
        number = self.scale.steps_per_epoch * self.scale.batch_size
        first_epochs = max(round(share * self.scale.epochs), 1)
        images, labels = self._glyphs(number, seed, epoch % first_epochs * number)
        if epoch >= first_epochs:
            order = np.random.default_rng((seed, epoch)).permutation(number)
            images, labels = images[order], labels[order]
        return batches_of(images, labels, self.scale.batch_size)

    def accuracy(self, model, number=None):
        """Accuracy on images that no model is trained on, a float."""
        return accuracy(model, *self.images(number or self.scale.validation_images))

    def images(self, number):
        """The first of those images, uint8 `(number, height, width, 3)`, and labels."""
        images, labels = self._glyphs(self.scale.validation_images, VALIDATION_SEED)
        return images[:number], labels[:number]

    def _glyphs(self, number, seed, start=0):
        scale = self.scale
        return synthetic.glyphs(
            number,
            scale.image_size,
            seed,
            start,
            self.directory,
            verbose=0,
            placement=scale.placement,
            distractors=scale.distractors,
            glyph_size=scale.glyph_size,
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
        self.splits = info.splits
        self.head_bias = -math.log(self.num_classes)
        self.validation = "validation" if "validation" in info.splits else "test"

    def compile(self, model, learning_rate):
        """Compile a model with V-MoE's optimizer, schedule, loss and metric."""
        self._recipe(learning_rate).compile(model)

    def batches(self, seed, epoch, share=1.0):
        """Iterator over the batches that the models of a seed see in an epoch."""
        # An interrupted training goes on with the next epoch: it has its own order.
        (state,) = np.random.SeedSequence((seed, epoch)).generate_state(1)
        train = self._images("train").unbatch()
        if share < 1:
            train = train.take(int(share * self.splits["train"].num_examples))
        data = self._recipe().training_data(train, seed=int(state))
        return data.as_numpy_iterator()

    def accuracy(self, model, number=None):
        """Accuracy on images of the validation split, a float."""
        right = [
            np.argmax(model.predict(images, verbose=0), axis=-1) == labels
            for images, labels in self._validation(
                number or self.scale.validation_images
            )
        ]
        return float(np.mean(np.concatenate(right)))

    def images(self, number):
        """The first images of that split, uint8 `(N, height, width, 3)`, and labels."""
        batches = zip(*self._validation(number), strict=True)
        return tuple(map(np.concatenate, batches))

    def _validation(self, number):
        rows = self._images(self.validation).unbatch().take(number)
        return rows.batch(self.scale.batch_size).as_numpy_iterator()

    def _images(self, split):
        scale = self.scale
        return ksm.datasets.from_tfds(
            scale.tfds,
            split,
            scale.image_size,
            scale.batch_size,
            crop_to_aspect_ratio=True,
        )

    def _recipe(self, learning_rate=1e-3):
        scale = self.scale
        return ksm.training.recipe(
            "vmoe_pretraining",
            num_classes=self.num_classes,
            steps=scale.steps,
            peak_learning_rate=learning_rate,
            warmup_steps=scale.warmup_steps,
            weight_decay=scale.weight_decay,
            clip_norm=scale.clip_norm,
            image_size=scale.image_size,
            batch_size=scale.batch_size,
            steps_per_epoch=scale.steps_per_epoch,
        )


# === Parts ===


def compile_with_cosine(model, scale, steps, warmup_steps, learning_rate):
    """Compile a classifier with AdamW, whose rate rises and then falls to 0."""
    model.compile(
        optimizer=adamw(
            learning_rate, steps, warmup_steps, scale.weight_decay, scale.clip_norm
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=None,
    )


def accuracy(model, images, labels):
    """Share of images that a classifier puts into their class, a float."""
    logits = model.predict(images, batch_size=64, verbose=0)
    return float(np.mean(np.argmax(logits, axis=-1) == labels))
