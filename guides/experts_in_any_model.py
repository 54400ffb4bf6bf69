"""
Title: Experts in any model
Author: keras_softmoe authors
Date created: 2026/11/25
Last modified: 2026/11/25
Description: Experts in a Vision Transformer of KerasHub: fine-tune, save and load it.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Introduction

`add_experts` puts mixtures of experts into a model of another library: those that
KerasHub loads with pretrained weights, or one of your own. Each expert begins as a copy
of the MLP it replaces, so the model computes the same at first. This guide

1. trains a small Vision Transformer of KerasHub, in place of a pretrained one;
2. gives two of its blocks experts, in three lines;
3. fine-tunes it with a task of KerasHub, beside the dense model;
4. changes its routing, looks at it, saves it and loads it;
5. does the same to a model that the library does not know.

With a network, the first step is `keras_hub.models.ViTBackbone.from_preset(...)`.

## Setup
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import keras
import keras_hub
import numpy as np

import keras_softmoe as ksm

keras.utils.set_random_seed(0)

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
NUM_TRAIN, NUM_TEST, EPOCHS = (32, 32, 1) if SHORT else (901, 896, 3)

x_train, y_train = ksm.datasets.digits(image_size=32, split="train")
x_test, y_test = ksm.datasets.digits(image_size=32, split="test")
x_train, y_train = x_train[:NUM_TRAIN] / 127.5 - 1, y_train[:NUM_TRAIN]
x_test, y_test = x_test[:NUM_TEST] / 127.5 - 1, y_test[:NUM_TEST]

"""
## A dense model

A classifier of KerasHub on a backbone of KerasHub. It learns digits for a few epochs.
"""

backbone = keras_hub.models.ViTBackbone(
    image_shape=(32, 32, 3),
    patch_size=8,
    num_layers=4,
    num_heads=4,
    hidden_dim=32,
    mlp_dim=64,
)


def classifier(of):
    return keras_hub.models.ViTImageClassifier(backbone=of, num_classes=10)


def train(model):
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    # KerasHub makes a dataset of the arrays.
    model.fit(x_train, y_train, batch_size=32, epochs=EPOCHS, shuffle=False, verbose=0)
    return model.evaluate(x_test, y_test, verbose=0)[1]


dense = classifier(backbone)
print(f"dense, first training: accuracy {train(dense):.3f}")

"""
## Experts

Three lines. Blocks are counted from 0. With room for all choices and gates that sum to
one, the outputs are those of the dense model; the model that is passed in stays as it
is.
"""

router = ksm.routers.SoftmaxTokenChoiceRouter(
    num_experts=4, num_selected_experts=1, capacity_factor=None, normalize_gates=True
)
sparse = ksm.converters.add_experts(dense, blocks=(1, 3), router=router)

before = dense.predict(x_test[:8], verbose=0)
after = sparse.predict(x_test[:8], verbose=0)
print(f"largest difference of a logit: {np.abs(after - before).max():.1e}")
for name, model in {"dense": dense, "sparse": sparse}.items():
    print(f"{name}: {ksm.evaluation.cost(model)}")

"""
## Fine-tune

Both go on training for as long. A task was passed in, so a task comes back; a backbone
with experts can also become that of a new task, `classifier(sparse.backbone)`.
"""

for name, model in {"dense": dense, "sparse": sparse}.items():
    print(f"{name}, second training: accuracy {train(model):.3f}")

"""
Digits are easy and few: do not expect one to beat the other here.

## Routing

The backbone has the routers, and what is said elsewhere about models of this library
holds: `set_routing`, `routers.record`, `analysis`, `evaluation`, LoRA and int8.
"""

model = sparse.backbone
routing = ksm.analysis.analyze(model, x_test[:64], verbose=0)
for block, found in routing.blocks.items():
    print(f"block {block}: largest load over the mean {found.imbalance:.2f}")
model.set_routing(capacity_factor=1.0)
tokens = model.predict(x_test[:8], verbose=0)
print(f"tokens of 8 images: {tokens.shape}")
model.set_routing(capacity_factor=None)

"""
## Save and load

As any model of KerasHub. Import `keras_softmoe.models` (or call anything in it) before
you load one.
"""

folder = Path(tempfile.mkdtemp())
model.save_to_preset(str(folder / "vit_with_experts"))
restored = keras_hub.models.Backbone.from_preset(str(folder / "vit_with_experts"))
model.save(folder / "vit_with_experts.keras")
again = keras.saving.load_model(folder / "vit_with_experts.keras")
expected = model.predict(x_test[:8], verbose=0)
for name, other in {"preset": restored, ".keras": again}.items():
    change = np.abs(other.predict(x_test[:8], verbose=0) - expected).max()
    print(f"{name}: largest difference {change:.1e}")

"""
## A model of your own

For a model of an unknown family say where its MLPs are: by their names, by their paths,
or with a predicate. Here the parts of an MLP follow each other in the graph, which a
tuple says.
"""

inputs = keras.Input((16, 32))
x = keras.layers.LayerNormalization()(inputs)
x = keras.layers.Dense(64, activation="relu", name="up")(x)
x = keras.layers.Dense(32, name="down")(x)
own = keras.Model(inputs, keras.layers.Add()([inputs, x]), name="own")

with_experts = ksm.converters.add_experts(
    own, blocks=(0,), router=router, sites=[("up", "down")]
)
tokens = np.random.default_rng(0).normal(size=(2, 16, 32)).astype("float32")
outputs = [model.predict(tokens, verbose=0) for model in (own, with_experts)]
print(f"own model: largest difference {np.abs(outputs[1] - outputs[0]).max():.1e}")
