"""One trained model under many settings of its routers."""

import contextlib
import copy
import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_softmoe.evaluation._cost import gflop_per_image


class SweepRow(NamedTuple):
    """What a model does under some settings of its routers.

    Attributes:
        settings: dict of what was changed, as `set_routing` takes it.
        accuracies: `(seeds,)` float64 array, one for each order of the images.
        gflop_per_image: float, as in `Cost`. `None` if it is not known.
        seconds_per_image: float, the median of the measured times to predict all
            images, divided by their number. `None` if it was not measured.
        relative_time: float, the median of the ratios of these times to those of the
            model before its settings were changed; below 1 is faster. `None` if it was
            not measured.
    """

    settings: dict
    accuracies: np.ndarray
    gflop_per_image: float | None = None
    seconds_per_image: float | None = None
    relative_time: float | None = None


def routing_sweep(
    classifier: keras.Model,
    test: tuple,
    seeds: int = 1,
    batch_size: int = 64,
    verbose: int = 1,
    time_repeats: int = 0,
    **grid,
) -> list:
    """Accuracy and cost of a classifier under each combination of router settings.

    Nothing is trained. Where groups span several images, whether a token gets a slot
    depends on the images beside it: each seed puts them in another order. The settings
    are put back at the end, also after an error.

    Times are those of `predict` on all images, with preprocessing and without the time
    to compile. The model and a copy of it that keeps its settings take turns, so that
    both meet the same load of the machine.

    Args:
        classifier: `ViTMoEImageClassifier` with MoE blocks.
        test: pair of `(N, height, width, channels)` images, as `predict` takes them,
            and `(N,)` int labels.
        seeds: int, number of orders of the images (seeds 0, 1, ...).
        batch_size: int, images in a batch.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.
        time_repeats: int, how often the time of each combination is measured. 0: times
            are not measured.
        **grid: for each setting that `set_routing` takes, a sequence of values.

    Returns:
        list of `SweepRow`, the last setting of `grid` varying fastest.

    Raises:
        ValueError: if images and labels differ in number, the grid is empty,
            `time_repeats` is negative, or `set_routing` refuses a setting (before
            anything is evaluated).

    Source: V-MoE, section 4.2 and appendices C.2 and E.4 (capacity, priority and the
    number of experts at inference); tables 10 and 11 give FLOP and time as well.

    Examples:
        >>> rows = ksm.evaluation.routing_sweep(
        ...     sparse,
        ...     (images, labels),
        ...     seeds=1,
        ...     priority=("max", "position"),
        ...     capacity_factor=(1.05, 0.25),
        ... )
        >>> rows[0].settings, rows[0].accuracies.mean(), rows[0].gflop_per_image
        >>> best = ksm.evaluation.pareto_front(rows)
    """
    if not grid or not all(len(values) for values in grid.values()):
        raise ValueError(
            "A sweep needs settings and values, for example "
            f"`capacity_factor=(1.0, 0.5)`. Received: {grid}."
        )
    combinations = [
        dict(zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    ]
    if time_repeats < 0:
        raise ValueError(
            "`time_repeats` counts the measurements of a time, 0 for none. Received: "
            f"time_repeats={time_repeats}."
        )
    images, labels = check_test(test)
    gflop = []
    with keep_settings(classifier):
        for settings in combinations:
            classifier.set_routing(**settings)
            gflop.append(gflop_per_image(classifier))
    unchanged = copy.deepcopy(classifier) if time_repeats else None
    rows = []
    progress = progress_bar(len(combinations), verbose)
    with keep_settings(classifier):
        for done, settings in enumerate(combinations, start=1):
            classifier.set_routing(**settings)
            accuracies = accuracies_of(classifier, images, labels, seeds, batch_size)
            times = ()
            if time_repeats:
                pair = classifier, unchanged
                times = _seconds(pair, images, batch_size, time_repeats)
            rows.append(SweepRow(settings, accuracies, gflop[done - 1], *times))
            progress.update(done, [("accuracy", accuracies.mean())])
    return rows


def pareto_front(rows: Sequence, cost: str = "gflop_per_image") -> list:
    """The settings that no other ones beat, neither in accuracy nor in cost.

    A row is on the front if no other one has at least its mean accuracy and at most its
    cost, and is better in one of the two. Means are compared as they are: differences
    within the spread of the seeds count as well.

    Args:
        rows: sequence of `SweepRow`, what `routing_sweep` returns; also of several
            models together.
        cost: `"gflop_per_image"`, `"seconds_per_image"` or `"relative_time"`.

    Returns:
        list of those of the rows that are on the front, the cost rising.

    Raises:
        ValueError: if there are no rows, or the cost of one is not known.

    Source: V-MoE, figures 2 and 3; Soft MoE, section 3.3 (figure 3).

    Examples:
        >>> rows = ksm.evaluation.routing_sweep(
        ...     sparse, (images, labels), capacity_factor=(1.05, 0.25)
        ... )
        >>> [row.settings for row in ksm.evaluation.pareto_front(rows)]
    """
    rows = list(rows)
    costs = costs_of(rows, cost)
    means = np.array([np.mean(row.accuracies) for row in rows])
    # (rows, rows): whether the one of the column beats that of the row
    no_worse = (costs <= costs[:, None]) & (means >= means[:, None])
    better = (costs < costs[:, None]) | (means > means[:, None])
    beaten = (no_worse & better).any(axis=1)
    order = np.argsort(costs, kind="stable")
    return [rows[index] for index in order if not beaten[index]]


def accuracies_of(classifier, images, labels, seeds, batch_size):
    """`(seeds,)` float64 array: accuracies for each order of the images."""
    accuracies = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(images))
        logits = classifier.predict(images[order], batch_size=batch_size, verbose=0)
        accuracies.append(np.mean(np.argmax(logits, axis=-1) == labels[order]))
    return np.array(accuracies)


def _seconds(pair, images, batch_size, repeats):
    """Median seconds per image of the first model, median ratio to the second one."""
    seconds = []
    for repeat in range(-1, repeats):
        found = [0.0, 0.0]
        # The first of the two changes: neither always runs after the other.
        for index in (0, 1) if repeat % 2 else (1, 0):
            started = time.perf_counter()
            pair[index].predict(images, batch_size=batch_size, verbose=0)
            found[index] = time.perf_counter() - started
        seconds.append(found)
    # The first run may have compiled.
    seconds = np.array(seconds[1:])
    ratio = np.median(seconds[:, 0] / seconds[:, 1])
    return float(np.median(seconds[:, 0]) / len(images)), float(ratio)


def costs_of(rows, cost):
    """`(rows,)` float64 array: one of the costs of `SweepRow`s.

    Raises:
        ValueError: if there are no rows, or the cost of one is not known.
    """
    accepted = SweepRow._fields[2:]
    if not rows or cost not in accepted:
        raise ValueError(
            "A front is one of `SweepRow`s, what `evaluation.routing_sweep` returns, "
            f"and one of their costs, {', '.join(map(repr, accepted))}. Received: "
            f"{len(rows)} rows, cost={cost!r}."
        )
    costs = [getattr(row, cost) for row in rows]
    if None in costs:
        raise ValueError(
            "Each row has to have the cost. Received: "
            f"cost={cost!r} and {rows[costs.index(None)]}. Times are measured by "
            "`routing_sweep(..., time_repeats=5)`."
        )
    return np.array(costs, "float64")


@contextlib.contextmanager
def keep_settings(model):
    """Scope at whose end the mutable settings of all routers are as before."""
    before = {
        layer: {name: getattr(router, name) for name in router.mutable_settings}
        for layer, router in model.routers.items()
    }
    try:
        yield
    finally:
        for layer, settings in before.items():
            model.set_routing(layers=[layer], **settings)


def check_test(test):
    """Images and labels as arrays; raises unless they are equally many."""
    images, labels = (np.asarray(array) for array in test)
    if len(images) != len(labels) or not len(images):
        raise ValueError(
            "A test set has one label for each image, and at least one image. "
            f"Received: {len(images)} images, {len(labels)} labels."
        )
    return images, labels


def progress_bar(total, verbose):
    """A progress bar over so many settings."""
    return keras.utils.Progbar(total, verbose=verbose, unit_name="setting")
