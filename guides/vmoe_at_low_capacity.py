"""
Title: V-MoE at low capacity
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/27
Description: Let a trained V-MoE skip the patches that matter least, and measure it.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Slots are the cost

In a V-MoE every patch chooses `K` experts, and every expert has a fixed number of
slots: `K` times the patches, divided by the experts, times the *capacity factor* `C`.
Experts compute all their slots, filled or not, so what the experts cost is proportional
to `C`. Models are trained with `C = 1.05`. At `C = 0.5` there is room for half of the
choices. Who gets the slots?

- *Vanilla* routing (`priority="position"`) serves patches in their order. Patches at
  the end of the group find full experts, whatever is in them.
- *Batch prioritized routing* (`priority="max"`) serves the patches first of which the
  router is surest.

A choice without a slot is dropped: the patch passes that block by its residual
connection. No loss asks the router to rank patches, and yet its largest probability
turns out to be a good measure of how much a patch matters (V-MoE, section 4).

## Setup

The preset has 8 experts and was trained with `K = 1`, `C = 1.05` and batch prioritized
routing, on icons of 16 patches each in groups of 32. Outside of training it is
*dropless*: every choice is served (`eval_capacity_factor`). It is measured on icons of
concepts that it learned, in styles that it never saw; classes are 1,229 concepts.
Nothing is trained here: capacity and priority are settings of a loaded model.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import numpy as np

import keras_softmoe as ksm

PRESET = "vmoe_tiny_patch8_8e_32_icons"
NUM_IMAGES, SEEDS = 1_000, 5
CAPACITY_FACTORS = (1.05, 0.5, 0.25, 0.15, 0.1)

# The tests run this guide with fewer images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
if SHORT:
    NUM_IMAGES, SEEDS = 64, 2
    CAPACITY_FACTORS = (1.05, 0.15)

classifier = ksm.models.ViTMoEImageClassifier.from_preset(PRESET)
images, labels, *_ = ksm.datasets.sample("icons", NUM_IMAGES)
print(classifier.backbone.router.get_config())

"""
## One change, one prediction

`set_routing` changes the routers of a live model, all of them or those of chosen
blocks. The next `predict`, `evaluate` or `fit` obeys, although the model was compiled
with other settings: it notices and compiles anew. The same settings can be given to
`from_preset(..., capacity_factor=0.5)`. A capacity factor ends dropless predictions.
"""


def accuracy(model):
    logits = model.predict(images, batch_size=64, verbose=0)
    return np.mean(logits.argmax(-1) == labels)


print(f"dropless: {accuracy(classifier):.3f}")
classifier.set_routing(capacity_factor=1.05)
print(f"with the slots of training: {accuracy(classifier):.3f}")
classifier.set_routing(capacity_factor=0.25)
print(f"a quarter of the slots, best patches first: {accuracy(classifier):.3f}")
classifier.set_routing(priority="position")
print(f"a quarter of the slots, vanilla: {accuracy(classifier):.3f}")
classifier.set_routing(priority="max", eval_capacity_factor="dropless")

"""
## A sweep

`routing_sweep` evaluates every combination of settings and puts the old ones back.
Where groups span several images, who is dropped depends on the images beside, so it
repeats the evaluation with the images in several orders.
"""

sweep = ksm.evaluation.routing_sweep(
    classifier,
    (images, labels),
    seeds=SEEDS,
    priority=("max", "position"),
    capacity_factor=CAPACITY_FACTORS,
    verbose=0,
)
accuracies = {
    (row.settings["priority"], row.settings["capacity_factor"]): row.scores["accuracy"]
    for row in sweep.rows
}

print("    C   batch prioritized   vanilla           difference (standard error)")
for factor in CAPACITY_FACTORS:
    best, vanilla = (accuracies[p, factor] for p in ("max", "position"))
    difference = best - vanilla
    error = difference.std(ddof=1) / np.sqrt(SEEDS)
    print(
        f"{factor:5.2f}   {best.mean():.3f} ± {best.std(ddof=1):.3f}       "
        f"{vanilla.mean():.3f} ± {vanilla.std(ddof=1):.3f}     "
        f"{difference.mean():+.3f} ({error:.4f})"
    )

"""
With room for all choices the order matters least. With half of the room and less,
serving the surest patches first keeps four to five points of accuracy, as in the
paper's figure 6, and half of the slots cost it next to nothing. This preset was trained
with that order, so that vanilla routing is also new to it. Even with a tenth of the
slots most of the accuracy is left: experts are in the last three blocks only, and a
patch without a slot still passes by the residual connection.

## Pictures

The same numbers as a figure, and what is dropped: hatched patches are looked at by no
expert of the block. For the picture four icons share the slots, not 32; so few crowd
some of the experts, and even `C = 1.05` drops patches.
"""

os.makedirs("build", exist_ok=True)
figure = sweep.plot("capacity_factor", by="priority")
figure.savefig("build/accuracy_against_capacity.png", dpi=120)

classifier.set_routing(group_images=4)
routing = ksm.analysis.analyze(
    classifier,
    images[:4],
    num_pictures=4,
    capacity_factors=CAPACITY_FACTORS,
    verbose=0,
)
classifier.set_routing(group_images=32)
figure = routing.plot("discarded")
figure.savefig("build/discarded_patches.png", dpi=120)

"""
## Fewer experts, fewer patches

Two more settings trade accuracy for compute. `num_selected_experts` is `K`, which may
differ from training, too (appendix E.4). `keep_fraction` skips a fixed share of the
patches altogether (algorithm 3 in appendix C.1); unlike a low capacity it drops the
same number of patches however well the experts are balanced.
"""

print("settings                                 accuracy")
for settings in (
    {"num_selected_experts": 1},
    {"num_selected_experts": 2},
    {"num_selected_experts": 3},
    {"keep_fraction": 0.5},
    {"keep_fraction": 0.25},
):
    (row,) = ksm.evaluation.routing_sweep(
        classifier,
        (images, labels),
        verbose=0,
        **{name: (value,) for name, value in settings.items()},
    ).rows
    print(f"{settings!s:<40} {row.scores['accuracy'].mean():.3f}")

"""
## What it saves

Each row of a sweep also has the operations of an image, as `evaluation.cost` counts
them at these settings. The rows that no other one beats in accuracy and in operations
are the Pareto front.
"""

figure = sweep.plot("gflop_per_image", by="priority")
figure.savefig("build/pareto_front.png", dpi=120)

for row in sweep.pareto().rows:
    print(
        f"priority {row.settings['priority']:<8}  "
        f"C = {row.settings['capacity_factor']:4.2f}  "
        f"accuracy {row.scores['accuracy'].mean():.3f}  "
        f"{1000 * row.gflop_per_image:.1f} MFLOP per image"
    )
