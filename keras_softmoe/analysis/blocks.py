"""Load of the experts of a block, and their work by place and class."""

from typing import NamedTuple

import keras
import numpy as np

from keras_softmoe.analysis.figures import figure_method
from keras_softmoe.analysis.streaming import chooses, tokens_choose, tokens_per_input
from keras_softmoe.ops import ChoiceRouting, DenseRouting, SlotRouting

NUM_BINS = 50


class ExpertInformation(NamedTuple):
    """Mutual information of a token's expert with its place and its class, in bits.

    A router that mixes tokens has combine weights as probabilities of experts; with a
    sparse one, all experts that take a token are equally likely. Dropped ones are out.

    Attributes:
        entropy: float, the entropy of the expert. `log2(E)` if all are used equally.
        position: float, mutual information of expert and place in the sequence.
        label, label_chance: float, that of expert and class, also of shuffled classes.
    """

    entropy: float
    position: float
    label: float | None
    label_chance: float | None

    @property
    def position_share(self):
        """Float from 0 to 1: the part of the entropy that position explains."""
        return self.position / self.entropy if self.entropy else 0.0

    @property
    def label_share(self):
        """Float: the part of the entropy that the class explains, less chance."""
        if self.label is None:
            return None
        return (self.label - self.label_chance) / self.entropy if self.entropy else 0.0


class BlockStatistics(NamedTuple):
    """Routing at one block with any router, summed up over groups of tokens.

    Attributes after `demand` are of `N` inputs of `T` tokens, `None` if `T` is unknown.

    Attributes:
        block: int or str, the block, see `observe`.
        num_groups: int, groups of tokens that were routed together.
        num_tokens: int, tokens in all groups together, without padding.
        load: `(E,)` float64 array, tokens that each expert takes, over all groups. For
            routers that mix tokens, the sum of the combine weights.
        dropped: float, the share of tokens that no expert takes.
        chooses: bool, `False` for routers that mix tokens and for `IdentityRouter`.
        demand: `(E,)` float64 array, tokens that prefer each expert, whether it has
            room for them or not, by their scores. `None` for routers without.
        experts_per_image: `(N,)` int array, experts that take any token of each image.
        weight_by_position: `(T, E)` float64 array, mean weight of each expert's output
            at each place in the sequence (class token first, if there is one).
        weight_by_class: `(classes, E)` float64 array, the same over the images of each
            class, NaN for a class without images. `None` without labels.
        choice_histogram: `(K, 50)` int array: how often the largest, second largest,
            ... weight of a token's experts fell into each bin of equal width between 0
            and 1. `K` is the number of choices (2 where experts choose or mix).
        information: `ExpertInformation`.
        patch_grid: pair of ints, rows and columns of the patches of an image.

    Examples:
        >>> block = ksm.analysis.analyze(sparse, images, labels).blocks[3]
        >>> block.dropped, block.imbalance, block.information.position_share
        >>> figure = block.plot("by_class")
    """

    block: int | str
    num_groups: int
    num_tokens: int
    load: np.ndarray
    dropped: float
    chooses: bool = True
    experts_per_image: np.ndarray | None = None
    weight_by_position: np.ndarray | None = None
    weight_by_class: np.ndarray | None = None
    choice_histogram: np.ndarray | None = None
    information: ExpertInformation | None = None
    patch_grid: tuple | None = None
    demand: np.ndarray | None = None

    @property
    def imbalance(self) -> float:
        """Float, the largest load over the mean: 1 if all loads are equal.

        It may be near 1 while many tokens are dropped: see `demand_imbalance`.
        """
        return float(self.load.max() / self.load.mean())

    @property
    def demand_imbalance(self) -> float | None:
        """Float, the largest demand over the mean; `None` without a `demand`."""
        if self.demand is None:
            return None
        return float(self.demand.max() / max(self.demand.mean(), 1e-12))

    @property
    def experts_used(self) -> int:
        """Int, experts that take any token."""
        return int((self.load > 0).sum())

    plot = figure_method("blocks")


class BlockReducer:
    """Reducer to a dict from each block to its `BlockStatistics`."""

    def __init__(self, backbone, routers, labels=None):
        num_tokens = tokens_per_input(backbone)
        if labels is not None:
            labels = np.asarray(labels)
            if num_tokens is None:
                raise ValueError(
                    "`labels` need a `ViTMoEBackbone`, a `TextMoEBackbone` or a task "
                    f"that has one. Received: labels with {type(backbone).__name__}."
                )
        self._routers = routers
        self._labels = labels
        self._num_tokens = num_tokens
        self._patch_grid = getattr(backbone, "patch_grid", None)
        self._loads, self._sums = {}, {}

    def update(self, name, decision, inputs):
        router, valid = self._routers[name], decision.summary["valid"]
        if isinstance(decision.routing, DenseRouting):
            # Without padding, (G, S, E).
            weight = decision.routing.combine.sum(axis=-1) * valid[..., None]
            load = weight.sum(axis=1, dtype="float64")
            dropped = valid & ~decision.routing.dispatch.any(axis=(2, 3))
        else:
            load, dropped = decision.summary["load"], decision.summary["dropped"]
        load = load.sum(axis=0, dtype="float64")
        demand = np.zeros(1)
        selection = decision.summary.get("selection")
        if selection is not None:
            # How many tokens prefer each expert.
            choices = getattr(router, "num_selected_experts", 1)
            wanted = np.argsort(-selection, axis=-1, kind="stable")[..., :choices]
            wanted = wanted[valid].ravel()
            demand = 1.0 * np.bincount(wanted, minlength=selection.shape[-1])
        values = len(valid), valid.sum(), load, dropped.sum(), demand
        sums = self._loads.get(name, (0, 0, 0, 0, 0))
        self._loads[name] = [x + y for x, y in zip(sums, values, strict=True)]
        if self._num_tokens is None:
            return
        if name not in self._sums:
            choices = router.num_selected_experts if tokens_choose(router) else 2
            self._sums[name] = _ImageSums(choices, self._labels)
        num_images = len(keras.tree.flatten(inputs)[0])
        self._sums[name].add(decision, num_images, self._num_tokens)

    def result(self):
        found = {}
        for name, sums in self._loads.items():
            num_groups, num_tokens, load, dropped, demand = sums
            found[name] = BlockStatistics(
                block=name,
                num_groups=num_groups,
                num_tokens=int(num_tokens),
                load=load,
                dropped=float(dropped / max(num_tokens, 1)),
                chooses=chooses(self._routers[name]),
                patch_grid=self._patch_grid,
                demand=demand if demand.any() else None,
                **(self._sums[name].fields() if name in self._sums else {}),
            )
        return found


class _ImageSums:
    """Running sums over the images of one block."""

    def __init__(self, choices, labels):
        self.choices = choices
        self.labels = self.shuffled = labels
        if labels is not None:
            self.shuffled = np.random.default_rng(0).permutation(labels)
        self.num_images = self.tokens_by_position = self.weight_by_position = 0
        self.weight_by_class = self.histogram = 0
        # Probabilities of experts by place, by class, and by classes in random order.
        self.joint = [0, 0, 0]
        self.experts_per_image = []

    def add(self, decision, num_images, num_tokens):
        def by_image(values):
            # Without the images that only fill up groups.
            values = values.reshape(-1, num_tokens, *values.shape[2:])
            return values[:num_images]

        valid = by_image(decision.summary["valid"])
        # (images, tokens, E) each
        taken, weights, given = map(by_image, experts_of_tokens(decision))
        self.experts_per_image.append(taken.any(1).sum(-1))
        self.tokens_by_position += valid.sum(0)
        self.weight_by_position += weights.sum(0, dtype="float64")
        largest = -np.sort(-given[valid], axis=-1)[..., : self.choices]
        counts = [np.histogram(x, NUM_BINS, (0.0, 1.0))[0] for x in largest.T]
        self.histogram += np.stack(counts)
        probabilities = weights
        if not isinstance(decision.routing, DenseRouting):
            probabilities = taken / np.maximum(taken.sum(-1, keepdims=True), 1)
        probabilities = probabilities.astype("float64")
        self.joint[0] += probabilities.sum(axis=0)
        rows = slice(self.num_images, self.num_images + num_images)
        self.num_images += num_images
        if self.labels is not None:
            check_labels(max(rows.stop, len(self.labels)), self.labels)
            # The mean of a fully masked sequence is zero.
            count = np.maximum(valid.sum(1), 1)[:, None]
            mean = weights.sum(1, dtype="float64") / count
            classes = np.arange(self.labels.max() + 1)[:, None]
            self.weight_by_class += (classes == self.labels[rows]) @ mean
            for place, labels in enumerate((self.labels, self.shuffled), start=1):
                of_images = probabilities.sum(axis=1)
                self.joint[place] += (classes == labels[rows]) @ of_images

    def fields(self):
        """Return the attributes of `BlockStatistics` that are of images, a dict."""
        by_position = np.maximum(self.tokens_by_position, 1)[:, None]
        weight_by_class = label = chance = None
        if self.labels is not None:
            check_labels(self.num_images, self.labels)
            count = np.bincount(self.labels)[:, None]
            with np.errstate(invalid="ignore"):
                weight_by_class = self.weight_by_class / count
            label, chance = map(_information, self.joint[1:])
        positions = self.joint[0]
        information = ExpertInformation(
            _entropy(positions.sum(axis=0)), _information(positions), label, chance
        )
        return {
            "experts_per_image": np.concatenate(self.experts_per_image),
            "weight_by_position": self.weight_by_position / by_position,
            "weight_by_class": weight_by_class,
            "choice_histogram": self.histogram,
            "information": information,
        }


def experts_of_tokens(decision):
    """Return who takes a token, its weight and the router's, all `(G, S, E)`."""
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
    """Raise unless there is one label for each image."""
    if np.shape(labels) != (num_images,):
        raise ValueError(
            "Each image must have one label. Received: "
            f"{num_images} images, {len(labels)} labels of shape {np.shape(labels)}."
        )


def _information(joint):
    """Return the mutual information of rows and columns of a table, in bits."""
    apart = _entropy(joint.sum(0)) + _entropy(joint.sum(1))
    return max(apart - _entropy(joint.ravel()), 0.0)


def _entropy(weights):
    probabilities = weights[weights > 0] / weights.sum()
    return float(-np.sum(probabilities * np.log2(probabilities)))
