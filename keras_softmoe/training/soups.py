"""Greedy averages of checkpoints (model soups)."""

import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import check_whole_numbers, quote, received


class Soup(NamedTuple):
    """The parts of a soup and their scores.

    Attributes:
        chosen: tuple of ints, indices of the checkpoints in the order in which they
            were added. One that was added twice counts twice in the average.
        scores: tuple of floats, the score after each addition.
        alone: tuple of floats, the score of each single checkpoint.
    """

    chosen: tuple
    scores: tuple
    alone: tuple


def greedy_soup(
    model: keras.Model, checkpoints: Sequence, score: Callable, max_size: int = 8
) -> Soup:
    """Average checkpoints of a model, chosen greedily.

    In each round every checkpoint, also one that was chosen before, is tried as one
    more part of the average. The first with the highest score is added, until none
    raises it. At the end the model holds the soup; after an error its old weights.

    Args:
        model: a built `keras.Model`.
        checkpoints: list of files of weights or models, or of `model.get_weights()`.
        score: callable from the model to a float, better if higher, on data that were
            held out. It is called up to `len(checkpoints) * max_size` times.
        max_size: int, parts of the soup at most. LIMoE-H/14's has eight.

    Source: LIMoE, appendix A.3; Wortsman et al. 2022 (model soups), section 2.

    Examples:
        >>> classifier.compile("sgd")
        >>> def score(model):  # the higher the better, so the loss with a minus
        ...     return -model.evaluate(images, labels, verbose=0)[0]
        >>> weights = [make_classifier().get_weights() for seed in range(2)]
        >>> soup = ksm.training.greedy_soup(classifier, weights, score)
        >>> soup.chosen, soup.scores
    """
    check_whole_numbers(1, max_size=max_size)
    wrong = [w.path for w in model.weights if "float" not in w.dtype]
    if not model.weights or wrong:
        raise ValueError(
            "`model` must be built, and all its weights must be floats to be averaged. "
            f"Received: {len(model.weights)} weights, not floats: {wrong[:5]}."
        )
    is_one = isinstance(checkpoints, str | os.PathLike) or not np.iterable(checkpoints)
    if is_one or not len(checkpoints):
        raise ValueError(
            "`checkpoints` must be a list of files or of lists of arrays, one or more. "
            + received(checkpoints=checkpoints)
        )
    shapes = [tuple(weight.shape) for weight in model.weights]
    for checkpoint in checkpoints:
        is_path = isinstance(checkpoint, str | os.PathLike)
        found = checkpoint if is_path else [np.shape(array) for array in checkpoint]
        if not (os.path.isfile(checkpoint) if is_path else found == shapes):
            raise ValueError(
                "A checkpoint must be an existing file, or hold an array for each "
                "weight of the model, in the order of `model.get_weights()`: "
                f"{quote(shapes)}. Received: {quote(found)}."
            )
    before = model.get_weights()
    try:
        return _search(model, checkpoints, score, max_size)
    except BaseException:
        model.set_weights(before)
        raise


def _search(model, checkpoints, score, max_size):
    # Sums in float64, so that the order of the additions does not matter.
    total = [np.zeros(weight.shape) for weight in model.weights]
    chosen, scores, alone = [], [], ()
    while len(chosen) < max_size:
        found = []
        for index, checkpoint in enumerate(checkpoints):
            _load(model, checkpoint)
            if chosen:
                for part, weight in zip(total, model.weights, strict=True):
                    mean = (part + ops.convert_to_numpy(weight)) / (len(chosen) + 1)
                    weight.assign(mean)
            found.append(_as_number(score(model), index))
        alone = alone or tuple(found)
        index = int(np.argmax(found))
        if chosen and found[index] <= scores[-1]:
            break
        chosen.append(index)
        scores.append(found[index])
        # Read again rather than kept: there may be many.
        _load(model, checkpoints[index])
        for part, weight in zip(total, model.weights, strict=True):
            part += ops.convert_to_numpy(weight)
    for part, weight in zip(total, model.weights, strict=True):
        weight.assign(part / len(chosen))
    return Soup(tuple(chosen), tuple(scores), alone)


def _load(model, checkpoint):
    if not isinstance(checkpoint, str | os.PathLike):
        model.set_weights(checkpoint)
        return
    optimizer = getattr(model, "optimizer", None)
    model.load_weights(checkpoint, objects_to_skip=[optimizer] if optimizer else [])


def _as_number(value, index):
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(
            f"`score` returns one number. Received: {value!r} with checkpoint {index}."
        )
    return number
