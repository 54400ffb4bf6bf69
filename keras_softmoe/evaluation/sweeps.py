"""One trained model under many settings of its routers."""

import contextlib
import itertools
from typing import NamedTuple

import keras
import numpy as np


class SweepRow(NamedTuple):
    """What a model does under some settings of its routers.

    Attributes:
        settings: dict of what was changed, as `set_routing` takes it.
        accuracies: `(seeds,)` float64 array, one for each order of the images.
    """

    settings: dict
    accuracies: np.ndarray


class RouterAblation(NamedTuple):
    """What a model does with some of its routers choosing at random.

    Attributes:
        learned: `(seeds,)` float64 array, accuracies with all routers as they are.
        single: dict from the index of a block to the `(seeds,)` accuracies with that
            router at random.
        cumulative: dict from the index of a block to the accuracies with the routers
            of that block and all before it at random.
    """

    learned: np.ndarray
    single: dict
    cumulative: dict


def routing_sweep(classifier, test, seeds=1, batch_size=64, verbose=1, **grid):
    """Accuracy of a trained classifier under each combination of router settings.

    Nothing is trained. Where groups span several images, whether a token gets a slot
    depends on the images beside it: each seed puts them in another order. The settings
    are put back at the end, also after an error.

    Args:
        classifier: `ViTMoEImageClassifier` with MoE blocks.
        test: pair of `(N, height, width, channels)` images, as `predict` takes them,
            and `(N,)` int labels.
        seeds: int, number of orders of the images (seeds 0, 1, ...).
        batch_size: int, images in a batch.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.
        **grid: for each setting that `set_routing` takes, a sequence of values.

    Returns:
        list of `SweepRow`, the last setting of `grid` varying fastest.

    Raises:
        ValueError: if images and labels differ in number, the grid is empty, or
            `set_routing` refuses a setting (before anything is evaluated).

    Source: V-MoE, section 4.2 and appendices C.2 and E.4 (capacity, priority and the
    number of experts at inference).

    Example:

    >>> rows = ksm.evaluation.routing_sweep(
    ...     classifier, (images, labels), seeds=5,
    ...     priority=("max", "position"), capacity_factor=(1.05, 0.5, 0.25),
    ... )
    >>> rows[0].settings, rows[0].accuracies.mean()
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
    images, labels = _check_test(test)
    with keep_settings(classifier):
        for settings in combinations:
            classifier.set_routing(**settings)
    rows = []
    bar = _bar(len(combinations), verbose)
    with keep_settings(classifier):
        for done, settings in enumerate(combinations, start=1):
            classifier.set_routing(**settings)
            accuracies = _accuracies(classifier, images, labels, seeds, batch_size)
            rows.append(SweepRow(settings, accuracies))
            bar.update(done, [("accuracy", accuracies.mean())])
    return rows


def random_routers(classifier, test, seeds=1, batch_size=64, verbose=1):
    """Accuracy with learned routers replaced by ones that choose at random.

    First one router at a time, then all routers up to a block. A random router draws
    its logits from a normal distribution and does not look at the tokens.

    Args:
        classifier: `ViTMoEImageClassifier` with routers that choose.
        test: pair of `(N, height, width, channels)` images, as `predict` takes them,
            and `(N,)` int labels.
        seeds: int, number of orders of the images (seeds 0, 1, ...); each draws other
            logits, too.
        batch_size: int, images in a batch.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        `RouterAblation`.

    Raises:
        ValueError: if images and labels differ in number, or the routers of the model
            are not ones that choose (soft, identity).

    Source: V-MoE, appendix E.1 (figures 27 and 28).

    Example:

    >>> ablation = ksm.evaluation.random_routers(classifier, (images, labels))
    >>> {layer: a.mean() for layer, a in ablation.single.items()}
    """
    images, labels = _check_test(test)
    layers = sorted(classifier.routers)
    runs = [[layer] for layer in layers]
    runs += [layers[: count + 1] for count in range(len(layers))]
    results = []
    bar = _bar(1 + len(runs), verbose)
    with keep_settings(classifier):
        classifier.set_routing(random_logits=False)
        learned = _accuracies(classifier, images, labels, seeds, batch_size)
        bar.update(1)
        for done, randomized in enumerate(runs, start=2):
            classifier.set_routing(random_logits=False)
            classifier.set_routing(layers=randomized, random_logits=True)
            results.append(_accuracies(classifier, images, labels, seeds, batch_size))
            bar.update(done)
    count = len(layers)
    return RouterAblation(
        learned,
        dict(zip(layers, results[:count], strict=True)),
        dict(zip(layers, results[count:], strict=True)),
    )


def _accuracies(classifier, images, labels, seeds, batch_size):
    accuracies = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(images))
        logits = classifier.predict(images[order], batch_size=batch_size, verbose=0)
        accuracies.append(np.mean(np.argmax(logits, axis=-1) == labels[order]))
    return np.array(accuracies)


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


def _check_test(test):
    images, labels = (np.asarray(array) for array in test)
    if len(images) != len(labels) or not len(images):
        raise ValueError(
            "A test set has one label for each image, and at least one image. "
            f"Received: {len(images)} images, {len(labels)} labels."
        )
    return images, labels


def _bar(total, verbose):
    return keras.utils.Progbar(total, verbose=verbose, unit_name="setting")
