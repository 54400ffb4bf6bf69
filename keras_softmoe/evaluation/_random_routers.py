"""One trained model with routers that choose at random."""

from typing import NamedTuple

import keras
import numpy as np

from keras_softmoe.checks import check_choice
from keras_softmoe.evaluation.sweeps import (
    accuracies_of,
    check_test,
    keep_settings,
    progress_bar,
)

# What `RouterAblation.control` may be -> the setting of the routers.
_CONTROLS = {"noise": True, "permuted": "permuted"}


class RouterAblation(NamedTuple):
    """What a model does with some of its routers choosing at random.

    Attributes:
        learned: `(seeds,)` float64 array, accuracies with all routers as they are.
        single: dict from the index of a block to the `(seeds,)` accuracies with that
            router at random.
        cumulative: dict from the index of a block to the accuracies with the routers
            of that block and all before it at random.
        control: `"noise"` or `"permuted"`, what random routers do, see
            `random_routers`.
    """

    learned: np.ndarray
    single: dict
    cumulative: dict
    control: str = "noise"


def random_routers(
    classifier: keras.Model,
    test: tuple,
    seeds: int = 1,
    batch_size: int = 64,
    verbose: int = 1,
    control: str = "noise",
) -> RouterAblation:
    """Accuracy with learned routers replaced by ones that choose at random.

    First one router at a time, then all routers up to a block.

    Args:
        classifier: `ViTMoEImageClassifier` with routers that choose.
        test: pair of `(N, height, width, channels)` images, as `predict` takes them,
            and `(N,)` int labels.
        seeds: int, number of orders of the images (seeds 0, 1, ...); each draws other
            logits, too.
        batch_size: int, images in a batch.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.
        control: what a random router does. `"noise"`: it draws its logits from a normal
            distribution and does not look at the tokens. `"permuted"`: it permutes the
            logits that it has learned among the experts, in another order for each
            token; experts are chosen at random, while the weights of their outputs are
            distributed as in the trained model.

    Returns:
        `RouterAblation`.

    Raises:
        ValueError: if images and labels differ in number, `control` is unknown, or the
            routers of the model are not ones that choose (soft, identity).

    Source: V-MoE, appendix E.1 (figures 27 and 28, `"noise"`). Of the other control it
    says that "the output weights" are permuted, to avoid a shift of the distribution of
    the weights that are applied; taken here for what a router gives out for each token,
    not for its kernel.

    Examples:
        >>> ablation = ksm.evaluation.random_routers(sparse, (images, labels), seeds=1)
        >>> {layer: a.mean() for layer, a in ablation.single.items()}
    """
    check_choice("control", control, tuple(_CONTROLS))
    images, labels = check_test(test)
    layers = sorted(classifier.routers)
    runs = [[layer] for layer in layers]
    runs += [layers[: count + 1] for count in range(len(layers))]
    results = []
    progress = progress_bar(1 + len(runs), verbose)
    with keep_settings(classifier):
        classifier.set_routing(random_logits=False)
        learned = accuracies_of(classifier, images, labels, seeds, batch_size)
        progress.update(1)
        for done, randomized in enumerate(runs, start=2):
            classifier.set_routing(random_logits=False)
            classifier.set_routing(layers=randomized, random_logits=_CONTROLS[control])
            results.append(accuracies_of(classifier, images, labels, seeds, batch_size))
            progress.update(done)
    count = len(layers)
    return RouterAblation(
        learned,
        dict(zip(layers, results[:count], strict=True)),
        dict(zip(layers, results[count:], strict=True)),
        control,
    )
