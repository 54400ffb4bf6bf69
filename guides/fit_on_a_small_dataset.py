"""
Title: Fit on a small dataset
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/27
Description: Train a Soft MoE on your own images, from scratch and from a preset.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Introduction

Soft MoE replaces the MLP in some blocks of a Vision Transformer by a set of experts.
Each expert works on a few *slots*, and each slot is a weighted average of all patches
of the image. Nothing is dropped and nothing needs balancing, so such a model trains
like any other Keras model. This guide does it with little data, in five steps:

1. build a model and `fit` it from scratch;
2. start from a preset instead;
3. augment the images, with Keras' own layers and with KerasCV's;
4. save the result and load it back;
5. put the `SoftMoE` layer into a Keras model of your own.

## Setup
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import keras
import numpy as np
import tensorflow as tf  # for input pipelines, under any backend

import keras_softmoe as ksm

keras.utils.set_random_seed(0)

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_CLASSES, NUM_IMAGES, EPOCHS = (4, 8, 1) if SHORT else (20, 40, 8)
BATCH_SIZE = 16 if SHORT else 32

"""
## Data

All you need are two arrays: images of shape `(N, height, width, 3)` with pixels from 0
to 255, and integer labels of shape `(N,)`. Here they are icons of 20 concepts that no
preset has seen, at most 40 of each. Those to test on are of other families of sets,
that is, in other styles. `ksm.datasets.from_tfds` reads other data sets.
"""

samples = [ksm.datasets.sample(name) for name in ("new_icons", "other_new_icons")]
# The concepts with most icons
concepts = np.argsort(-np.bincount(samples[0].labels), kind="stable")[:NUM_CLASSES]
rng = np.random.default_rng(0)


def icons_of(sample):
    """Icons of the concepts, at most `NUM_IMAGES` of each, and labels from 0 on."""
    images, labels = [], []
    for label, concept in enumerate(concepts):
        rows = rng.permutation(np.flatnonzero(sample.labels == concept))[:NUM_IMAGES]
        images.append(sample.images[rows])
        labels.append(np.full(len(rows), label))
    return np.concatenate(images), np.concatenate(labels)


(x_train, y_train), (x_test, y_test) = map(icons_of, samples)
print("train:", x_train.shape, x_train.dtype, "test:", x_test.shape)

"""
## From scratch

A classifier consists of a backbone and a preprocessor, which resizes the images and
scales their pixels. The router decides what kind of mixture it is: another one from
`ksm.routers`, or no `moe_layers` at all, and the rest stays as it is.

With 16 experts of one slot there are as many slots as patches (16), so that this model
costs about as much as a dense one of the same size.

The classifier has no softmax at its end: tell the loss that it gets logits.
"""

backbone = ksm.models.ViTMoEBackbone(
    image_shape=(32, 32, 3),
    patch_size=8,
    num_layers=2 if SHORT else 4,
    num_heads=4,
    hidden_dim=64,
    mlp_dim=128,
    moe_layers=(1,) if SHORT else (2, 3),
    router=ksm.routers.SoftRouter(num_experts=16),
    pooling="gap",
)
scratch = ksm.models.ViTMoEImageClassifier(
    backbone,
    num_classes=NUM_CLASSES,
    preprocessor=ksm.models.ViTMoEImageClassifierPreprocessor(
        ksm.models.ViTMoEImageConverter(image_size=(32, 32))
    ),
)
scratch.compile(
    optimizer=keras.optimizers.AdamW(1e-3, weight_decay=0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
scratch.fit(x_train, y_train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=2)
accuracy = scratch.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0)[1]
print(f"from scratch: accuracy {accuracy:.3f}")

"""
## From a preset, with augmented images

`from_preset` builds the architecture, loads the weights, and puts a new head on top.
This preset was trained on icons of 1,229 other concepts.

Little data wants augmentation. Keras has `RandAugment`, `MixUp` and `CutMix` as layers.
Mapped over a `tf.data.Dataset`, which works under every backend, they run on the
processor beside the training. The last two mix labels as well as images, and hence want
one-hot labels and the loss that goes with them. Augment before the preprocessor, while
pixels are from 0 to 255.

The data set shuffles by itself, anew in each epoch; `shuffle=False` tells Keras that it
need not.
"""

rand_augment = keras.layers.RandAugment(value_range=(0, 255), num_ops=1, factor=0.2)
mix_up = keras.layers.MixUp(alpha=0.2)
cut_mix = keras.layers.CutMix(factor=0.3)


def augment(images, labels):
    batch = {"images": rand_augment(images), "labels": labels}
    batch = cut_mix(mix_up(batch))
    return batch["images"], batch["labels"]


one_hot = np.eye(NUM_CLASSES, dtype="float32")
train = tf.data.Dataset.from_tensor_slices(
    (x_train.astype("float32"), one_hot[y_train])
)
train = train.shuffle(len(x_train)).batch(BATCH_SIZE)

preset = "soft_moe_tiny_patch8_16e_32_icons"
classifier = ksm.models.ViTMoEImageClassifier.from_preset(
    preset, num_classes=NUM_CLASSES
)
classifier.compile(
    optimizer=keras.optimizers.AdamW(5e-4, weight_decay=0.01),
    loss=keras.losses.CategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
augmented = train.map(augment).prefetch(2)
classifier.fit(augmented, epochs=EPOCHS, shuffle=False, verbose=2)
_, accuracy = classifier.evaluate(
    x_test, one_hot[y_test], batch_size=BATCH_SIZE, verbose=0
)
print(f"from the preset: accuracy {accuracy:.3f}")

"""
The training accuracy is measured on mixed images, and may well stay under the one on
the test images.

## Augmentation from KerasCV

KerasCV's layers work in the same place, under every backend. Development has moved on
to Keras and KerasHub, but some layers exist only there, such as `FourierMix`, which
mixes two images under a random smooth mask. Install the extra:
`pip install 'keras-softmoe[cv]'`.
"""

try:
    import keras_cv
except ImportError:
    print("KerasCV is not installed: this section is left out")
else:
    fourier_mix = keras_cv.layers.FourierMix(alpha=0.5)

    def augment_with_keras_cv(images, labels):
        batch = fourier_mix({"images": images, "labels": labels})
        return batch["images"], batch["labels"]

    mixed = train.map(augment_with_keras_cv)
    history = classifier.fit(mixed, epochs=1, shuffle=False, verbose=2).history
    print(f"one more epoch, mixed by KerasCV: loss {history['loss'][0]:.3f}")

"""
## Save and load

A preset directory holds the configuration, the weights and the preprocessing. It loads
on every backend, here or on another machine, and `keras_hub.upload_preset` can publish
it.
"""

classifier.save_to_preset("my_icons")
loaded = ksm.models.ViTMoEImageClassifier.from_preset("my_icons")
before = classifier.predict(x_test[:8], verbose=0)
after = loaded.predict(x_test[:8], verbose=0)
print(f"largest difference after loading: {np.abs(before - after).max():.1e}")

"""
## The layer in a model of your own

`SoftMoE` maps `(batch, tokens, width)` to the same shape, so it can replace the MLP of
any Transformer block. Here is a small convolutional network with one such layer behind
it. With as many slots (`num_experts` times `slots_per_expert`) as tokens it costs as
much as the MLP.
"""

inputs = keras.Input((32, 32, 3))
x = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs)
x = keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="gelu")(x)
x = keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="gelu")(x)
x = keras.layers.Reshape((64, 64))(x)
y = keras.layers.LayerNormalization()(x)
y = ksm.layers.SoftMoE(num_experts=16, slots_per_expert=4, mlp_dim=128)(y)
x = keras.layers.Add()([x, y])
x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
outputs = keras.layers.Dense(NUM_CLASSES)(x)

model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.AdamW(2e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(x_train, y_train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=2)
accuracy = model.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0)[1]
print(f"a network with SoftMoE: accuracy {accuracy:.3f}")
