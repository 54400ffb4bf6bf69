"""
Title: Which experts serve which modality
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Look into a LIMoE: load, confidence, priorities, words, and pruning.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Nobody told the experts

In a LIMoE, tokens of images and of text choose among the same experts. Nothing says
which expert is for what; the losses only ask that text uses some minimum of experts and
that each of its tokens is sure of one. This guide looks at what came of it in a small
LIMoE that was trained on synthetic scenes, and then uses it: text needs few experts, so
the others can be taken out of a model that only encodes text.

## Setup
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import time
from pathlib import Path

import keras
import numpy as np

import keras_softmoe as ksm

PRESET = "limoe_tiny_patch8_8e_32_icons"
NUM_PAIRS, KEPT, EVERY = 256, (8, 6, 4, 2), 2

# The tests run this guide with fewer pairs.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
if SHORT:
    NUM_PAIRS, KEPT, EVERY = 64, (8, 4), 1

FIGURES = Path("build")
FIGURES.mkdir(exist_ok=True)

model = ksm.models.LIMoEContrastive.from_preset(PRESET)
scenes = ksm.datasets.sample("icons", NUM_PAIRS)

"""
## Load

Pairs are routed together, as in training: 64 patches and 16 pieces of text each, in
groups of 32 pairs. Every expert has the same number of slots (the dashed line). What
chose an expert beyond them is dropped.
"""

routing = ksm.analysis.analyze(
    model, scenes.images, captions=scenes.captions, num_pictures=1, verbose=0
)
statistics = routing.modalities
for block, s in statistics.items():
    print(f"block {block}: dropped {s.dropped}")
    for modality, needed in s.experts_needed(0.9).items():
        print(f"  90 % of {modality} tokens need {needed} of {len(s.padding)} experts")
routing.plot("modality_load").savefig(FIGURES / "limoe_load.png")

"""
## Confidence and priority

The local entropy loss makes text tokens sure of their expert; images have no such loss.
Tokens that the router is surest of are served first (batch prioritized routing), so
text mostly comes before images, without a rule that says so.
"""

for block, s in statistics.items():
    means = {m: f"{value:.2f}" for m, value in s.confidence_mean.items()}
    print(f"block {block}: mean of the largest probability {means}")
figure = routing.plot("confidence")
figure.savefig(FIGURES / "limoe_confidence.png")
figure = routing.plot("priorities")
figure.savefig(FIGURES / "limoe_priorities.png")

"""
## Ways through the model

From the experts of one block to those of the next.
"""

figure = routing.plot("trajectories")
figure.savefig(FIGURES / "limoe_trajectories.png")

"""
## What experts like

The patches and words that the router sends to each expert of the last block most
surely, and one scene with its caption, patch by patch.
"""

for expert, words in enumerate(routing.maps[3].examples.words):
    print(f"expert {expert}:", " ".join(word.lstrip("▁") for word in words))
figure = routing.plot("examples", blocks=[3])
figure.savefig(FIGURES / "limoe_examples.png")
figure = routing.plot("pair", blocks=[3])
figure.savefig(FIGURES / "limoe_pair.png")

"""
## Kinds of words

Any callable that gives each word of a caption a tag can divide the text of an expert
into kinds: a tagger for parts of speech (the paper used NLTK's, whose data have to be
downloaded), or, for the few words of these captions, a list.
"""

colors = {name.split()[0] for name in scenes.class_names}
shapes = {name.split()[1] for name in scenes.class_names}
KINDS = {
    "color": colors,
    "shape": shapes | {shape + "s" for shape in shapes} | {"crosses"},
    "size": ("small", "little", "tiny", "large", "big", "huge"),
    "determiner": ("a", "an", "the", "this"),
    "number": ("two", "three", "2", "3"),
}
kind_of = {word: kind for kind, words in KINDS.items() for word in words}


def tagger(words):
    return [kind_of.get(word, "other") for word in words]


tagged = ksm.analysis.analyze(
    model, scenes.images, captions=scenes.captions, tagger=tagger, verbose=0
)
words = tagged.modalities[3].words
most = words.assigned.sum(axis=0).argmax()
for tag, share in zip(words.tags, words.share[:, most], strict=True):
    print(f"of the text of expert {most} in block 3 {100 * share:3.0f} % is {tag}")
tagged.plot("words").savefig(FIGURES / "limoe_tags.png")

"""
## Pruning

Which experts does text alone use? Coverage says how much of the text the `m` most used
experts serve.
"""

text = ksm.analysis.analyze(model, captions=scenes.captions, verbose=0).modalities
for block, s in text.items():
    print(f"block {block}: coverage {np.round(s.coverage['text'], 3)}")
figure = routing.plot("coverage")
figure.savefig(FIGURES / "limoe_coverage.png")

"""
The rest can go. `"router_pred"` lets the router go on distributing its probabilities
among all experts, of which only some are left; with `"router_drop"` they are
distributed among those, so that their outputs count for more than in training. Images
are encoded by the whole model, text by the pruned one.
"""

new = ksm.datasets.sample("new_icons", NUM_PAIRS)
names = new.class_names
templates = ("a {}", "a picture of a {}", "there is a {}")
images = model.encode_image(new.images)
usage = {block: s.routed["text"] for block, s in text.items()}


def accuracy(encoder):
    """Zero-shot accuracy with the names of classes encoded by a model."""
    classes = encoder.class_embeddings(names, templates)
    return np.mean((images @ classes.T).argmax(-1) == new.labels)


rows = []
for kept in KEPT:
    for method in ("router_pred", "router_drop"):
        pruned = ksm.models.prune_experts(model.backbone, usage, kept, method)
        encoder = ksm.models.LIMoEContrastive(pruned, model.preprocessor)
        settings = {"experts_kept": kept, "method": method}
        rows.append((settings, {"accuracy": accuracy(encoder)}))
curve = ksm.evaluation.Sweep(rows, {"not pruned": [accuracy(model)]})
print(f"whole model: accuracy {curve.baselines['not pruned'][0]:.3f}")
for row in curve.rows:
    kept, method = row.settings["experts_kept"], row.settings["method"]
    value = row.scores["accuracy"][0]
    print(f"{kept} text experts, {method}: accuracy {value:.3f}")
figure = curve.plot("experts_kept", by="method")
figure.savefig(FIGURES / "limoe_pruning.png")

"""
The weights and the time to encode the captions shrink.
"""


def seconds(encoder):
    encoder.encode_text(scenes.captions)  # compiles
    times = []
    for _ in range(3):
        started = time.perf_counter()
        encoder.encode_text(scenes.captions)
        times.append(time.perf_counter() - started)
    return min(times)


pruned = ksm.models.prune_experts(model, usage, KEPT[-1])
smaller = ksm.models.LIMoEContrastive(pruned, model.preprocessor)
whole_bytes, bytes_ = (
    ksm.evaluation.cost(m.backbone).weight_bytes for m in (model, smaller)
)
print(
    f"{KEPT[-1]} text experts: {bytes_ / 1e6:.2f} MB of {whole_bytes / 1e6:.2f} MB, "
    f"time {seconds(smaller) / seconds(model):.2f}"
)

"""
In a training of your own, a callback averages the usage over the last steps, as the
paper does. Here are a few more steps of the preset.
"""

monitor = ksm.analysis.RoutingMonitor(
    scenes.images[:64], scenes.captions[:64], every=EVERY
)
model.compile(optimizer=keras.optimizers.AdamW(1e-4))
model.fit(scenes.images, scenes.captions, batch_size=64, verbose=0, callbacks=[monitor])
for block, share in monitor.usage("text").items():
    kept = np.sort(share)[::-1][: KEPT[-1]].sum()
    print(f"block {block}: {KEPT[-1]} experts hold {100 * kept:.1f} % of the text")
