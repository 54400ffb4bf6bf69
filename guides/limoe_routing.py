"""
Title: Which experts serve which modality
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/27
Description: Look into a LIMoE: load, confidence, priorities, words, and pruning.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Nobody told the experts

In a LIMoE, tokens of images and of text choose among the same experts. Nothing says
which expert is for what; the losses only ask that text uses some minimum of experts and
that each of its tokens is sure of one. This guide looks at what came of it in a small
LIMoE that was trained on icons and their names, and then uses it: text needs few
experts, so the others can be taken out of a model that only encodes text.

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
NUM_PAIRS, KEPT, EVERY = 512, (8, 6, 4, 3, 2), 2

# The tests run this guide with fewer icons.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
if SHORT:
    NUM_PAIRS, KEPT, EVERY = 64, (8, 4), 1

FIGURES = Path("build")
FIGURES.mkdir(exist_ok=True)

model = ksm.models.LIMoEContrastive.from_preset(PRESET)
icons = ksm.datasets.sample("icons", NUM_PAIRS)
# The most frequent name of the concept of each icon
captions = np.array(icons.class_names)[icons.labels]
LAST = max(model.backbone.moe_layers)

"""
## Load

Pairs are routed together, as in training, in groups of 32: each has 16 patches and a
name of mostly one or two pieces of words, without its padding. Every expert has the
same number of slots, the dashed line. What chose an expert beyond them is dropped.
"""

routing = ksm.analysis.analyze(
    model, icons.images, captions=captions, num_pictures=1, verbose=0
)
statistics = routing.modalities
for block, s in statistics.items():
    dropped = {m: f"{100 * share:.1f} %" for m, share in s.dropped.items()}
    print(f"block {block}: dropped {dropped}")
    for modality, needed in s.experts_needed(0.9).items():
        print(f"  90 % of {modality} tokens need {needed} of {len(s.padding)} experts")
first = statistics[LAST].routed["text"]
share = np.sort(first)[::-1][:3].sum() / first.sum()
print(f"three experts of block {LAST} are the first choice of {share:.1%} of the text")
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

The patches and pieces of words that the router sends to each expert of the last block
most surely, and one icon with its name, patch by patch.
"""

for expert, words in enumerate(routing.maps[LAST].examples.words):
    print(f"expert {expert}:", " ".join(word.lstrip("▁") for word in words))
figure = routing.plot("examples", blocks=[LAST])
figure.savefig(FIGURES / "limoe_examples.png")
figure = routing.plot("pair", blocks=[LAST])
figure.savefig(FIGURES / "limoe_pair.png")

"""
## Kinds of words

Any callable that gives each word of a caption a tag can divide the text of an expert
into kinds: a tagger for parts of speech (the paper used NLTK's, whose data have to be
downloaded), or, for names of icons, lists of words: where something is or goes, what is
done to it, and the things themselves, which are most of the words.
"""

KINDS = {
    "place": "left right up down top bottom center in out forward horizontal vertical",
    "deed": "add plus minus remove check off open close closed edit search lock unlock "
    "share download upload import export copy link repeat split send merge",
}
kind_of = {word: kind for kind, words in KINDS.items() for word in words.split()}


def tagger(words):
    return [kind_of.get(word, "thing") for word in words]


tagged = ksm.analysis.analyze(
    model, icons.images, captions=captions, tagger=tagger, verbose=0
)
words = tagged.modalities[LAST].words
for expert in np.argsort(-words.assigned.sum(axis=0))[:3]:
    shares = zip(words.tags, words.share[:, expert], strict=True)
    text = ", ".join(f"{tag} {share:.0%}" for tag, share in shares)
    print(f"text of expert {expert} in block {LAST}: {text}")
tagged.plot("words").savefig(FIGURES / "limoe_tags.png")

"""
The experts that serve most of the text divide it by words, but hardly by these kinds.

## Pruning

Which experts does text alone use? Coverage says how much of the text the `m` most used
experts serve.
"""

text = ksm.analysis.analyze(model, captions=captions, verbose=0).modalities
for block, s in text.items():
    print(f"block {block}: coverage {np.round(s.coverage['text'], 3)}")
figure = routing.plot("coverage")
figure.savefig(FIGURES / "limoe_coverage.png")

"""
The rest can go. `"router_pred"` lets the router go on distributing its probabilities
among all experts, of which only some are left; with `"router_drop"` they are
distributed among those, so that their outputs count for more than in training. Images
are encoded by the whole model, text by the pruned one. An accuracy on 512 icons has a
standard error of almost two points: smaller differences say nothing.
"""

names = icons.class_names
images = model.encode_image(icons.images)
usage = {block: s.routed["text"] for block, s in text.items()}


def accuracy(encoder):
    """Zero-shot accuracy with all 1,229 names of concepts encoded by a model."""
    classes = encoder.class_embeddings(names)
    return np.mean((images @ classes.T).argmax(-1) == icons.labels)


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
The weights and the time to encode the names shrink.
"""


def seconds(encoder):
    encoder.encode_text(captions)  # compiles
    times = []
    for _ in range(3):
        started = time.perf_counter()
        encoder.encode_text(captions)
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

monitor = ksm.analysis.RoutingMonitor(icons.images[:64], captions[:64], every=EVERY)
model.compile(optimizer=keras.optimizers.AdamW(1e-4))
model.fit(icons.images, captions, batch_size=64, verbose=0, callbacks=[monitor])
for block, share in monitor.usage("text").items():
    kept = np.sort(share)[::-1][: KEPT[-1]].sum()
    print(f"block {block}: {KEPT[-1]} experts hold {100 * kept:.1f} % of the text")
