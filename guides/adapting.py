"""
Title: Adapting a pretrained mixture of experts
Author: keras_softmoe authors
Date created: 2026/11/27
Last modified: 2026/11/27
Description: A frozen probe, LoRA for each expert, full fine-tuning, and fewer bits.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Introduction

A preset has learned from one kind of images, and you have a few of another. How much
of the model has to change? This guide asks it of a small Soft MoE that was trained on
icons of 1,229 concepts, with five icons of each of 129 other concepts:

1. **a frozen probe**: the model stays as it is, a linear classifier learns;
2. **LoRA**: the kernels stay as they are, and small factors beside them learn;
3. **full fine-tuning**: everything learns;
4. **int8**: what is left of the result in a quarter of the bytes.

## Setup
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import time
import warnings

import keras
import numpy as np

import keras_softmoe as ksm

keras.utils.set_random_seed(0)
PRESET = "soft_moe_tiny_patch8_16e_32_icons"

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
SHOTS, NUM_TEST, EPOCHS = (1, 32, 1) if SHORT else (5, 1949, 10)
BATCH_SIZE = 32

"""
## Data

Five icons of each concept, drawn at random. The test has icons of the same concepts
from other sets, in other styles.
"""

x, y, concepts, _ = ksm.datasets.sample("new_icons")
rng = np.random.default_rng(0)
chosen = [
    rng.choice(np.flatnonzero(y == label), SHOTS, replace=False)
    for label in range(len(concepts))
]
chosen = np.concatenate(chosen)
train = x[chosen], y[chosen]
test = ksm.datasets.sample("other_new_icons", NUM_TEST)[:2]
print("train:", train[0].shape, "test:", test[0].shape, "concepts:", len(concepts))

rows = []


def report(name, accuracy, trained, start):
    """Keep a row of the table: accuracy, what was trained, and for how long."""
    rows.append((name, accuracy, trained, time.perf_counter() - start))
    print(f"{name}: accuracy {accuracy:.3f}")


def accuracy(model):
    """The share of the test images whose class a model finds."""
    logits = model.predict(test[0], verbose=0)
    return float(np.mean(logits.argmax(-1) == test[1]))


def num_trained(model):
    """The number of parameters that `fit` changes."""
    return sum(int(np.prod(w.shape)) for w in model.trainable_weights)


"""
## A frozen probe

`few_shot_probe` computes the features of all images once and solves a ridge regression.
It cannot overfit the backbone, needs no learning rate, and takes seconds: the number to
beat.
"""

start = time.perf_counter()
model = ksm.models.ViTMoEImageClassifier.from_preset(PRESET, num_classes=len(concepts))
probe = ksm.evaluation.few_shot_probe(
    model, train, test, shots=(SHOTS,), seeds=1, l2=1.0, verbose=0
)
width = model.backbone.hidden_dim
size = len(concepts) * (width + 1)
report("frozen probe", float(probe[SHOTS].accuracies[0]), size, start)

"""
## LoRA

`enable_lora(rank)` freezes the backbone and gives the kernels of attention, MLPs and
experts two factors each: `kernel + A @ B`, where `A` has `rank` columns and `B`, which
starts at zero, as many rows. In Keras' own layers the experts of a bank would share
`B`. Here each expert has both for itself:
"""

model.backbone.enable_lora(rank=4)
bank = model.backbone.blocks[-1].moe.experts.intermediate_dense
print("kernel:", tuple(bank.kernel.shape))
print("A:", tuple(bank.lora_kernel_a.shape), "B:", tuple(bank.lora_kernel_b.shape))

"""
Few parameters that start at nothing take a larger learning rate than whole kernels. The
head of the classifier is new, and learns along.
"""

start = time.perf_counter()
model.compile(keras.optimizers.AdamW(3e-3))
model.fit(*train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0)
report("LoRA, rank 4", accuracy(model), num_trained(model), start)

"""
Files hold the sum of kernel and factors, so whoever loads one need not know of LoRA.
`save_lora_weights` writes the factors alone, and `merge_lora` folds them into the
kernels of the model at hand, which is an ordinary one then.
"""

before = model.predict(test[0], verbose=0)
merged = ksm.models.merge_lora(model)
difference = np.abs(model.predict(test[0], verbose=0) - before).max()
print(f"largest difference after merging {len(merged)} layers: {difference:.1e}")
adapted = model

"""
## Full fine-tuning

All parameters learn, with a smaller learning rate, and an optimizer that keeps two more
numbers for each of them.
"""

start = time.perf_counter()
model = ksm.models.ViTMoEImageClassifier.from_preset(PRESET, num_classes=len(concepts))
model.compile(keras.optimizers.AdamW(5e-4))
model.fit(*train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0)
report("full fine-tuning", accuracy(model), num_trained(model), start)

"""
## Fewer bits

`quantize` rounds what was learned; nothing is trained. In `"int8"` inputs are rounded
as well, and the whole model is. Each expert has scales of its own. int4, GPTQ and AWQ
are refused for expert banks, before anything is changed: Keras would round or calibrate
the experts of a bank together.

Merge before you quantize: a small change may be less than half a step of int8.
"""


def num_bytes(model):
    """The bytes of the weights of a model."""
    return sum(
        int(np.prod(w.shape)) * np.dtype(w.dtype).itemsize for w in model.weights
    )


sizes = {"float32": num_bytes(adapted)}
path = os.path.join("build", "adapted")
adapted.save_to_preset(path)
start = time.perf_counter()
model = ksm.models.ViTMoEImageClassifier.from_preset(path)
with warnings.catch_warnings(action="ignore"):
    # Of the layers that have nothing to quantize
    model.quantize("int8")
report("LoRA, then int8", accuracy(model), 0, start)
sizes["int8"] = num_bytes(model)
for mode, size in sizes.items():
    print(f"weights in {mode}: {size / 1e6:.2f} MB")

"""
## Side by side

With five images of each class the frozen probe is hard to beat by much: it has little
that could overfit, and it is ready in a tenth of the time. LoRA trains a seventeenth of
what full fine-tuning does, and int8 costs nearly nothing. It is one seed each, so do
not read an order of the three into their accuracies. The further the new images are
from the old ones, the more has to change: run it with your own.
"""

print(f"{'':20} accuracy   trained  seconds")
for name, value, trained, seconds in rows:
    print(f"{name:20} {value:8.3f} {trained:9,} {seconds:8.1f}")
