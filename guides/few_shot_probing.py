"""
Title: Few-shot probing
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/27
Description: How much of a new task do frozen features solve, given a few images?
Accelerator: None
"""

# ruff: noqa: E402

"""
## What a probe measures

A pretrained model turns an image into a vector. A *few-shot probe* freezes the model,
takes a few labelled images of each class of a task that the model was not trained on
("shots"), and fits a linear classifier to their vectors. Its accuracy on other images
says how good the vectors are. The V-MoE and Soft MoE papers compare models in this way
because it is quick and needs no tuning: the classifier is a ridge regression, which has
a closed form.

Here three small models of equal width and depth are probed on 129 concepts of icons.
They were trained on 1,229 others:

- a dense Vision Transformer;
- Soft MoE, where each slot of each expert takes a weighted average of all patches;
- V-MoE, where each patch chooses an expert.

## Setup
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", or "torch"

import numpy as np

import keras_softmoe as ksm

PRESETS = {
    "dense": "vit_tiny_patch8_32_icons",
    "soft": "soft_moe_tiny_patch8_16e_32_icons",
    "token choice": "vmoe_tiny_patch8_8e_32_icons",
}
SHOTS = (1, 5)
DRAWS = 10

# The tests run this guide with fewer concepts and draws.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
if SHORT:
    SHOTS, DRAWS = (1, 2), 3

"""
## Data

The probe takes pairs of arrays. The shots are drawn from `train`; `test` is scored.
Here the icons of `test` are of other families of sets than those of `train`: the probe
has to tell concepts in styles that it did not learn them from. Chance is 1 of 129.
"""

train, test = (
    (icons.images, icons.labels)
    for icons in map(ksm.datasets.sample, ("new_icons", "other_new_icons"))
)
if SHORT:
    train, test = ((x[y < 8], y[y < 8]) for x, y in (train, test))
print("train:", train[0].shape, train[0].dtype, "test:", test[0].shape)

"""
## One model

`few_shot_probe` accepts a backbone, or a task that has one. A task brings its
preprocessor along, which scales pixels from 0..255 to what the model expects. A bare
backbone needs to be told (`preprocessor=`): integer images are refused without one,
because a probe on wrongly scaled images fails silently.

Features are computed once for all images; the draws then cost next to nothing.
"""

converter = ksm.models.ViTMoEImageConverter.from_preset(PRESETS["soft"])
backbone = ksm.models.ViTMoEBackbone.from_preset(PRESETS["soft"])
result = ksm.evaluation.few_shot_probe(
    backbone, train, test, shots=SHOTS, seeds=DRAWS, preprocessor=converter
)
print(result)

"""
## How to read it

**The spread.** Which images happen to be drawn matters a lot when there is one of each
class. So the probe is repeated with `seeds` draws, and the table shows the mean and the
sample standard deviation of the test accuracy over them: how far a *single* draw may
lie from the mean. The uncertainty of the mean itself is smaller, by the square root of
the number of draws. It covers the choice of shots only, not another training run of the
model.

**The penalty.** Ridge regression has one number to choose, `l2`. The papers report the
best one on the *test* images (`l2="test"` here), which is optimistic. One image per
class leaves nothing to validate on, so by default the probe takes the penalty that is
best on the training images *outside* the draw. That is one number for all draws, and
the test images are scored once, with it. For a strict few-shot setting, where no other
label exists, fix it: `l2=100.0`.
"""

shots = SHOTS[-1]
print(f"single draws at {shots} shots:", np.round(result[shots].accuracies, 3))
print(f"penalty at {shots} shots: {result[shots].l2:g}")

optimistic = ksm.evaluation.few_shot_probe(
    backbone,
    train,
    test,
    shots=SHOTS,
    seeds=DRAWS,
    preprocessor=converter,
    l2="test",
    verbose=0,
)
print(f"chosen on the test images: {optimistic[shots].mean:.3f}")
print(f"chosen on other training images: {result[shots].mean:.3f}")

"""
## Three models and raw pixels

Without a model (`None`) the arrays are taken as features. Raw pixels are the bar to
clear: a model that does not beat them has learned nothing that helps here. Icons are
grey, so one channel says all.
"""


def probe(preset):
    model = ksm.models.ViTMoEImageClassifier.from_preset(preset)
    return ksm.evaluation.few_shot_probe(
        model, train, test, shots=SHOTS, seeds=DRAWS, verbose=0
    )


results = {name: probe(preset) for name, preset in PRESETS.items()}
pixels = ((x[..., :1] / 255, y) for x, y in (train, test))
results["raw pixels"] = ksm.evaluation.few_shot_probe(
    None, *pixels, shots=SHOTS, seeds=DRAWS, verbose=0
)

print(f"{'':<14}" + "".join(f"{f'{s}-shot':<16}" for s in SHOTS))
for name, result in results.items():
    cells = (f"{result[s].mean:.3f} ± {result[s].std:.3f}" for s in SHOTS)
    print(f"{name:<14}" + "".join(f"{cell:<16}" for cell in cells))

"""
## Is a difference real?

All models were probed with the same seeds, so draw number 3 means the same images for
each of them. A lucky draw is lucky for all, and most of the spread cancels in the
*differences*, draw by draw. Compare models by the mean of those, and by its standard
error. Each of these models was trained once: the error is that of the draws, and says
nothing about how another training would have ended. So it answers whether a preset
beats pixels, not which architecture is best.
"""

for name in PRESETS:
    difference = np.subtract(
        results[name][shots].accuracies, results["raw pixels"][shots].accuracies
    )
    error = difference.std(ddof=1) / np.sqrt(len(difference))
    print(
        f"{name} against raw pixels at {shots} shots: "
        f"{difference.mean():+.3f}, standard error {error:.3f}"
    )
