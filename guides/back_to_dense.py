"""
Title: Back to a dense model
Author: keras_softmoe authors
Date created: 2026/11/25
Last modified: 2026/11/27
Description: Average the experts of a mixture, and distil the mixture into the result.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Introduction

A mixture of experts may be too large for the place where it is to run.
`to_dense_model` makes each mixture one MLP: the mean of its experts, weighted by their
load on some images. The result is a start. This guide distils the mixture into
it, in a few lines of `fit`, beside a dense model that starts from random weights.

## Setup
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import keras
import numpy as np

import keras_softmoe as ksm

keras.utils.set_random_seed(0)

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_TRAIN, NUM_TEST, EPOCHS = (32, 32, 1) if SHORT else (700, 300, 10)

images, labels, class_names, _ = ksm.datasets.sample("icons", NUM_TRAIN + NUM_TEST)
x_train, x_test = images[:NUM_TRAIN], images[NUM_TRAIN:]
y_test = labels[NUM_TRAIN:]

"""
## The mean of the experts

A preset that tells 1,229 concepts of icons apart; the images are icons in styles that
it never saw. The function prints how far the features are from those of the mixture;
the model has it as `feature_difference`.
"""

teacher = ksm.models.ViTMoEImageClassifier.from_preset("vmoe_tiny_patch8_8e_32_icons")
backbone_images = np.asarray(teacher.preprocessor(x_train[:256]))
student = ksm.converters.to_dense_model(teacher, backbone_images)
print(f"difference: {student.feature_difference:.3f}")


def accuracy(model):
    logits = model.predict(x_test, verbose=0)
    return float((logits.argmax(-1) == y_test).mean())


print(f"mixture, {len(class_names):,} concepts: accuracy {accuracy(teacher):.3f}")
print(f"mean of the experts: accuracy {accuracy(student):.3f}")

"""
## Distil

The student learns the logits of the mixture: it needs images, and no labels.
"""

new = type(student).from_config(student.get_config())
targets = teacher.predict(x_train, verbose=0)
for name, model in {"mean of the experts": student, "random weights": new}.items():
    keras.utils.set_random_seed(0)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse", metrics=[])
    model.fit(x_train, targets, batch_size=64, epochs=EPOCHS, verbose=0)
    print(f"distilled from {name}: accuracy {accuracy(model):.3f}")
