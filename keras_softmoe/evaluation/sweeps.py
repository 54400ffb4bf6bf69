"""One trained model under many settings of its routers, or with fewer experts."""

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.evaluation.model_cost import gflop_per_image
from keras_softmoe.evaluation.sweep_table import Sweep, SweepRow


def routing_sweep(
    classifier: keras.Model,
    test: tuple,
    seeds: int = 1,
    batch_size: int = 64,
    verbose: int = 1,
    time_repeats: int = 0,
    layers: Sequence | None = None,
    **grid,
) -> Sweep:
    """Measure a classifier under each combination of router settings.

    Nothing is trained. Where groups span several images, whether a token gets a slot
    depends on the images beside it: each seed puts them in another order. The settings
    are put back at the end, also after an error.

    Times are those of `predict` on all images, with preprocessing and without the time
    to compile. The model alternates with a copy that keeps its settings, so that
    both run under the same load of the machine.

    Args:
        classifier: `ViTMoEImageClassifier` with MoE blocks.
        test: pair of `(N, height, width, channels)` images, as `predict` takes them,
            and `(N,)` int labels.
        seeds: int, number of orders of the images (seeds 0, 1, ...).
        batch_size: int, images in a batch.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.
        time_repeats: int, how often the time of each combination is measured. 0: times
            are not measured.
        layers: sequence of int, the MoE blocks whose routers are changed. All if
            `None`. It becomes a setting of the rows, so that sweeps of several blocks
            can be joined: `sum(sweeps, start=ksm.evaluation.Sweep(()))`.
        **grid: for each setting that `set_routing` takes, a sequence of values.
            `random_logits=(False, True, "permuted")` compares learned routers with
            ones that draw their logits at random, or permute the learned logits among
            the experts, token by token.

    Returns:
        `Sweep` with the score `"accuracy"`, one value for each seed, and the costs. The
        last setting of `grid` varies fastest.

    Raises:
        ValueError: if images and labels differ in number, the grid is empty,
            `time_repeats` is negative, or `set_routing` refuses a setting (before
            anything is evaluated).

    Source: V-MoE, section 4.2 and appendices C.2 and E.4 (capacity, priority and the
    number of experts at inference); tables 10 and 11 give FLOP and time as well.
    Appendix E.1 (figures 27 and 28) for `random_logits=True`. As the other control the
    paper permutes "the output weights", to keep the distribution of the applied
    weights; here these are the logits of each token, not the router's kernel.

    Examples:
        >>> sweep = ksm.evaluation.routing_sweep(
        ...     sparse,
        ...     (images, labels),
        ...     seeds=1,
        ...     priority=("max", "position"),
        ...     capacity_factor=(1.05, 0.25),
        ... )
        >>> row = sweep.rows[0]
        >>> row.settings, row.scores["accuracy"].mean(), row.gflop_per_image
        >>> figure = sweep.plot("capacity_factor", by="priority")

        One router at a time that draws its logits at random:

        >>> sweeps = [
        ...     ksm.evaluation.routing_sweep(
        ...         sparse, (images, labels), layers=[block], random_logits=(True,)
        ...     )
        ...     for block in sparse.routers
        ... ]
        >>> random = sum(sweeps, start=ksm.evaluation.Sweep(()))
        >>> figure = random.plot("layers", by="random_logits")
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
    check_whole_numbers(0, time_repeats=time_repeats)
    images, labels = _check_test(test)
    chosen = {} if layers is None else {"layers": tuple(layers)}
    combinations = [{**chosen, **settings} for settings in combinations]
    gflop = []
    with keep_settings(classifier):
        for settings in combinations:
            classifier.set_routing(**settings)
            gflop.append(gflop_per_image(classifier))
    unchanged = copy.deepcopy(classifier) if time_repeats else None
    rows = []
    progress = keras.utils.Progbar(
        len(combinations), verbose=verbose, unit_name="setting"
    )
    with keep_settings(classifier):
        for done, settings in enumerate(combinations, start=1):
            classifier.set_routing(**settings)
            accuracies = _accuracies(classifier, images, labels, seeds, batch_size)
            times = ()
            if time_repeats:
                pair = classifier, unchanged
                times = _seconds(pair, images, batch_size, time_repeats)
            scores = {"accuracy": accuracies}
            rows.append(SweepRow(settings, scores, gflop[done - 1], *times))
            progress.update(done, [("accuracy", accuracies.mean())])
    return Sweep(rows)


def _accuracies(classifier, images, labels, seeds, batch_size):
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
    """Images and labels as arrays; raises unless they are equally many."""
    images, labels = (np.asarray(array) for array in test)
    if len(images) != len(labels) or not len(images):
        raise ValueError(
            "A test set has one label for each image, and at least one image. "
            f"Received: {len(images)} images, {len(labels)} labels."
        )
    return images, labels


# === Fewer experts ===


def pruning_curve(
    model: keras.Model,
    usage: dict,
    metric: Callable,
    num_experts: Sequence | None = None,
    methods: Sequence = ("router_pred", "router_drop"),
    verbose: int = 1,
    name: str = "accuracy",
) -> Sweep:
    """Measure a LIMoE that keeps only the experts that a modality uses most.

    Nothing is trained, and the model stays as it is. One pruned model is held at a
    time.

    Args:
        model: `LIMoEBackbone` with `routers.LIMoERouter`s, or a `LIMoEContrastive`.
        usage: dict from each MoE block to an `(E,)` array, how much the modality uses
            each expert, as for `models.prune_experts`: counted by `analysis.analyze`,
            or averaged during training by `analysis.RoutingMonitor`.
        metric: callable from a pruned model, of the same class as `model`, to a number,
            or to several ones, such as one for each seed: zero-shot accuracy,
            retrieval, ...
        num_experts: sequence of ints, how many experts to keep in each block. By
            default all of them, half, a quarter, ..., down to the choices of a token.
        methods: sequence of str, ways to prune, see `models.prune_experts`.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.
        name: str, the name of the metric in the rows.

    Returns:
        `Sweep` with the settings `"experts_kept"`, rising, and `"method"`, and the
        metric as its score. Its baseline `"not pruned"` is the model as it is.

    Raises:
        ValueError: as `models.prune_experts`, or if there is nothing to measure.

    Source: LIMoE, appendix E.4 (figures 14 and 15).

    Examples:
        >>> # How many experts does text need?
        >>> names = ["red circle", "blue star"]
        >>> whole = limoe.class_embeddings(names, ["a {}"])
        >>> def likeness(encoder):
        ...     classes = encoder.class_embeddings(names, ["a {}"])
        ...     return (classes * whole).sum(-1).mean()
        >>> statistics = ksm.analysis.analyze(limoe, captions=captions).modalities
        >>> usage = {block: s.routed["text"] for block, s in statistics.items()}
        >>> curve = ksm.evaluation.pruning_curve(
        ...     limoe, usage, likeness, num_experts=(4, 8), name="cosine"
        ... )
        >>> figure = curve.plot("experts_kept", "cosine", by="method")
    """
    # On first use, since `models` imports KerasHub.
    from keras_softmoe.models import prune_experts

    backbone = getattr(model, "backbone", model)
    if num_experts is None:
        num_experts = _halves(getattr(backbone, "routers", {}).values())
    num_experts = sorted(set(num_experts))
    methods = list(methods)
    if not num_experts or not methods:
        raise ValueError(
            "A curve needs numbers of experts and ways to prune. Received: "
            f"num_experts={num_experts}, methods={methods}."
        )

    def measure(pruned):
        if backbone is not model:
            pruned = type(model)(pruned, model.preprocessor)
        return np.atleast_1d(np.asarray(metric(pruned), "float64"))

    total = len(num_experts) * len(methods)
    bar = keras.utils.Progbar(1 + total, verbose=verbose, unit_name="model")
    rows = []
    # The largest first: an error in the usage comes before work starts.
    for count in reversed(num_experts):
        for method in methods:
            pruned = prune_experts(model, usage, count, method)
            settings = {"experts_kept": count, "method": method}
            rows.append((settings, {name: measure(pruned)}))
            bar.add(1)
    whole = np.atleast_1d(np.asarray(metric(model), "float64"))
    bar.add(1)
    rows.sort(key=lambda row: row[0]["experts_kept"])
    return Sweep(rows, {"not pruned": whole})


def _halves(routers):
    """Return all experts, half of them, ..., down to the choices of a token."""
    count = min((router.num_experts for router in routers), default=1)
    least = max(
        (getattr(router, "num_selected_experts", 1) for router in routers), default=1
    )
    found = []
    while count >= least:
        found.append(count)
        count //= 2
    return found
