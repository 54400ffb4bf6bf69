"""How much the place and the class of a token tell about its expert."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe.analysis._inputs import backbone_of, check_has_routers
from keras_softmoe.analysis._statistics import check_labels, experts_of_tokens
from keras_softmoe.analysis._streaming import observe
from keras_softmoe.ops import DenseRouting
from keras_softmoe.routers import Decision


class ExpertInformation(NamedTuple):
    """Mutual information of a token's expert with its place and its class, in bits.

    The expert of a token is seen as a random variable: of a router that mixes tokens
    expert `e` has the probability that is the token's combine weight for it, of a
    sparse one all experts that take the token are equally likely. Tokens that no expert
    takes are left out.

    Attributes:
        entropy: float, the entropy of the expert. `log2(E)` where all are used alike.
        position: float, the mutual information of the expert and the place in the
            sequence.
        label: float, that of the expert and the class of the image. `None` without
            labels.
        label_chance: float, the same with the labels in a random order: what so few
            images give by chance. `None` without labels.
    """

    entropy: float
    position: float
    label: float | None
    label_chance: float | None

    @property
    def position_share(self):
        """Float from 0 to 1: the part of the expert's entropy that position explains.

        At 1 a token's place alone says which expert it gets, as of an
        `IdentityRouter`.
        """
        return self.position / self.entropy if self.entropy else 0.0

    @property
    def label_share(self):
        """Float: the part of the entropy that the class explains, less chance.

        `None` without labels.
        """
        if self.label is None:
            return None
        return (self.label - self.label_chance) / self.entropy if self.entropy else 0.0


def expert_information(
    model: keras.Model,
    images: ArrayLike,
    labels: ArrayLike | None = None,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> dict:
    """How much of the choice of an expert is explained by position, and by class.

    Experts that follow the place of a patch, not what it shows, are of use only where
    the place tells something: use this to see which of the two a model has learned.

    Args:
        model: `ViTMoEBackbone`, or a task that has one (its `preprocessor`, if any, is
            applied to the images).
        images: `(N, height, width, channels)` array.
        labels: optional `(N,)` int array, classes counted from 0.
        batch_size: int, images routed at a time.
        preprocessor: callable applied to the images. By default a task's own.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        dict from the index of each MoE block to its `ExpertInformation`.

    Raises:
        ValueError: if the model is dense, images and labels differ in number, or the
            images are not ones that the model takes.

    Source: V-MoE, appendix E.2 and E.3, shows the same as pictures (figures 7 and 29
    to 32); the measure is ours.

    Examples:
        >>> found = ksm.analysis.expert_information(sparse, images, labels)
        >>> {block: (x.position_share, x.label_share) for block, x in found.items()}
    """
    if labels is not None:
        check_labels(len(images), labels)
    reducers = [InformationReducer(model, labels)]
    (found,) = observe(model, images, reducers, batch_size, preprocessor, verbose)
    return found


class InformationReducer:
    """Reducer to a dict from each block to its `ExpertInformation`, see `observe`.

    Args:
        model: `ViTMoEBackbone`, or a task that has one.
        labels: optional `(N,)` int array, classes of all images that will be seen, in
            their order, counted from 0.

    Raises:
        ValueError: if the model is dense, or, at the end, if images and labels differ
            in number.

    Examples:
        >>> reducer = ksm.analysis.InformationReducer(sparse, labels)
        >>> (found,) = ksm.analysis.observe(sparse, images, [reducer])
    """

    def __init__(self, model: keras.Model, labels: ArrayLike | None = None):
        backbone, _ = backbone_of(model)
        check_has_routers(backbone)
        self._num_tokens = backbone.output["sequence_output"].shape[1]
        # Right, and in a random order.
        self._labels = ()
        if labels is not None:
            labels = np.asarray(labels)
            shuffled = np.random.default_rng(0).permutation(labels)
            self._labels = (labels, shuffled)
        # Images, and probabilities by position and by each kind of label.
        self._sums = {}

    def update(self, name: int | str, decision: Decision, inputs: Any) -> None:
        taken, weights, _ = experts_of_tokens(decision)
        if not isinstance(decision.routing, DenseRouting):
            weights = taken / np.maximum(taken.sum(-1, keepdims=True), 1)
        weights = weights.reshape(-1, self._num_tokens, weights.shape[-1])
        # Without what only fills up groups.
        weights = weights[: len(keras.tree.flatten(inputs)[0])].astype("float64")
        first, sums = self._sums.get(name, (0, None))
        last = first + len(weights)
        found = [weights.sum(axis=0)]
        for labels in self._labels:
            check_labels(max(last, len(labels)), labels)
            by_class = np.zeros((labels.max() + 1, weights.shape[-1]))
            np.add.at(by_class, labels[first:last], weights.sum(axis=1))
            found.append(by_class)
        if sums is not None:
            found = [x + y for x, y in zip(found, sums, strict=True)]
        self._sums[name] = last, found

    def result(self) -> dict:
        found = {}
        for name, (num_images, (by_position, *by_class)) in self._sums.items():
            for labels in self._labels:
                check_labels(num_images, labels)
            label, chance = map(_information, by_class) if by_class else (None, None)
            found[name] = ExpertInformation(
                _entropy(by_position.sum(axis=0)),
                _information(by_position),
                label,
                chance,
            )
        return found


def _information(joint):
    """Mutual information of rows and columns of a table of weights, in bits."""
    return max(
        _entropy(joint.sum(0)) + _entropy(joint.sum(1)) - _entropy(joint.ravel()), 0.0
    )


def _entropy(weights):
    probabilities = weights[weights > 0] / weights.sum()
    return float(-np.sum(probabilities * np.log2(probabilities)))
