"""What the routers of a trained model do, counted over many images."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe.analysis._inputs import backbone_of, check_has_routers, tokens_choose
from keras_softmoe.analysis._load import load_and_dropped
from keras_softmoe.analysis._streaming import observe
from keras_softmoe.ops import ChoiceRouting, SlotRouting
from keras_softmoe.routers import Decision

NUM_BINS = 50


class RoutingStatistics(NamedTuple):
    """Routing at one block, summed up over `N` images of `T` tokens.

    Attributes:
        dropped: float, the share of tokens that no expert takes.
        load: `(E,)` float64 array, tokens that each expert takes per image. For a soft
            router the sum of its combine weights.
        experts_per_image: `(N,)` int array, how many experts take at least one token of
            each image (all of them, for a soft router).
        weight_by_position: `(T, E)` float64 array, mean weight of each expert's output
            at each place in the sequence (class token first, if there is one); 0 where
            the expert does not take the token.
        weight_by_class: `(classes, E)` float64 array, the same mean over the tokens of
            the images of each class, NaN for a class without images. `None` without
            labels.
        choice_histogram: `(K, NUM_BINS)` int array: how often the largest, second
            largest, ... weight that the router gives to the experts of a token fell
            into each bin of equal width between 0 and 1. `K` is the number of choices
            (at most 2 where experts choose or mix). A choice that was dropped counts
            too.
    """

    dropped: float
    load: np.ndarray
    experts_per_image: np.ndarray
    weight_by_position: np.ndarray
    weight_by_class: np.ndarray | None
    choice_histogram: np.ndarray


def routing_statistics(
    model: keras.Model,
    images: ArrayLike,
    labels: ArrayLike | None = None,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> dict:
    """Count what the routers of all MoE blocks do with some images.

    Args:
        model: `ViTMoEBackbone`, or a task that has one (its `preprocessor`, if any, is
            applied to the images).
        images: `(N, height, width, channels)` array.
        labels: optional `(N,)` int array, classes counted from 0.
        batch_size: int, images routed at a time. Where groups span several images, a
            multiple of their number leaves no group partly filled but the last.
        preprocessor: callable applied to the images. By default a task's own.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        dict from the index of each MoE block to its `RoutingStatistics`.

    Raises:
        ValueError: if the model is dense, images and labels differ in number, or the
            images are not ones that the model takes.

    Source: V-MoE, appendix E.2 and E.3 (figures 7 and 29 to 32); Soft MoE, appendix B
    (dropped tokens).

    Examples:
        >>> statistics = ksm.analysis.routing_statistics(sparse, images, labels)
        >>> {layer: s.dropped for layer, s in statistics.items()}
    """
    reducer = RoutingReducer(model, labels)
    if labels is not None:
        check_labels(len(images), labels)
    (found,) = observe(model, images, [reducer], batch_size, preprocessor, verbose)
    return found


class RoutingReducer:
    """Reducer to a dict from each block to its `RoutingStatistics`, see `observe`.

    Args:
        model: `ViTMoEBackbone`, or a task that has one.
        labels: optional `(N,)` int array, classes of all images that will be seen, in
            their order, counted from 0.

    Raises:
        ValueError: if the model is dense, or, at the end, if images and labels differ
            in number.

    Examples:
        >>> reducer = ksm.analysis.RoutingReducer(sparse, labels)
        >>> (statistics,) = ksm.analysis.observe(sparse, images, [reducer])
    """

    def __init__(self, model: keras.Model, labels: ArrayLike | None = None):
        backbone, _ = backbone_of(model)
        check_has_routers(backbone)
        self._routers = backbone.routers
        self._num_tokens = backbone.output["sequence_output"].shape[1]
        self._labels = None if labels is None else np.asarray(labels)
        self._sums = {}

    def update(self, name: int | str, decision: Decision, inputs: Any) -> None:
        if name not in self._sums:
            router = self._routers[name]
            choices = router.num_selected_experts if tokens_choose(router) else 2
            self._sums[name] = _Sums(choices, self._labels)
        num_images = len(keras.tree.flatten(inputs)[0])
        self._sums[name].add(decision, num_images, self._num_tokens)

    def result(self) -> dict:
        return {name: sums.statistics() for name, sums in self._sums.items()}


class _Sums:
    """Running sums over the images of one block."""

    def __init__(self, choices, labels):
        self.choices = choices
        self.labels = labels
        self.num_images = self.dropped = self.load = self.tokens_by_position = 0
        self.weight_by_position = self.histogram = self.weight_by_class = 0
        self.experts_per_image = []

    def add(self, decision, num_images, num_tokens):
        load, dropped = load_and_dropped(decision)
        self.load += load.sum(axis=0, dtype="float64")
        self.dropped += dropped.sum()
        # (images, tokens), of what does not only fill up groups
        valid = decision.summary["valid"].reshape(-1, num_tokens)[:num_images]
        # (images, tokens, E) each
        taken, weights, given = (
            values.reshape(-1, num_tokens, values.shape[-1])[:num_images]
            for values in experts_of_tokens(decision)
        )
        self.experts_per_image.append(taken.any(1).sum(-1))
        self.tokens_by_position += valid.sum(0)
        self.weight_by_position += weights.sum(0, dtype="float64")
        if self.labels is not None:
            classes = np.arange(self.labels.max() + 1)[:, None]
            rows = slice(self.num_images, self.num_images + len(weights))
            check_labels(rows.stop, self.labels[: rows.stop])
            member = classes == self.labels[rows]
            # Of a sequence without any token the mean is zero.
            count = np.maximum(valid.sum(1), 1)[:, None]
            self.weight_by_class += member @ (weights.sum(1, dtype="float64") / count)
        self.num_images += len(weights)
        largest = -np.sort(-given[valid], axis=-1)[..., : self.choices]
        self.histogram += np.stack(
            [
                np.histogram(largest[..., k], NUM_BINS, (0.0, 1.0))[0]
                for k in range(largest.shape[-1])
            ]
        )

    def statistics(self):
        by_position = np.maximum(self.tokens_by_position, 1)[:, None]
        weight_by_class = None
        if self.labels is not None:
            check_labels(self.num_images, self.labels)
            count = np.bincount(self.labels)[:, None]
            with np.errstate(invalid="ignore"):
                weight_by_class = self.weight_by_class / count
        return RoutingStatistics(
            dropped=float(self.dropped / max(self.tokens_by_position.sum(), 1)),
            load=self.load / self.num_images,
            experts_per_image=np.concatenate(self.experts_per_image),
            weight_by_position=self.weight_by_position / by_position,
            weight_by_class=weight_by_class,
            choice_histogram=self.histogram,
        )


def experts_of_tokens(decision):
    """Which experts take a token, the weights of their outputs, the router's weights.

    Returns:
        Three `(G, S, E)` arrays, the first one of bool.
    """
    routing, summary = decision
    if isinstance(routing, SlotRouting):
        num_groups, num_tokens = summary["valid"].shape
        weights = np.zeros((num_groups, num_tokens, routing.filled.shape[1]), "float32")
        taken = weights.astype("bool")
        group, expert, _ = slots = np.nonzero(routing.filled)
        place = group, routing.token[slots], expert
        taken[place] = True
        np.add.at(weights, place, routing.gate[slots])
    elif isinstance(routing, ChoiceRouting):
        experts = np.arange(len(routing.count))
        # (G, S, K, E)
        chosen = routing.expert[..., None] == experts
        taken = (chosen & routing.kept[..., None]).any(axis=2)
        weights = (chosen * routing.gate[..., None]).sum(axis=2)
    else:
        taken = routing.dispatch.any(axis=-1)
        weights = routing.combine.sum(axis=-1)
    return taken, weights, summary.get("probabilities", weights)


def check_labels(num_images, labels):
    if len(labels) != num_images:
        raise ValueError(
            "Each image has one label. Received: "
            f"{num_images} images, {len(labels)} labels."
        )
