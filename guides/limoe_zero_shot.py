"""
Title: Zero-shot classification and retrieval with LIMoE
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: One sparse tower for images and captions: classes by name, retrieval.
Accelerator: None
"""

# ruff: noqa: E402

"""
## One tower for both

A contrastive model learns which image and which caption belong together. LIMoE does it
with *one* Transformer: patches of images and pieces of text pass through the same
blocks. They never attend to each other, but in every second block the tokens of both
are routed together, to experts that they share.

Such a model can be asked for classes that it was never given labels for: their names
are enough. This guide does so with a small LIMoE that ships with the library, finds
captions for images, takes apart what training consists of, and goes on training.

## Setup
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import keras
import numpy as np

import keras_softmoe as ksm

PRESET = "limoe_tiny_patch8_8e_32_icons"
NUM_SCENES, EPOCHS = 256, 8

# The tests run this guide with fewer scenes.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
if SHORT:
    NUM_SCENES, EPOCHS = 64, 1

keras.utils.set_random_seed(0)

"""
## Data

The sample `"shapes"` has synthetic scenes and captions: shape, colour, size, place,
number, and how two things lie to each other. A caption mentions some of it.

A quarter of all combinations of shape and colour is *held out*: it appears in no
training scene and in no training caption. The preset has seen circles, and it has seen
orange things, but "orange circle" is held out: it has never met one, nor the words
together. The sample `"new_shapes"` has nothing but such combinations.
"""

scenes = ksm.datasets.sample("icons", NUM_SCENES)
new = ksm.datasets.sample("new_icons", NUM_SCENES)
for caption in scenes.captions[:5]:
    print(caption)
held_out = np.unique(new.labels)
print("held out:", ", ".join(new.class_names[i] for i in held_out[:6]), "...")

"""
## Zero-shot classification

The preset brings its tokenizer along. Every class name is put into every template, the
embeddings of the texts are averaged, and an image goes to the class that is nearest.
"""

model = ksm.models.LIMoEContrastive.from_preset(PRESET)
names = new.class_names
templates = ("a {}", "a picture of a {}", "there is a {}")

scores = model.zero_shot(new.images, names, templates)
for label, row in zip(new.labels[:5], scores[:5], strict=True):
    print(f"{names[label]:>16} was called {names[row.argmax()]}")

"""
`evaluation.zero_shot` also counts what is right. Of 64 names, chance finds one in 64;
among the held-out ones alone, one in 16.
"""

found = ksm.evaluation.zero_shot(model, new.images, names, templates, new.labels)
among = held_out[found.scores[:, held_out].argmax(-1)]
print(f"new combinations, of 64 names: {found.accuracy:.3f} (chance {1 / 64:.3f})")
print(f"of the 16 new names: {np.mean(among == new.labels):.3f} (chance {1 / 16:.3f})")

"""
## Retrieval

Which caption of all belongs to an image, and which image to a caption? Images and
captions are encoded on their own here. Experts that serve mostly one modality are then
partly idle and the others crowded, so the router gives them more room: a capacity
factor of 16, as in the paper, `single_modality_capacity_factor`.

Many captions fit several scenes ("a red star"), so not even a perfect model would
always find the one that was drawn for it.
"""

recall = ksm.evaluation.retrieval(
    model.encode_image(scenes.images), model.encode_text(scenes.captions)
)
for direction, values in recall._asdict().items():
    text = ", ".join(f"recall@{k} {value:.3f}" for k, value in values.items())
    print(f"{direction}: {text} (chance at 1: {1 / NUM_SCENES:.3f})")

"""
## What `fit` minimizes

For a batch of pairs the model computes all similarities, scaled by a learned
temperature: every image has to find its caption and every caption its image. To that
come losses that keep the routers from giving text, which has fewer tokens than images,
one expert or none, as happened in the paper. They are set in the router:
"""

router = ksm.routers.LIMoERouter(
    num_experts=8,
    losses=(
        *ksm.routers.classic_losses(),  # importance, load, z-loss
        # Each text token sure of its expert, text as a whole on three or more
        ksm.routers.RoutingLoss(ksm.ops.local_entropy_loss, "text"),
        ksm.routers.RoutingLoss(ksm.ops.global_entropy_loss, "text", soft_minimum=3),
        ksm.routers.RoutingLoss(ksm.ops.global_entropy_loss, "image", soft_minimum=5),
    ),
    loss_weight=0.04,
)

"""
## Your own LIMoE

A vocabulary, a tokenizer, a preprocessor, a backbone, and the task on top. `fit` takes
images from 0 to 255 and captions as they are.
"""

proto = ksm.datasets.train_vocabulary(scenes.captions, vocabulary_size=400)
tokenizer = ksm.models.LIMoETokenizer(proto)
backbone = ksm.models.LIMoEBackbone(
    image_shape=(32, 32, 3),
    patch_size=8,
    vocabulary_size=tokenizer.vocabulary_size(),
    sequence_length=16,
    num_layers=2,
    num_heads=4,
    hidden_dim=64,
    mlp_dim=128,
    moe_layers=ksm.models.moe_blocks(2, every=2),
    router=router,
    embedding_dim=64,
)
own = ksm.models.LIMoEContrastive(
    backbone,
    ksm.models.LIMoEPreprocessor(
        tokenizer, ksm.models.ViTMoEImageConverter(image_size=(32, 32))
    ),
)
own.compile(keras.optimizers.AdamW(2e-3))
own.fit(scenes.images, scenes.captions, batch_size=64, epochs=EPOCHS, verbose=2)

"""
A few steps are no training; the preset took half a million pairs. Saving puts weights,
configuration and vocabulary into one directory, from which everything comes back:
"""

own.save_to_preset("my_limoe")
again = ksm.models.LIMoEContrastive.from_preset("my_limoe")
difference = np.abs(
    again.encode_text(scenes.captions) - own.encode_text(scenes.captions)
).max()
print(f"largest difference of an embedding after loading: {difference:.1e}")
