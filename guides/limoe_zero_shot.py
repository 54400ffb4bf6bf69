"""
Title: Zero-shot classification and retrieval with LIMoE
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/27
Description: One sparse tower for icons and words: icons by word, names of icons.
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
are enough. This guide does so with a small LIMoE that ships with the library and was
trained on icons and the names that their authors gave them. It finds icons by words and
words for icons, also for concepts that the model never met. Then it takes apart what
training consists of, and trains a LIMoE of its own.

## Setup
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure

import keras_softmoe as ksm

PRESETS = {
    "LIMoE": "limoe_tiny_patch8_8e_32_icons",
    "dense": "limoe_dense_tiny_patch8_32_icons",
}
NUM_ICONS, NUM_NEW, NUM_PAIRS, EPOCHS = 1_000, 1_949, 3_007, 5
FIGURES = Path("build")
FIGURES.mkdir(exist_ok=True)

# The tests run this guide with fewer icons.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
if SHORT:
    NUM_ICONS, NUM_NEW, NUM_PAIRS, EPOCHS = 64, 64, 64, 1

keras.utils.set_random_seed(0)

"""
## Data

The sample `"icons"` has 1,000 icons of concepts that the presets learned, drawn in
styles that they never saw. Each belongs to one of 1,229 concepts, which are called by
their most frequent names. Most concepts have one or two icons among the 1,000.
"""

icons = ksm.datasets.sample("icons", NUM_ICONS)
concepts, index, counts = np.unique(
    icons.labels, return_inverse=True, return_counts=True
)
names = icons.class_names
words = [names[concept] for concept in concepts]
print(f"{len(icons.images):,} icons of {len(concepts)} concepts")
print("names:", ", ".join(words[:8]), "...")

"""
## Icons by word

Icons and words are encoded on their own. Experts that serve mostly one modality are
then partly idle and the others crowded, so the router gives them more room: a capacity
factor of 16, as in the paper, `single_modality_capacity_factor`.

`evaluation.retrieval` counts in both directions. It lets an image have several
captions; here a *word* has several icons, so words stand in the place of images. The
first direction is then: of how many words is an icon of the concept in first place, or
among the first ten? Its chance is that of icons in random order. The second direction
is: of how many icons is the right word the nearest of all?
"""

models = {
    name: ksm.models.LIMoEContrastive.from_preset(preset)
    for name, preset in PRESETS.items()
}


def chance(places):
    """Mean probability that one of the icons of a word is in random places."""
    left = len(icons.images) - np.arange(places)
    missed = np.clip(left - counts[:, None], 0, None) / left
    return np.mean(1 - missed.prod(axis=1))


print("                      word finds icon      icon finds word")
print("                      in 1     in 10       in 1     in 10")
for name, model in models.items():
    embeddings = model.encode_text(words), model.encode_image(icons.images)
    found = ksm.evaluation.retrieval(*embeddings, index, ks=(1, 10))
    cells = [found.image_to_text[k] for k in (1, 10)]
    cells += [found.text_to_image[k] for k in (1, 10)]
    print("{:<20}  {:.3f}    {:.3f}       {:.3f}    {:.3f}".format(name, *cells))
cells = [chance(1), chance(10), 1 / len(words), 10 / len(words)]
print("{:<20}  {:.3f}    {:.3f}       {:.3f}    {:.3f}".format("chance", *cells))

"""
The dense twin has the same width, depth, data and training, and an MLP in the place of
the experts. Either was trained once, and another seed may move a figure by more than
the two differ: they say what the presets do, not which architecture is better.

## Names of icons

`zero_shot` does the last of these with the names of all 1,229 concepts. Every name is
put into every template, the embeddings of the texts are averaged, and an image goes to
the class that is nearest; `evaluation.zero_shot` also counts what is right. Models that
learned from sentences want a sentence around the name. This one read bare names only:
"""

model = models["LIMoE"]
for templates in (("{}",), ("a {}", "a picture of a {}", "an icon of a {}")):
    found = ksm.evaluation.zero_shot(
        model, icons.images, names, templates, icons.labels
    )
    print(f"{found.accuracy:.3f} of {len(names):,} names, templates {templates}")

scores = model.zero_shot(icons.images[:12], names, ("{}",))
figure = Figure(figsize=(7.5, 3.2), layout="constrained")
axes = figure.subplots(2, 6).flat
for ax, image, label, row in zip(
    axes, icons.images, icons.labels, scores, strict=False
):
    ax.imshow(image)
    ax.set(xticks=[], yticks=[])
    called = row.argmax()
    ax.set_title(names[called], fontsize=9)
    ax.spines[:].set(visible=bool(called == label), color="tab:green", linewidth=3)
figure.savefig(FIGURES / "limoe_names.png", dpi=120)

"""
Icons that the model called by their right name are framed. Some of the others are near:
a hammer is called a gavel, and people are a user group. Only one name counts.

## Concepts that it never met

The samples `"new_icons"` and `"other_new_icons"` show 129 concepts without an icon in
any training. A name of two words may still say something, if the model knows the words
from other names: it has seen folders and hearts, but no "folder heart".
"""

new = ksm.datasets.sample("other_new_icons")
chosen = np.random.default_rng(0).permutation(len(new.images))[:NUM_NEW]
images, labels = new.images[chosen], new.labels[chosen]
found = ksm.evaluation.zero_shot(model, images, new.class_names, ("{}",), labels)
size = len(new.class_names)
print(f"of {size} names of new concepts: {found.accuracy:.3f} (chance {1 / size:.3f})")

known = {word for name in names for word in name.split()}
is_known = np.array([known.issuperset(name.split()) for name in new.class_names])
for kind, chosen in (("all", is_known), ("not all", ~is_known)):
    right = (found.predictions == labels)[chosen[labels]]
    examples = ", ".join(np.array(new.class_names)[chosen][:5])
    print(f"{kind} words known from other names ({examples}, ...): {right.mean():.3f}")

"""
## What `fit` minimizes

For a batch of pairs the model computes all similarities, scaled by a learned
temperature: every image has to find its caption and every caption its image. To that
come losses that keep the routers from giving text, which has fewer tokens than images,
one expert or none, as happened in the paper. They are set in the router, here as in the
preset:
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
images from 0 to 255 and captions as they are: here the 3,007 icons of `"new_icons"`,
with the names that their authors gave them.
"""

pairs = ksm.datasets.sample("new_icons")
# In the order of their sets: a part of them is taken at random.
chosen = np.random.default_rng(0).permutation(len(pairs.images))[:NUM_PAIRS]
pictures, captions = pairs.images[chosen], pairs.captions[chosen]
proto = ksm.datasets.train_vocabulary(pairs.captions, vocabulary_size=400)
tokenizer = ksm.models.LIMoETokenizer(proto)
backbone = ksm.models.LIMoEBackbone(
    image_shape=(32, 32, 3),
    patch_size=8,
    vocabulary_size=tokenizer.vocabulary_size(),
    sequence_length=12,
    num_layers=2,
    num_heads=4,
    hidden_dim=64,
    mlp_dim=128,
    moe_layers=ksm.models.moe_blocks(2, every=2),
    router=router,
    # Pairs that share the slots of the experts
    group_images=32,
    embedding_dim=64,
)
own = ksm.models.LIMoEContrastive(
    backbone,
    ksm.models.LIMoEPreprocessor(
        tokenizer,
        ksm.models.ViTMoEImageConverter(image_size=(32, 32)),
        sequence_length=12,
    ),
)
own.compile(keras.optimizers.AdamW(2e-3))
own.fit(pictures, captions, batch_size=64, epochs=EPOCHS, verbose=2)

"""
A few steps are no training; the preset saw 47,697 icons ten times. Saving puts weights,
configuration and vocabulary into one directory, from which everything comes back:
"""

own.save_to_preset("my_limoe")
again = ksm.models.LIMoEContrastive.from_preset("my_limoe")
difference = np.abs(again.encode_text(captions) - own.encode_text(captions)).max()
print(f"largest difference of an embedding after loading: {difference:.1e}")
