"""What the routers of a trained model do, counted over many images."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_softmoe.evaluation.routing import backbone_of, check_has_routers, prepared
from keras_softmoe.ops.routing import to_dense

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
            (at most 2 where experts choose or mix). Seats are not looked at: a choice
            that was dropped counts too.
    """

    dropped: float
    load: np.ndarray
    experts_per_image: np.ndarray
    weight_by_position: np.ndarray
    weight_by_class: np.ndarray | None
    choice_histogram: np.ndarray


def routing_statistics(
    model, images, labels=None, batch_size=64, preprocessor=None, verbose=1
):
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

    Example:

    >>> statistics = ksm.evaluation.routing_statistics(classifier, images, labels)
    >>> {layer: s.dropped for layer, s in statistics.items()}
    """
    backbone, preprocessor = backbone_of(model, preprocessor)
    check_has_routers(backbone)
    if labels is not None:
        labels = np.asarray(labels)
        if len(labels) != len(images):
            raise ValueError(
                "Each image has one label. Received: "
                f"{len(images)} images, {len(labels)} labels."
            )
    num_tokens = backbone.output["sequence_output"].shape[1]
    totals = {layer: _Total(labels) for layer in backbone.moe_layers}
    bar = keras.utils.Progbar(len(images), verbose=verbose, unit_name="image")
    for start in range(0, len(images), batch_size):
        rows = slice(start, start + batch_size)
        batch = prepared(backbone, images[rows], preprocessor)
        for layer, decision in backbone.route(batch).items():
            choices = getattr(backbone.routers[layer], "num_selected_experts", 2)
            values = _by_image(decision, len(batch), num_tokens, backbone.group_images)
            totals[layer].add(rows, choices, *values)
        bar.update(min(start + batch_size, len(images)))
    return {layer: total.statistics() for layer, total in totals.items()}


def _by_image(decision, num_images, num_tokens, group_images):
    """Seats, weights and choice weights, all `(images, tokens, E)`, without padding."""
    routing, summary = decision
    dense = to_dense(routing, num_tokens * (group_images or num_images))
    # (G, S, E)
    seats, weights = (ops.convert_to_numpy(ops.sum(x, axis=-1)) for x in dense)
    given = summary.get("probabilities")
    given = weights if given is None else ops.convert_to_numpy(given)
    num_experts = seats.shape[-1]
    return tuple(
        values.reshape(-1, num_tokens, num_experts)[:num_images]
        for values in (seats, weights, given)
    )


class _Total:
    """Running sums over the images of one block."""

    def __init__(self, labels):
        self.labels = labels
        self.num_images = self.dropped = self.load = 0
        self.weight_by_position = self.histogram = 0
        self.experts_per_image = []
        if labels is not None:
            self.num_classes = int(labels.max()) + 1
            self.weight_by_class = 0

    def add(self, rows, choices, seats, weights, given):
        self.num_images += len(seats)
        taken = seats > 0
        self.dropped += np.sum(~taken.any(-1))
        soft = not np.all((seats == 0) | (seats == 1))
        self.load += (weights if soft else seats).sum((0, 1), dtype="float64")
        self.experts_per_image.append(taken.any(1).sum(-1))
        self.weight_by_position += weights.sum(0, dtype="float64")
        if self.labels is not None:
            member = np.arange(self.num_classes)[:, None] == self.labels[rows]
            self.weight_by_class += member @ weights.mean(1, dtype="float64")
        largest = -np.sort(-given, axis=-1)[..., :choices]
        self.histogram += np.stack(
            [
                np.histogram(largest[..., k], NUM_BINS, (0.0, 1.0))[0]
                for k in range(largest.shape[-1])
            ]
        )

    def statistics(self):
        num_tokens = self.weight_by_position.shape[0]
        weight_by_class = None
        if self.labels is not None:
            count = np.bincount(self.labels, minlength=self.num_classes)[:, None]
            with np.errstate(invalid="ignore"):
                weight_by_class = self.weight_by_class / count
        return RoutingStatistics(
            dropped=float(self.dropped / (self.num_images * num_tokens)),
            load=self.load / self.num_images,
            experts_per_image=np.concatenate(self.experts_per_image),
            weight_by_position=self.weight_by_position / self.num_images,
            weight_by_class=weight_by_class,
            choice_histogram=self.histogram,
        )
