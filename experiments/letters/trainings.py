"""The trainings of the study: what each is, and what all have brought."""

import dataclasses
import time
from pathlib import Path

import keras
import numpy as np

from experiments.letters.measures import TEST_SEED, accuracy, measure
from experiments.letters.models import MODELS, build, count
from experiments.letters.pictures import PLACEMENTS
from experiments.lib.runs import (
    RESULTS,
    Run,
    adamw,
    batches_of,
    processor,
    read_json,
    result_file,
)

_TIMED_ROUNDS = 20


def training(scale, letters, name, seed):
    """The training of a model with a seed.

    Args:
        scale: `models.Scale`.
        letters: dict from placements to `pictures.Letters`.
        name: str, of the run: a placement and a key of `MODELS`, see `names_of`.
        seed: int.

    Returns:
        `Run`. Its results are those of `measures.measure`.
    """
    placement, _, key = name.partition("_")
    model, of_place = MODELS[key], letters[placement]
    epochs = model.epochs(scale)
    watched = of_place.take(scale.watched_images, TEST_SEED)

    def build_and_compile():
        classifier = build(scale, model, of_place.bank.num_classes)
        compile_with_cosine(classifier, scale, epochs * scale.steps_per_epoch)
        return classifier

    return Run(
        name=f"{name}_seed{seed}",
        seed=seed,
        build=build_and_compile,
        draw=lambda epoch: batches_of_epoch(scale, of_place, seed, epoch),
        epochs=epochs,
        steps_per_epoch=scale.steps_per_epoch,
        measure=lambda classifier: measure(classifier, of_place, scale),
        watch=lambda classifier: {"accuracy": accuracy(classifier, *watched)},
        settings={
            "learning_rate": scale.learning_rate,
            "warmup_steps": scale.warmup_steps,
            "layer_scale": scale.layer_scale,
            "batch_size": scale.batch_size,
            "steps": epochs * scale.steps_per_epoch,
        },
    )


def keeping_weights(run, directory):
    """Return the same training, after which the weights are saved too.

    Args:
        run: `Run`.
        directory: path, where everything is kept, see `weights_file`.
    """

    def keep_and_measure(classifier):
        file = weights_file(directory, run.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        classifier.save_weights(file)
        return run.measure(classifier)

    return dataclasses.replace(run, measure=keep_and_measure)


def weights_file(directory, name):
    """Path of the weights of a finished training."""
    return Path(directory, "weights", f"{name}.weights.h5")


def batches_of_epoch(scale, letters, seed, epoch):
    """Iterator over the batches of an epoch of `pictures.Letters`, and more."""
    blocks = -(-scale.steps_per_epoch * scale.batch_size // letters.block)
    for block in letters.batches(seed, epoch * blocks):
        yield from batches_of(*block, scale.batch_size)


def compile_with_cosine(classifier, scale, steps):
    """Compile with AdamW, whose rate rises and then falls to 0 along a cosine."""
    compile_with(
        classifier,
        adamw(
            scale.learning_rate,
            steps,
            scale.warmup_steps,
            scale.weight_decay,
            scale.clip_norm,
        ),
    )


def compile_with(classifier, optimizer):
    """Compile with the loss of the study."""
    classifier.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=None,
    )


def names_of():
    """All placements and models, `"anywhere_dense"` and so on, a list of str."""
    return [
        f"{placement}_{key}"
        for placement in PLACEMENTS
        for key, model in MODELS.items()
        if placement in model.seeds_at
    ]


def seeds_of(name, scale):
    """Seeds of a run that `names_of` names, a tuple of ints."""
    placement, _, key = name.partition("_")
    return MODELS[key].seeds(scale, placement)


def gather(scale, directory, num_classes):
    """All that is finished, a dict that JSON can hold.

    Returns:
        dict: `"models"`, what each costs; `"runs"`, for each the list of results, a
        dict with a `"seed"` each; `"seconds"`, of their trainings; `"steps"`, from
        `time_steps`, if that was done.
    """
    found = {"scale": scale.name, "models": {}, "runs": {}, "seconds": {}}
    for name in names_of():
        placement, _, key = name.partition("_")
        model = MODELS[key]
        found["models"][name] = count(scale, model, num_classes)
        for seed in model.seeds(scale, placement):
            file = result_file(directory, f"{name}_seed{seed}")
            if file.exists():
                kept = read_json(file, RESULTS)
                row = {"seed": seed, **kept["results"]}
                found["runs"].setdefault(name, []).append(row)
                seconds = round(kept["times"]["training_seconds"])
                found["seconds"].setdefault(name, []).append(seconds)
    times = Path(directory, "steps.json")
    if times.exists():
        found["steps"] = read_json(times, ())
    return found


def time_steps(scale, letters, names):
    """Processor seconds of a step of each model over those of the dense one.

    The steps of all models alternate, so that they meet the same load.

    Returns:
        dict from names to ratios, and `"seconds"`, of a step of the first dense model,
        `"drawing"`, the part of that which it takes to draw the pictures, and
        `"processor"`.
    """
    steps = {}
    for name in ["anywhere_dense", *names]:
        placement, _, key = name.partition("_")
        of_place = letters[placement]
        classifier = build(scale, MODELS[key], of_place.bank.num_classes)
        compile_with_cosine(classifier, scale, scale.steps)
        images, labels = next(of_place.batches(0, 0))
        batch = classifier.preprocess_samples(
            images[: scale.batch_size], labels[: scale.batch_size]
        )
        # Prepared images: what is timed is the model.
        classifier.preprocessor = None
        steps[name] = lambda model=classifier, batch=batch: model.train_on_batch(*batch)
    for step in steps.values():
        step(), step()
    seconds = {name: [] for name in steps}
    for _ in range(_TIMED_ROUNDS):
        for name, step in steps.items():
            seconds[name].append(_seconds(step))
    dense = np.array(seconds["anywhere_dense"])
    drawn = letters["anywhere"].batches(0, 0)
    drawing = [_seconds(lambda: next(drawn)) for _ in range(_TIMED_ROUNDS)]
    per_batch = np.median(drawing) * scale.batch_size / letters["anywhere"].block
    ratios = {
        name: round(float(np.median(np.array(seconds[name]) / dense)), 3)
        for name in names
    }
    return {
        **ratios,
        "seconds": round(float(np.median(dense)), 4),
        "drawing": round(float(per_batch / np.median(dense)), 4),
        "processor": f"{processor()}, {keras.config.backend()}",
    }


def _seconds(function):
    started = time.process_time()
    function()
    return time.process_time() - started
