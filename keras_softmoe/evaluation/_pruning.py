"""A LIMoE measured with fewer and fewer experts."""

from collections.abc import Callable, Sequence

import keras
import numpy as np

from keras_softmoe.evaluation._sweep import Sweep


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
