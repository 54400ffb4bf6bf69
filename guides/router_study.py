"""
Title: Six routers head to head
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/21
Description: The router study in small: one model, one set of images, many routers.
Accelerator: None
"""

# ruff: noqa: E402

"""
## Which router is best?

The router study (*Routers in Vision Mixture of Experts: An Empirical Study*) puts six
routers into the same Vision Transformer, trains each on the same images, and compares.
Soft MoE adds routings that do not look at the tokens, to see what looking is worth.
`experiments/router_study` reruns both with one command, on images that need no network.
It is a program of the repository, not a part of the installed package: run it from the
top of a checkout.

```shell
KERAS_BACKEND=torch python -m experiments.router_study --scale small --output results
```

That is some 70 models with three seeds each, six for those that matter most: a night
on two cores, if one process is given `--seeds 0 1 2` and another the rest.
`--studies headline` compares a dense model with mixtures of the same FLOP, which takes
an evening. What came out is in `experiments/router_study/small`.
`--scale smoke` shows in a few minutes that all of it runs, and learns nothing.
`--scale full` is the paper's B/32 on ImageNet, for those who have the hardware.

This guide does the same step by step, from Python. It needs a checkout of the
repository that is installed: `pip install -e .`.

## Setup
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # or "jax", or "tensorflow"

import dataclasses
import json
from pathlib import Path

from experiments import router_study

SCALE, STUDIES = router_study.SMALL, ("routers", "combine")

# The tests run this guide with models that are hardly trained.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
if SHORT:
    SCALE = dataclasses.replace(router_study.SMOKE, seeds=(0,), more_seeds=())
    STUDIES = ("routers",)

FOLDER = Path("build", "router_study")
FOLDER.mkdir(parents=True, exist_ok=True)

"""
## Who takes part

A scale says what all models have in common. Each kind of router has the learning rate
that is best for one router of its kind, out of a few and with a seed that no result is
of. Nothing else is tuned.
"""

print(
    f"{SCALE.name}: {SCALE.num_layers} blocks, {SCALE.hidden_dim} wide, "
    f"{SCALE.num_tokens} tokens, {SCALE.steps} steps of {SCALE.batch_size} images, "
    f"learning rates {SCALE.rates} out of {SCALE.learning_rates}"
)
models = router_study.configurations(SCALE, STUDIES)
for study, of_study in models.items():
    for name, c in of_study.items():
        print(f"{study}: {name}: {c.title}, experts in blocks {c.moe_layers}")

"""
Besides `"headline"` and `"routers"` there are `"fixed"` (what is looking at the tokens
worth?), `"initial_scale"` (how sharply does Soft MoE route at the start?), `"priority"`
(batch priority in training), `"data"` (the same images again and again), `"combine"`
(does Sinkhorn token choice weigh experts by the softmax or by the plan?), `"experts"`
(many experts with one slot each, or few with many?), `"slots"` (more slots for the same
experts), `"placement"` (experts in the last layers, or spread, or all in one) and
`"learning_rate"`.

## Training

A cell is a model and a seed. When it is finished it is written to a file of its own;
while it is trained, a backup is kept. Press Ctrl-C whenever you like: the same call
goes on where it stopped, and ends with the same numbers. The bar counts the steps of
all cells.
"""

results = router_study.run_study(SCALE, FOLDER, STUDIES, verbose=2 if SHORT else 1)

"""
Once more: everything is there, so nothing is trained.
"""

again = router_study.run_study(SCALE, FOLDER, STUDIES)
print(f"the same results: {again == results}")

"""
## The results

All results are one dictionary, which JSON can hold. Everything in it follows from the
scale and the seeds, but for `"times"`. Tables, figures and claims are made of it alone.
"""

(FOLDER / "results.json").write_text(json.dumps(results, indent=1))
print(router_study.table(results, "routers"))

"""
*Step* is the time of a training step over that of the dense model, measured in turn, so
that both meet the same disturbances. *Imbalance* is the load of the fullest expert over
the mean; experts that choose are always balanced, and a Soft MoE drops nothing.

The papers' figures 1 and 2: accuracy, and few-shot accuracy on a task that no model has
seen, against what the training costs.
"""

for metric, name in (("upstream_accuracy", "upstream"), ("10-shot", "few_shot")):
    figure = router_study.plot_study(results, metric)
    figure.savefig(FOLDER / f"{name}.png")

"""
## What the papers claim

Each claim is a difference between models, or some. They are taken within each seed,
whose images all models saw in the same order, and come with a t-interval; as many of
them are looked at, verdicts say whether they stand after Holm's correction for all
differences of the study. *The same FLOP* is not the same time: see *step*. A small
model on synthetic letters is not a B/32 on 300 million photographs: a claim that does
not appear here is not refuted, and one that does is not proven.
"""

print(router_study.claims_table(results))

"""
In code:
"""

for claim in router_study.claims(results):
    for metric in claim.differences:
        print(f"{metric}: {claim.verdict(metric)}: {claim.text}")

"""
## A study of your own

Change a scale, and it is another study, with its own directory: another data set of
TensorFlow Datasets (`tfds="cifar10"`), longer training, more seeds.
"""

own = dataclasses.replace(SCALE, name="longer", epochs=2 * SCALE.epochs, seeds=(7,))
print(f"{own.name}: {own.steps} steps, {len(own.seeds)} seed")
