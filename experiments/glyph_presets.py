"""Train the small presets that ship with the library.

One dense Vision Transformer and three mixtures of experts of the same width, depth and
compute learn to tell 179 rendered letters and signs apart (`synthetic.glyphs`,
synthetic, no digits among them): half of them fill the image, half lie anywhere in it
among pieces of others, so that the place of a patch does not tell what it shows. A
fifth model, whose tokens choose two experts each in groups of eight images, is there to
try low capacity on. Each image is seen once: every epoch draws new ones. Then each
model is measured on the real handwritten digits that it never saw, few-shot and
fine-tuned, and a card is written beside its weights.

    python -m experiments.glyph_presets                            # all
    python -m experiments.glyph_presets --only soft --seeds 1      # one training

The dense model, Soft MoE and token choice have six seeds, so that differences come
with an interval; a preset holds the weights of the first seed, whatever the others do.
It is written when that is trained, its metadata and card again after each other seed.

Needs the extras of one backend and `datasets`, `viz`. A training takes half an hour of
a core. After an interruption the same command goes on where it stopped: finished
trainings are kept in `build/training/`, the running one is saved after each epoch.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

import keras_softmoe as ksm
from experiments import synthetic
from experiments.lib.cards import (
    RECORDS,
    machine,
    measured,
    write_card,
    write_metadata,
)
from experiments.lib.digits import describe_digits, measure_digits
from experiments.lib.publishing import publish, save_weights
from experiments.lib.runs import (
    Run,
    adamw,
    batches_of,
    finish,
    router_config,
)
from keras_softmoe import analysis, evaluation, models, routers

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "training"

IMAGE_SIZE = 32
BATCH_SIZE = 64
EPOCH_IMAGES = 8192
EPOCHS = 64
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.01
# Of the models that are compared.
SEEDS = (0, 1, 2, 3, 4, 5)
# No model is trained on the images of this seed.
VALIDATION_SEED = 10_000
VALIDATION_IMAGES = 4096
WATCHED_IMAGES = 512
# Where glyphs lie, half of the images each.
LAYOUTS = {
    "center": {},
    "anywhere": {"placement": "anywhere", "distractors": 2},
}

# Slots per choice of a token at inference, beside those of training.
CAPACITY_FACTORS = (0.5, 0.25)


class Twin(NamedTuple):
    """A model that is trained here.

    Attributes:
        name: str, of the preset.
        title: str, what to call it.
        seeds: tuple of ints.
        router: its router, or `None`.
        learning_rate: float, the peak.
        group_images: int.
    """

    name: str
    title: str
    seeds: tuple
    router: Any = None
    learning_rate: float = 1.5e-3
    group_images: int = 1


TWINS = {
    "dense": Twin("vit_tiny_patch4_32_glyphs", "Dense ViT", SEEDS),
    "soft": Twin(
        "soft_moe_tiny_patch4_16e_32_glyphs",
        "Soft MoE",
        SEEDS,
        routers.SoftRouter(16, slots_per_expert=4, initial_scale="unit_variance"),
    ),
    "token_choice": Twin(
        "vmoe_tiny_patch4_16e_32_glyphs",
        "V-MoE (token choice, K = 1, C = 1.05, batch priority)",
        SEEDS,
        routers.SoftmaxTokenChoiceRouter(16, priority="max"),
    ),
    "expert_choice": Twin(
        "expert_choice_tiny_patch4_16e_32_glyphs",
        "Expert choice (c = 1)",
        (0,),
        routers.SoftmaxExpertChoiceRouter(16),
    ),
    "token_choice_k2": Twin(
        "vmoe_tiny_patch4_16e_k2_32_glyphs",
        "V-MoE (token choice, K = 2, C = 1.05, groups of 8 images)",
        (0,),
        # As V-MoE is released: no batch priority in training, groups of eight images.
        routers.SoftmaxTokenChoiceRouter(16, num_selected_experts=2),
        group_images=8,
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=TWINS, action="append")
    parser.add_argument("--seeds", type=int, nargs="+", help="train these seeds only")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--output", type=Path, default=ROOT / "presets")
    parser.add_argument("--records", type=Path, default=RECORDS)
    arguments = parser.parse_args()
    for name in arguments.only or TWINS:
        twin = TWINS[name]
        trainings = [training_run(twin, s, arguments.epochs) for s in twin.seeds]
        for run in trainings:
            if arguments.seeds is None or run.seed in arguments.seeds:
                print(f"\n{twin.name}, seed {run.seed}")
                finish(run, WORK, verbose=2)
        directory = arguments.output / twin.name
        describing = partial(describe, twin, arguments.epochs)
        publish(trainings, WORK, directory, arguments.records, describing)


# === Training ===


def training_run(twin, seed, epochs):
    """The training of a model, which is saved as a preset and measured as one."""
    name = f"{twin.name}_{epochs}_{seed}"

    def save_and_measure(classifier):
        return measure(save_weights(classifier, WORK, name))

    return classifier_run(name, twin, seed, epochs, save_and_measure)


def classifier_run(name, twin, seed, epochs, measure):
    """The training of a `Twin`.

    Image `i` of epoch `e` depends on the seed, `e` and `i` alone, so a run that is
    taken up again sees what an uninterrupted one would have seen.
    """
    steps_per_epoch = EPOCH_IMAGES // BATCH_SIZE

    def build():
        classifier = models.ViTMoEImageClassifier(
            build_backbone(twin.router, twin.group_images),
            num_classes=len(synthetic.GLYPH_CLASSES),
            preprocessor=models.ViTMoEImageClassifierPreprocessor(
                models.ViTMoEImageConverter(image_size=(IMAGE_SIZE, IMAGE_SIZE))
            ),
        )
        steps = epochs * steps_per_epoch
        classifier.compile(
            adamw(twin.learning_rate, steps, WARMUP_STEPS, WEIGHT_DECAY, clip_norm=1.0),
            metrics=["accuracy"],
        )
        return classifier

    def draw(epoch):
        images, labels = draw_glyphs(EPOCH_IMAGES, seed, epoch * EPOCH_IMAGES)
        order = np.random.default_rng((seed, epoch)).permutation(len(labels))
        return batches_of(images[order], labels[order], BATCH_SIZE)

    settings = {
        "router": router_config(twin.router),
        "group_images": twin.group_images,
        "learning_rate": twin.learning_rate,
        "warmup_steps": WARMUP_STEPS,
        "weight_decay": WEIGHT_DECAY,
        "batch_size": BATCH_SIZE,
        "epoch_images": EPOCH_IMAGES,
    }
    return Run(
        name, seed, build, draw, epochs, steps_per_epoch, measure, watch, settings
    )


def draw_glyphs(number, seed, start=0):
    """Images and labels, as many of each layout, one layout after the other."""
    each = number // len(LAYOUTS)
    parts = [
        synthetic.glyphs(
            each, IMAGE_SIZE, seed, start // len(LAYOUTS), verbose=0, **layout
        )
        for layout in LAYOUTS.values()
    ]
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def build_backbone(router, group_images):
    return models.ViTMoEBackbone(
        image_shape=(IMAGE_SIZE, IMAGE_SIZE, 3),
        patch_size=4,
        num_layers=6,
        num_heads=3,
        hidden_dim=96,
        mlp_dim=192,
        moe_layers=() if router is None else (3, 4, 5),
        router=router,
        group_images=group_images,
        pooling="gap",
        position_embedding="sincos2d",
    )


# === Measuring ===


def watch(classifier):
    """Accuracy on glyphs, and the sharpness of dispatch weights of each soft block."""
    routes_softly = any(
        isinstance(router, routers.SoftRouter)
        for router in classifier.backbone.routers.values()
    )
    images, labels = draw_glyphs(WATCHED_IMAGES, VALIDATION_SEED)
    predicted = classifier.predict(images, batch_size=BATCH_SIZE, verbose=0)
    found = {"accuracy": float(np.mean(predicted.argmax(-1) == labels))}
    if routes_softly:
        soft = analysis.analyze(classifier, images, verbose=0).soft
        found["sharpness"] = [s.dispatch_sharpness for s in soft.values()]
    return found


def measure(directory):
    """Upstream accuracy, few-shot accuracy and fine-tuned accuracy of a preset."""
    # Routers at random draw from generators that are made with the layers.
    keras.utils.set_random_seed(VALIDATION_SEED)
    classifier = models.ViTMoEImageClassifier.from_preset(str(directory))
    by_layout = upstream(classifier)
    return {
        "upstream_accuracy": float(np.mean(list(by_layout.values()))),
        "upstream_accuracy_by_layout": by_layout,
        **measure_digits(classifier, directory),
        **routing_at_inference(classifier),
    }


def routing_at_inference(classifier):
    """What fewer slots and routers at random do to a trained model of token choice.

    Accuracies on glyphs of both layouts. Nothing for models with other routers.
    """
    if not isinstance(classifier.backbone.router, routers.SoftmaxTokenChoiceRouter):
        return {}
    test = draw_glyphs(VALIDATION_IMAGES, VALIDATION_SEED)
    fewer_slots = evaluation.routing_sweep(
        classifier,
        test,
        verbose=0,
        capacity_factor=CAPACITY_FACTORS,
        priority=("max", "position"),
    )

    def accuracy(random_logits, layers=None):
        sweep = evaluation.routing_sweep(
            *(classifier, test),
            verbose=0,
            layers=layers,
            random_logits=(random_logits,),
        )
        return float(sweep.scores()[0].mean())

    return {
        "fewer_slots": [
            {**row.settings, "accuracy": float(row.scores["accuracy"].mean())}
            for row in fewer_slots.rows
        ],
        "random_routers": {
            "none": accuracy(False),
            "one": [accuracy(True, [block]) for block in classifier.routers],
            "all": accuracy(True),
        },
    }


def upstream(classifier, number=VALIDATION_IMAGES):
    """Accuracy on this many glyphs of each layout."""
    found = {}
    for name, layout in LAYOUTS.items():
        images, labels = synthetic.glyphs(
            number, IMAGE_SIZE, VALIDATION_SEED, verbose=0, **layout
        )
        predicted = classifier.predict(images, batch_size=BATCH_SIZE, verbose=0)
        found[name] = float(np.mean(predicted.argmax(-1) == labels))
    return found


# === Cards ===


def describe(twin, epochs, directory, runs):
    """Write the metadata and the card of a preset."""
    metadata = write_metadata(
        directory,
        kind="trained",
        description=f"{twin.title}, 96 wide, 6 blocks, trained on synthetic glyphs at "
        "32 x 32.",
        source="experiments/glyph_presets.py",
        licence="Apache-2.0",
        training={
            "seed": runs[0]["seed"],
            "images": epochs * EPOCH_IMAGES,
            "learning_rate": twin.learning_rate,
            **machine(),
        },
        **measured(runs[0]),
    )
    write_card(directory, twin.name, card(twin.name, metadata, runs))


def card(name, metadata, runs):
    """Text of the card of a preset."""
    training = metadata["training"]
    first = runs[0]
    seeds = "\n".join(
        f"| {run['seed']} | {run['upstream_accuracy_by_layout']['center']:.3f} "
        f"| {run['upstream_accuracy_by_layout']['anywhere']:.3f} "
        f"| {np.mean(run['few_shot']['model']['5']):.3f} "
        f"| {np.mean(run['fine_tuned']):.3f} | {sharpness(run)} |"
        for run in runs
    )
    minutes = np.mean([run["minutes"] for run in runs])
    return f"""# {name}

{metadata["description"]} {metadata["parameter_count"]:,} parameters.

```python
import keras_softmoe as ksm

name = "{name}"
classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
```

**Data.** {training["images"]:,} synthetic images of 179 letters and signs, rendered
from the fonts that ship with matplotlib (`experiments.synthetic.glyphs`, seed
{training["seed"]}), each seen once: half fill the image, half lie anywhere in it among
pieces of others. No digits.

**Training.** `experiments/glyph_presets.py`, seed {training["seed"]}: AdamW, peak
learning rate {training["learning_rate"]:g}, {WARMUP_STEPS} steps of warm-up, cosine
decay, batch {BATCH_SIZE}, weight decay {WEIGHT_DECAY}. {minutes:.0f} minutes by the
clock, beside other work, on one of {training["processor"]} with {training["backend"]}.

{describe_digits(first)}

**All trainings**, of which the first is here: accuracy on
{VALIDATION_IMAGES:,} glyphs of each layout that were not trained on, 5-shot and
fine-tuned accuracy on digits, and how sharply soft routers end (the largest dispatch
weight of a slot in even shares, by block; 1 is a mean of the image).

| seed | glyphs that fill the image | anywhere | 5 shots | fine-tuned | sharpness |
|---|---|---|---|---|---|
{seeds}

**Limits.** A small model for trying the library out, not for use on photographs.

**Licence.** Apache-2.0.
"""


def sharpness(run):
    last = run["curve"][-1].get("sharpness")
    return ", ".join(f"{value:.1f}" for value in last) if last else ""


if __name__ == "__main__":
    print(f"keras_softmoe {ksm.__version__} on {keras.config.backend()}")
    main()
