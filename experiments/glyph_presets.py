"""Train the small presets that ship with the library.

One dense Vision Transformer and three mixtures of experts of the same width, depth and
compute learn to tell 179 rendered letters and signs apart (`datasets.glyphs`,
synthetic, no digits among them). A fifth one, whose tokens choose two experts each in
groups of eight images, is there to try low capacity on. Each image is seen once: every
epoch draws new ones. Then each model is measured on the real handwritten digits that it
never saw, few-shot and fine-tuned, and a card is written beside its weights.

    python -m experiments.glyph_presets                            # the four
    python -m experiments.glyph_presets --only token_choice_k2     # one

Needs the extras of one backend and `datasets`, `viz`. The four take less than an hour
on two cores with `KERAS_BACKEND=jax`. After an interruption the same command goes on
where it stopped: finished models are kept in `presets/` and only measured (delete a
directory to train it anew), the running one is saved after each epoch in
`build/training/`.
"""

import argparse
import time
from pathlib import Path

import keras
import numpy as np

import keras_softmoe as ksm
from experiments.cards import (
    machine,
    read_metadata,
    spread,
    write_card,
    write_metadata,
)
from experiments.runs import Run, adamw, batches_of, finish, result_file
from keras_softmoe import datasets, evaluation, models, routers

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "training"

IMAGE_SIZE = 32
BATCH_SIZE = 64
EPOCH_IMAGES = 8192
EPOCHS = 16
WARMUP_STEPS = 200
LEARNING_RATE = 1.5e-3
WEIGHT_DECAY = 0.01
SEED = 0
VALIDATION_SEED = 1

FEW_SHOT_DRAWS = 20
FINE_TUNING_SEEDS = 3
FINE_TUNING_EPOCHS = 12

# Short name -> name of the preset, its router, what to call it.
# 64 tokens at C = 1.05 make 4.2 slots; rounded up, there is one to spare.
TWINS = {
    "dense": ("vit_tiny_patch4_32_glyphs", None, "Dense ViT"),
    "soft": (
        "soft_moe_tiny_patch4_16e_32_glyphs",
        routers.SoftRouter(16, slots_per_expert=4),
        "Soft MoE",
    ),
    "token_choice": (
        "vmoe_tiny_patch4_16e_32_glyphs",
        routers.SoftmaxTokenChoiceRouter(16, priority="max", rounding="ceil"),
        "V-MoE (token choice, K = 1, C = 1.05, batch priority)",
    ),
    "expert_choice": (
        "expert_choice_tiny_patch4_16e_32_glyphs",
        routers.SoftmaxExpertChoiceRouter(16, rounding="ceil"),
        "Expert choice (c = 1)",
    ),
    "token_choice_k2": (
        "vmoe_tiny_patch4_16e_k2_32_glyphs",
        # As V-MoE is released: no batch priority in training, groups of eight images.
        routers.SoftmaxTokenChoiceRouter(16, num_selected_experts=2, rounding="ceil"),
        "V-MoE (token choice, K = 2, C = 1.05, groups of 8 images)",
    ),
}
GROUP_IMAGES = {"token_choice_k2": 8}
EQUAL_COST = ("dense", "soft", "token_choice", "expert_choice")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=TWINS, action="append")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--output", type=Path, default=ROOT / "presets")
    arguments = parser.parse_args()
    for twin in arguments.only or EQUAL_COST:
        train_or_measure(twin, arguments.epochs, arguments.output / TWINS[twin][0])


def train_or_measure(twin, epochs, directory):
    """Train a preset unless it is there, measure it, and write its card."""
    print(f"\n{directory.name}")
    if "training" in read_metadata(directory):
        write_card(directory, card(directory, measure(directory)))
        return
    run = training_run(twin, epochs, directory)
    finished = finish(run, WORK, verbose=2)
    write_metadata(
        directory,
        kind="trained",
        description=f"{TWINS[twin][2]}, 96 wide, 6 blocks, trained on synthetic "
        "glyphs at 32 x 32.",
        source="experiments/glyph_presets.py",
        licence="Apache-2.0",
        training={
            "seed": SEED,
            "images": epochs * EPOCH_IMAGES,
            "minutes": round(finished["times"]["training_seconds"] / 60, 1),
            **machine(),
        },
    )
    write_card(directory, card(directory, finished["results"]))
    # From now on the directory is what is kept.
    result_file(WORK, run.name).unlink()


# === Training ===


def training_run(twin, epochs, directory):
    """The training of a model, which is saved as a preset and measured as one.

    Image `i` of epoch `e` depends on the seed, `e` and `i` alone, so a run that is
    taken up again sees what an uninterrupted one would have seen.
    """
    steps_per_epoch = EPOCH_IMAGES // BATCH_SIZE

    def build():
        classifier = models.ViTMoEImageClassifier(
            build_backbone(TWINS[twin][1], GROUP_IMAGES.get(twin, 1)),
            num_classes=len(datasets.GLYPH_CLASSES),
            preprocessor=models.ViTMoEImageClassifierPreprocessor(
                models.ViTMoEImageConverter(image_size=(IMAGE_SIZE, IMAGE_SIZE))
            ),
        )
        steps = epochs * steps_per_epoch
        classifier.compile(
            adamw(LEARNING_RATE, steps, WARMUP_STEPS, WEIGHT_DECAY, clip_norm=1.0),
            metrics=["accuracy"],
        )
        return classifier

    def draw(epoch):
        start = epoch * EPOCH_IMAGES
        glyphs = datasets.glyphs(EPOCH_IMAGES, IMAGE_SIZE, SEED, start, verbose=0)
        return batches_of(*glyphs, BATCH_SIZE)

    def save_and_measure(classifier):
        classifier.save_to_preset(str(directory))
        return measure(directory)

    name = f"{directory.name}_{epochs}"
    return Run(name, SEED, build, draw, epochs, steps_per_epoch, save_and_measure)


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


def measure(directory):
    """Upstream accuracy, few-shot accuracy and fine-tuned accuracy of a preset."""
    classifier = models.ViTMoEImageClassifier.from_preset(str(directory))
    images, labels = datasets.glyphs(
        5000, image_size=IMAGE_SIZE, seed=VALIDATION_SEED, verbose=0
    )
    predicted = classifier.predict(images, batch_size=BATCH_SIZE, verbose=0)
    train_set, test_set = (datasets.digits(IMAGE_SIZE, s) for s in ("train", "test"))
    few_shot = {
        name: probe(backbone, train_set, test_set)
        for name, backbone in (("model", classifier), ("raw pixels", None))
    }
    fine_tuned = [
        fine_tune(directory, train_set, test_set, seed)
        for seed in range(FINE_TUNING_SEEDS)
    ]
    return {
        "upstream_accuracy": float(np.mean(predicted.argmax(-1) == labels)),
        "few_shot": few_shot,
        "fine_tuned": [accuracy for accuracy, _ in fine_tuned],
        "fine_tuning_seconds": [round(seconds, 1) for _, seconds in fine_tuned],
    }


def probe(backbone, train_set, test_set):
    result = evaluation.few_shot_probe(
        backbone, train_set, test_set, shots=(1, 5, 10), seeds=FEW_SHOT_DRAWS
    )
    return {str(shots): list(map(float, r.accuracies)) for shots, r in result.items()}


def fine_tune(directory, train_set, test_set, seed):
    """Accuracy on one half of the digits after `fit` on the other, and the seconds."""
    keras.utils.set_random_seed(seed)
    classifier = models.ViTMoEImageClassifier.from_preset(
        str(directory), num_classes=10
    )
    started = time.perf_counter()
    steps = FINE_TUNING_EPOCHS * -(-len(train_set[0]) // 32)
    classifier.compile(adamw(1e-3, steps, 50, WEIGHT_DECAY), metrics=["accuracy"])
    classifier.fit(*train_set, batch_size=32, epochs=FINE_TUNING_EPOCHS, verbose=2)
    accuracy = classifier.evaluate(*test_set, verbose=0, return_dict=True)["accuracy"]
    return float(accuracy), time.perf_counter() - started


# === Cards ===


def card(directory, metrics):
    """Put the metrics into the metadata of a preset, and tell all of it in words."""
    metadata = write_metadata(directory, metrics=metrics)
    training = metadata["training"]
    rows = "\n".join(
        f"| {shots} | {spread(metrics['few_shot']['model'][shots])} "
        f"| {spread(metrics['few_shot']['raw pixels'][shots])} |"
        for shots in ("1", "5", "10")
    )
    return f"""# {directory.name}

{metadata["description"]} {metadata["parameter_count"]:,} parameters.

```python
import keras_softmoe as ksm

name = "{directory.name}"
classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
```

**Data.** {training["images"]:,} synthetic images of 179 letters and signs, rendered
from the fonts that ship with matplotlib (`keras_softmoe.datasets.glyphs`, seed
{training["seed"]}), each seen once. No digits.

**Training.** `experiments/glyph_presets.py`, seed {training["seed"]}: AdamW, peak
learning rate {LEARNING_RATE}, {WARMUP_STEPS} steps of warm-up, cosine decay, batch
{BATCH_SIZE}, weight decay {WEIGHT_DECAY}. {training["minutes"]} minutes on
{training["processor"]} with {training["backend"]}.

**Glyphs.** Accuracy on 5,000 images that were not trained on:
{metrics["upstream_accuracy"]:.3f}.

**Handwritten digits, few-shot** (scikit-learn's, never seen in training; linear probe,
mean ± standard deviation over {FEW_SHOT_DRAWS} support draws, penalty chosen on
training images):

| shots | this model | raw pixels |
|---|---|---|
{rows}

**Handwritten digits, fine-tuned** with `fit` on one half (901 images,
{FINE_TUNING_EPOCHS} epochs, AdamW, cosine decay), tested
on the other half (896 images): {spread(metrics["fine_tuned"])} over
{FINE_TUNING_SEEDS} seeds, {np.mean(metrics["fine_tuning_seconds"]):.0f} s each.

**Limits.** A small model for trying the library out, not for use on photographs.

**Licence.** Apache-2.0.
"""


if __name__ == "__main__":
    print(f"keras_softmoe {ksm.__version__} on {keras.config.backend()}")
    main()
