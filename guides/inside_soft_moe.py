"""
Title: Inside a Soft MoE
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/27
Description: What tokens give, what slots take, how alike slots are, and a report.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Nothing is dropped, but does everything count?

A Soft MoE drops no token and leaves no expert idle: each slot takes in a weighted
average of all tokens (the *dispatch* weights), and each token gets back a weighted
average of all slots' outputs (the *combine* weights). But an average may well consist
of one token only, and an expert may hardly be listened to. The Soft MoE paper looks
into its models for such things (section 3.6, appendices E, H and I). This guide does it
with a small one, and with models of your own: `analyze` takes any Keras model with
`SoftMoE` layers.

## Setup
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

from pathlib import Path

import keras
import numpy as np

import keras_softmoe as ksm

PRESET = "soft_moe_tiny_patch8_16e_32_icons"
NUM_IMAGES, EPOCHS = 512, 4
WIDTHS, LEARNING_RATES = (32, 128, 512), (1e-4, 1e-3, 1e-2)

# The tests run this guide with fewer and smaller models.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
if SHORT:
    NUM_IMAGES, EPOCHS = 64, 1
    WIDTHS, LEARNING_RATES = (8, 32), (1e-2,)

FIGURES = Path("build")
FIGURES.mkdir(exist_ok=True)

model = ksm.models.ViTMoEImageClassifier.from_preset(PRESET)
images, labels, class_names, _ = ksm.datasets.sample("icons", NUM_IMAGES)

"""
## One pass

`analyze` sends the images through the model once and keeps sums, so that a large data
set needs no more memory than a small one. It takes arrays, and iterables of batches,
such as a `tf.data.Dataset`. The result has the statistics of each block, of soft
routers in `routing.soft`, and draws itself; of the first four images it keeps the
routing patch by patch.
"""

routing = ksm.analysis.analyze(model, images, labels, num_pictures=4, verbose=0)
statistics = routing.soft
print(routing.figures)

"""
## Tokens

How much does a token count for all slots together? If all did alike, each would have
the mean, here 16 slots / 16 tokens = 1. In the paper's S/16 a few percent of the tokens
have twice as much and more.
"""

for block, s in statistics.items():
    print(
        f"block {block}: mean weight of a token {s.mean_token_weight:.2f}, "
        f"{100 * s.tokens_above(1.05):.1f} % of the tokens have 1.05 and more"
    )
figure = routing.plot("token_weights")
figure.savefig(FIGURES / "soft_token_weights.png")

"""
## Experts

And how much does an expert count for the outputs? Its mean combine weight says so. In
the paper's S/16 some experts count 3 to 14 times as much as others, in this small model
up to thirty times.
"""

for block, s in statistics.items():
    contribution = s.expert_contribution
    print(
        f"block {block}: expert {contribution.argmax()} counts "
        f"{contribution.max() / contribution.min():.2f} times as much as expert "
        f"{contribution.argmin()}"
    )
figure = routing.plot("contributions")
figure.savefig(FIGURES / "soft_expert_contributions.png")

"""
## How many tokens make up a slot?

The tokens are sorted by their weight in the slot, and their weights added up. A uniform
average is a straight line. The bands show how slots and images differ: between their
ends lie the central 60 %, 80 %, ... of all slots of all images.

In the first block with experts two thirds of the tokens make up nearly all of a slot.
Later slots are nearer to a uniform average, and combine weights in the end are further
from it: the later experts take in more alike, and yet fewer of them are listened to.
The paper sees the same in the last blocks of its H/14.
"""

for block, s in statistics.items():
    print(
        f"block {block}: 90 % of a slot are {s.dispatch.needed(0.9)} of "
        f"{len(s.dispatch.mean)} tokens, 90 % of a token {s.combine.needed(0.9)} of "
        f"{len(s.combine.mean)} slots"
    )
for weights in ("dispatch", "combine"):
    figure = routing.plot("concentration", weights=weights)
    figure.savefig(FIGURES / f"soft_{weights}.png")
figure = routing.plot("tokens_per_slot")
figure.savefig(FIGURES / "soft_tokens_per_slot.png")

"""
Where in the images the tokens are that a slot prefers (orange) and those that it
ignores (blue). A slot that takes in the mean of all tokens has no colour:
"""

figure = routing.plot("slots", blocks=[3])
figure.savefig(FIGURES / "soft_slots.png")

"""
## How alike are the slots?

A slot has a vector of parameters, and takes in the tokens that point in its direction.
Two slots whose vectors point the same way take in the same. This model has one slot
for each of 16 experts, and no two are alike: no cosine is much over a half. In a model
with several slots for an expert `cosine_within_experts` compares those: in the paper's
they are more alike than slots of different experts, which is why it prefers many
experts with one slot each (appendix I).
"""

for block, s in statistics.items():
    others = s.slot_cosines[~np.eye(len(s.slot_cosines), dtype=bool)]
    print(
        f"block {block}: mean cosine between experts {s.cosine_between_experts:.2f}, "
        f"largest {others.max():.2f}"
    )
figure = routing.plot("slot_correlation")
figure.savefig(FIGURES / "soft_correlation.png")

"""
## Why tokens and slots are normalized

Logits without normalization grow with the width of the model and with what the
optimizer does to the slots, until the softmax collapses: each slot takes in one token.
So we train models with and without normalization, and measure the mean of their largest
weights. First over the width, then over the learning rate. (So few steps on digits are
too few for the accuracy to tell the two apart; the peaks already grow.)
"""

x_train, y_train = ksm.datasets.digits(image_size=32, split="train")
x_test, y_test = ksm.datasets.digits(image_size=32, split="test")
if SHORT:
    x_train, y_train = x_train[:64], y_train[:64]
    x_test, y_test = x_test[:64], y_test[:64]


def trained(normalize, width=WIDTHS[1], learning_rate=1e-3):
    keras.utils.set_random_seed(0)
    backbone = ksm.models.ViTMoEBackbone(
        image_shape=(32, 32, 3),
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=width,
        mlp_dim=128,
        moe_layers=(1,),
        router=ksm.routers.SoftRouter(num_experts=16, normalize=normalize),
        pooling="gap",
    )
    classifier = ksm.models.ViTMoEImageClassifier(
        backbone,
        num_classes=10,
        preprocessor=ksm.models.ViTMoEImageClassifierPreprocessor(
            ksm.models.ViTMoEImageConverter(image_size=(32, 32))
        ),
    )
    classifier.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    classifier.fit(x_train, y_train, batch_size=32, epochs=EPOCHS, verbose=0)
    return classifier


def accuracy(classifier):
    return classifier.evaluate(x_test, y_test, batch_size=64, verbose=0)[1]


def peaks_of(setting, values):
    """Largest weights and accuracy of models that differ in one number."""
    rows = []
    for normalize in (True, False):
        print("normalized:" if normalize else "not normalized:")
        for value in values:
            classifier = trained(normalize, **{setting: value})
            (s,) = ksm.analysis.analyze(classifier, x_test, verbose=0).soft.values()
            scores = {
                "largest dispatch weight": s.dispatch_peak,
                "largest combine weight": s.combine_peak,
                "accuracy on digits": accuracy(classifier),
            }
            rows.append(({setting: value, "normalize": normalize}, scores))
            measured = ", ".join(f"{name} {x:.3f}" for name, x in scores.items())
            print(f"  {setting} {value:g}: {measured}")
    return ksm.evaluation.Sweep(rows)


for setting, values in (("width", WIDTHS), ("learning_rate", LEARNING_RATES)):
    sweep = peaks_of(setting, values)
    figure = sweep.plot(setting, list(sweep.rows[0].scores), by="normalize")
    figure.savefig(FIGURES / f"soft_peaks_by_{setting}.png")

"""
## A model of your own

Nothing of this needs our models. Blocks are then called by the names of their layers.
"""

inputs = keras.Input((16, 24))
x = keras.layers.Dense(32)(inputs)
x = x + ksm.layers.SoftMoE(num_experts=8, mlp_dim=64, name="first_moe")(x)
x = x + ksm.layers.SoftMoE(num_experts=4, mlp_dim=64, name="second_moe")(x)
own = keras.Model(inputs, x)
data = np.random.default_rng(0).normal(size=(128, 16, 24)).astype("float32")
for name, s in ksm.analysis.analyze(own, data, verbose=0).soft.items():
    print(f"{name}: experts {np.round(s.expert_contribution, 3)}")

"""
## All of it on one page

`save` writes every figure that applies to a model on one HTML page, which needs no
network and can be sent around. It takes models with any router; of a LIMoE it shows
images and text apart.
"""

path = routing.save(FIGURES / "soft_report.html", class_names=class_names)
print(f"report: {path}, {path.stat().st_size / 1e6:.1f} MB")
