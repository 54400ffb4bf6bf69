"""Handwritten digits, which no preset saw: what one achieves on them, and its card."""

import time

import keras
import numpy as np

from experiments.lib.cards import spread
from experiments.lib.runs import adamw
from keras_softmoe import datasets, evaluation, models

_SHOTS = (1, 5, 10)
_DRAWS = 20
_SEEDS = 3
_EPOCHS = 12
_BATCH_SIZE = 32


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
