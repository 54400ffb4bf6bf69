"""Train the presets of letters: four models of the study, four times as long.

    python -m experiments.letters.presets                           # all
    python -m experiments.letters.presets --only soft --seeds 40    # one training

Each is trained with the first three seeds of the study. The first is measured on
letters and on handwritten digits that it never saw, and written with a card to
`presets/`; the others are measured on letters, so that differences come with an
interval. Files, priority and `build/pause` are as in `python -m experiments.letters`.
"""

import argparse
import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

import keras_softmoe as ksm
from experiments.letters.__main__ import WORK, lower_priority, wait_while_paused
from experiments.letters.bank import load_bank
from experiments.letters.measures import measure as measure_letters
from experiments.letters.models import MODELS, SCALES, build
from experiments.letters.pictures import IMAGE_SIZE, Letters
from experiments.letters.trainings import training
from experiments.lib.cards import (
    RECORDS,
    in_half_precision,
    machine,
    means,
    publish,
    save_weights,
    spread,
    write_card,
    write_metadata,
)
from experiments.lib.runs import adamw, check_before, finish
from keras_softmoe import datasets, evaluation, models, routers

ROOT = Path(__file__).resolve().parents[2]
PLACEMENT = "anywhere"
# Times as long as in the study
LONGER = 4
NUM_SEEDS = 3
# Of measurements on handwritten digits.
_SHOTS = (1, 5, 10)
_DRAWS = 20
_SEEDS = 3
_EPOCHS = 12
_BATCH_SIZE = 32


class Trained(NamedTuple):
    """A preset.

    Attributes:
        name: str, of the preset.
        title: str, for its card.
    """

    name: str
    title: str


PRESETS = {
    "dense": Trained("vit_micro_patch4_20_letters", "Dense ViT"),
    "soft": Trained("soft_moe_micro_patch4_25e_20_letters", "Soft MoE, a slot each"),
    "vmoe": Trained(
        "vmoe_micro_patch4_25e_20_letters", "V-MoE (K = 1, C = 1, batch priority)"
    ),
    "expert": Trained(
        "expert_choice_micro_patch4_25e_20_letters", "Expert choice (c = 1)"
    ),
}


def training_run(key, scale, letters, work, seed):
    """A training of a preset, a `Run`. That of the first seed has the preset's name."""
    longer = dataclasses.replace(scale, epochs=LONGER * scale.epochs)
    run = training(longer, {PLACEMENT: letters}, f"{PLACEMENT}_{key}", seed)
    name = PRESETS[key].name
    if seed != scale.seeds[0]:
        return dataclasses.replace(
            run,
            name=f"{name}_seed{seed}",
            measure=lambda model: {"letters": measure_letters(model, letters, scale)},
        )

    def save_and_measure(classifier):
        classifier = with_public_router(classifier, longer, key)
        directory = save_weights(classifier, work, name)
        for file in directory.glob("*.weights.h5"):
            in_half_precision(file)
        return measure(directory, letters, scale)

    return dataclasses.replace(run, name=name, measure=save_and_measure)


def with_public_router(classifier, scale, key):
    """The same classifier without the view of the study's routers."""
    model = MODELS[key]
    if key == "vmoe":
        config = model.router(scale).get_config()
        router = routers.SoftmaxTokenChoiceRouter.from_config(config)
        model = dataclasses.replace(model, router=lambda scale: router)
    public = build(scale, model, classifier.num_classes)
    public.set_weights(classifier.get_weights())
    return public


def measure(directory, letters, scale):
    """Accuracy on letters, and few-shot and fine-tuned accuracy on digits."""
    keras.utils.set_random_seed(0)
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(str(directory))
    return {
        "letters": measure_letters(classifier, letters, scale),
        **measure_digits(classifier, directory),
    }


# === Handwritten digits, which no preset saw ===


def measure_digits(classifier, directory):
    """Few-shot accuracy of a classifier, and accuracies after `fit`.

    Args:
        classifier: `ViTMoEImageClassifier` of square images.
        directory: path of its preset, from which each `fit` starts.

    Returns:
        dict that JSON can hold: `"few_shot"` of the model and of raw pixels,
        `"fine_tuned"` and `"fine_tuning_seconds"`, one for each seed.
    """
    size = classifier.backbone.image_shape[0]
    train_set, test_set = (datasets.digits(size, s) for s in ("train", "test"))
    few_shot = {
        name: _probe(backbone, train_set, test_set)
        for name, backbone in (("model", classifier), ("raw pixels", None))
    }
    fine_tuned = [
        _fine_tune(directory, train_set, test_set, seed) for seed in range(_SEEDS)
    ]
    return {
        "few_shot": few_shot,
        "fine_tuned": [accuracy for accuracy, _ in fine_tuned],
        "fine_tuning_seconds": [round(seconds, 1) for _, seconds in fine_tuned],
    }


def describe_digits(run):
    """The part of a card on digits.

    Args:
        run: dict, with what `measure_digits` returned.

    Returns:
        str, Markdown without an empty line at its end.
    """
    rows = "\n".join(
        f"| {shots} | {spread(run['few_shot']['model'][str(shots)])} "
        f"| {spread(run['few_shot']['raw pixels'][str(shots)])} |"
        for shots in _SHOTS
    )
    return f"""\
**Handwritten digits, few-shot** (scikit-learn's, never seen in training; linear probe,
mean ± standard deviation over {_DRAWS} support draws, penalty chosen on
training images):

| shots | this model | raw pixels |
|---|---|---|
{rows}

**Handwritten digits, fine-tuned** with `fit` on one half (901 images,
{_EPOCHS} epochs, AdamW, cosine decay), tested
on the other half (896 images): {spread(run["fine_tuned"])} over
{_SEEDS} seeds, {np.mean(run["fine_tuning_seconds"]):.0f} s each."""


def _probe(backbone, train_set, test_set):
    result = evaluation.few_shot_probe(
        backbone, train_set, test_set, shots=_SHOTS, seeds=_DRAWS
    )
    return {str(shots): list(map(float, r.accuracies)) for shots, r in result.items()}


def _fine_tune(directory, train_set, test_set, seed):
    """Accuracy on one half of the digits after `fit` on the other, and the seconds."""
    keras.utils.set_random_seed(seed)
    classifier = models.ViTMoEImageClassifier.from_preset(
        str(directory), num_classes=10
    )
    started = time.perf_counter()
    steps = _EPOCHS * -(-len(train_set[0]) // _BATCH_SIZE)
    classifier.compile(adamw(1e-3, steps, 50, weight_decay=0.01), metrics=["accuracy"])
    classifier.fit(*train_set, batch_size=_BATCH_SIZE, epochs=_EPOCHS, verbose=2)
    accuracy = classifier.evaluate(*test_set, verbose=0, return_dict=True)["accuracy"]
    return float(accuracy), time.perf_counter() - started


# === Cards ===


def describe(key, scale, directory, runs):
    """Write the metadata and the card of a preset."""
    run, *_ = runs
    title = PRESETS[key].title
    metadata = write_metadata(
        directory,
        kind="trained",
        description=f"{title}, {scale.hidden_dim} wide, {scale.num_layers} blocks, "
        f"trained on letters anywhere in {IMAGE_SIZE} x {IMAGE_SIZE} pixels.",
        source="experiments/letters/presets.py",
        licence="Apache-2.0",
        training={
            "seed": run["seed"],
            "images": LONGER * scale.steps * scale.batch_size,
            "learning_rate": scale.learning_rate,
            **machine(),
        },
        **accuracies(run),
    )
    name = PRESETS[key].name
    write_card(directory, name, card(name, metadata, runs, scale))


def accuracies(run):
    """Entries of the metadata with what was measured, of one training."""
    found = {"digits, fine-tuned": run["fine_tuned"]}
    for shots, values in run["few_shot"]["model"].items():
        found[f"digits, few-shot, {shots} of a class"] = values
    for metric, name in (("accuracy", "trained fonts"), ("new_fonts", "new fonts")):
        found[f"letters, {name}"] = run["letters"][metric]
    for shots, value in run["letters"]["few_shot"].items():
        found[f"letters, few-shot, never seen, {shots} of a class"] = value
    return means(found)


def card(name, metadata, runs, scale):
    """Text of the card of a preset."""
    run, *_ = runs
    rows = "\n".join(
        f"| {r['seed']} | {r['letters']['accuracy']:.3f} "
        f"| {r['letters']['new_fonts']:.3f} |"
        for r in runs
    )
    letters, steps = run["letters"], LONGER * scale.steps
    return f"""# {name}

{metadata["description"]} {metadata["parameter_count"]:,} parameters.

```python
import keras_softmoe as ksm

name = "{name}"
classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
```

**Data.** {metadata["training"]["images"]:,} synthetic pictures of 2,600 letters and
signs from the fonts that ship with matplotlib (`experiments/letters`, seed
{run["seed"]}), each seen once.

**Training.** `experiments/letters/presets.py`: AdamW, peak learning rate
{scale.learning_rate:g}, {scale.warmup_steps} steps of warm-up, cosine decay, {steps:,}
steps of {scale.batch_size} pictures. {run["minutes"]:.0f} minutes by the clock, beside
other trainings, with the backend `{metadata["training"]["backend"]}` on
{metadata["training"]["processor"]}. The file holds the weights in float16; all that
follows was measured on them.

**Letters.** Accuracy on {scale.test_images:,} new pictures: {letters["accuracy"]:.3f}
in the fonts that were trained on, {letters["new_fonts"]:.3f} in three others. A linear
probe on 256 classes that were never trained on: {letters["few_shot"]["1"]:.3f} with one
picture of a class, {letters["few_shot"]["5"]:.3f} with five.

**All trainings** (the weights are of the first):

| seed | accuracy | in new fonts |
|---|---|---|
{rows}

{describe_digits(run)}

**Limits.** A small model for trying the library out, not for photographs.

**Licence.** Apache-2.0.
"""


def main(arguments=None):
    """Train and write what is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.letters.presets",
        description="Train the presets of letters.",
    )
    parser.add_argument("--scale", choices=SCALES, default="study")
    parser.add_argument("--only", choices=PRESETS, nargs="+", default=tuple(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", help="these seeds")
    parser.add_argument("--work", type=Path, default=WORK / "presets")
    parser.add_argument("--output", type=Path, default=ROOT / "presets")
    parser.add_argument("--records", type=Path, default=RECORDS)
    arguments = parser.parse_args(arguments)
    lower_priority()
    scale = SCALES[arguments.scale]
    known = scale.seeds[:NUM_SEEDS]
    check_before([arguments.work], arguments.seeds or known, known)
    letters = Letters(load_bank(arguments.work, scale.candidates), PLACEMENT)
    for key in arguments.only:
        runs = [training_run(key, scale, letters, arguments.work, s) for s in known]
        for run in runs:
            if run.seed in (arguments.seeds or known):
                finish(run, arguments.work, on_step=wait_while_paused, verbose=1)
        publish(
            runs,
            arguments.work,
            arguments.output / PRESETS[key].name,
            arguments.records,
            partial(describe, key, scale),
        )


if __name__ == "__main__":
    main()
