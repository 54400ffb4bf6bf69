"""Greedy averages of checkpoints (model soups)."""

import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import check_whole_numbers, quote

_SUFFIXES = (".weights.h5", ".weights.json", ".keras")


class Soup(NamedTuple):
    """The parts of a soup and their scores.

    Attributes:
        chosen: tuple of ints, indices of the checkpoints in the order in which they
            were added. One that was added twice counts twice in the average.
        scores: tuple of floats, the score after each addition; the last one is the
            soup's.
        alone: tuple of floats, the score of each checkpoint by itself.
    """

    chosen: tuple
    scores: tuple
    alone: tuple


def greedy_soup(
    model: keras.Model,
    checkpoints: Sequence,
    score: Callable,
    max_size: int = 8,
    verbose: int = 1,
) -> Soup:
    """Average checkpoints of a model, chosen greedily.

    The soup starts with the checkpoint of the highest score. Then each checkpoint,
    also one that is already in it, is tried as one more part of the average, and the
    one that raises the score most is added; until none raises it, or the soup has
    `max_size` parts. Of equal scores the earlier checkpoint wins. The score is computed
    up to `len(checkpoints) * max_size` times: take a quick one and, since it is
    selected for, not the one that you report.

    At the end the model holds the soup. All its weights are averaged in float64, moving
    statistics too. The state of the optimizer does not change. After an error the model
    has its old weights. Memory holds two copies of the weights, one of them in float64,
    for any number of files.

    Args:
        model: a built `keras.Model`.
        checkpoints: list of files that `model.save_weights` or `model.save` wrote
            (`.weights.h5`, `.weights.json`, `.keras`), or of lists of arrays like
            `model.get_weights()`. All from models of this architecture; usually from
            one training.
        score: callable from the model to a float, better if higher, such as the
            accuracy on images that were held out.
        max_size: int, parts of the soup at most. LIMoE-H/14's has eight.
        verbose: 0 for silence, 1 for a progress bar.

    Returns:
        `Soup`.

    Raises:
        ValueError: if there are no checkpoints, one is not a file or does not fit the
            model, a score is not a number, or the weights cannot be averaged.

    Source: LIMoE, appendix A.3 ("Checkpoint souping"), after Wortsman et al. 2022
    (model soups), section 2. Whether LIMoE tries all checkpoints for each place or one
    after the other is not said.

    Examples:
        >>> classifier.compile("sgd")
        >>> def score(model):  # the higher the better, so the loss with a minus
        ...     return -model.evaluate(images, labels, verbose=0)[0]
        >>> weights = [make_classifier().get_weights() for seed in range(2)]
        >>> soup = ksm.training.greedy_soup(classifier, weights, score)
        >>> soup.chosen, soup.scores
    """
    check_whole_numbers(1, max_size=max_size)
    _check_model(model)
    checkpoints = _check_checkpoints(model, checkpoints)
    before = model.get_weights()
    try:
        return _search(model, checkpoints, score, max_size, verbose)
    except BaseException:
        model.set_weights(before)
        raise


def _search(model, checkpoints, score, max_size, verbose):
    bar = keras.utils.Progbar(
        None, verbose=verbose, stateful_metrics=["parts", "score"], unit_name="score"
    )
    total = [np.zeros(weight.shape) for weight in model.weights]
    chosen, scores, alone, tried = [], [], (), 0
    while len(chosen) < max_size:
        found = []
        for index, checkpoint in enumerate(checkpoints):
            _load(model, checkpoint)
            _assign_mean(model, total, len(chosen) + 1)
            found.append(_as_number(score(model), index))
            best = max(found) if not chosen else max(*found, scores[-1])
            tried += 1
            bar.update(tried, [("parts", len(chosen) + 1), ("score", best)])
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
    bar.update(tried, finalize=True)
    return Soup(tuple(chosen), tuple(scores), alone)


def _load(model, checkpoint):
    if not isinstance(checkpoint, str):
        model.set_weights(checkpoint)
        return
    optimizer = getattr(model, "optimizer", None)
    model.load_weights(checkpoint, objects_to_skip=[optimizer] if optimizer else [])


def _assign_mean(model, total, size):
    """Assign the mean of the model's weights and of the parts so far to the model."""
    # Averaging with nothing would only round-trip the weights.
    if size > 1:
        for part, weight in zip(total, model.weights, strict=True):
            weight.assign((part + ops.convert_to_numpy(weight)) / size)


# === Checks ===


def _check_model(model):
    wrong = [w.path for w in model.weights if "float" not in w.dtype]
    if not model.weights or wrong:
        raise ValueError(
            "`model` must be built, and all its weights must be floats to be averaged. "
            f"Received: {len(model.weights)} weights, not floats: {wrong[:5]}. Build "
            "it by a call; quantize it afterwards."
        )


def _check_checkpoints(model, checkpoints):
    """Return a list of paths as strings, and of lists of arrays unchanged."""
    is_one = isinstance(checkpoints, str | os.PathLike) or not np.iterable(checkpoints)
    listed = [] if is_one else list(checkpoints)
    if not listed:
        raise ValueError(
            "`checkpoints` must be a list of files or of lists of arrays, one or more. "
            f"Received: checkpoints={quote(checkpoints)}. Save some with "
            "`keras.callbacks.ModelCheckpoint(..., save_weights_only=True)`."
        )
    shapes = [tuple(weight.shape) for weight in model.weights]
    return [_check_checkpoint(checkpoint, shapes) for checkpoint in listed]


def _check_checkpoint(checkpoint, shapes):
    if isinstance(checkpoint, str | os.PathLike):
        path = os.fspath(checkpoint)
        if not path.endswith(_SUFFIXES) or not os.path.isfile(path):
            raise ValueError(
                f"A checkpoint must be an existing file ({', '.join(_SUFFIXES)}). "
                f"Received: {path!r}. Write one with `model.save_weights(path)`."
            )
        return path
    found = [np.shape(array) for array in checkpoint]
    if found != shapes:
        pairs = zip(found, shapes, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        where = f"; {first[0]} where the model has {first[1]}" if first else ""
        raise ValueError(
            "A checkpoint must be a file or hold an array for each weight of the "
            f"model, in the order of `model.get_weights()`. Received: {len(found)} "
            f"arrays for {len(shapes)} weights{where}."
        )
    return checkpoint


def _as_number(value, index):
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(
            "`score` must return one number. "
            f"Received: {value!r} with checkpoint {index}. Of several metrics return "
            "one (`model.evaluate(...)[1]`); leave a checkpoint out that diverged."
        )
    return number
