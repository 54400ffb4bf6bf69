"""Ridge classification in closed form, and the support draws it is fitted to.

Plain NumPy, in float64: the eigenvalues of a float32 decomposition (the papers'
code) are too coarse for the smallest penalties.

Source: V-MoE (arXiv 2106.05974), section 3.4, and its released evaluator.
"""

from dataclasses import dataclass

import numpy as np

# The papers' grid, 2^-10 to 2^19.
L2_GRID = tuple(2.0**exponent for exponent in range(-10, 20))

# The constant feature is large, so that the penalty leaves the bias nearly free.
BIAS_FEATURE = 100.0

# Rows that are scored at a time, so that memory does not grow with the data.
ROWS = 4096


def sample_support(labels, shots, seed):
    """Draw the same number of images from every class.

    At one seed, the images of fewer shots are among those of more shots.

    Args:
        labels: `(N,)` ints in `[0, num_classes)`, at least `shots` of each class.
        shots: int, images per class.
        seed: int, for `numpy.random.default_rng`.

    Returns:
        `(num_classes * shots,)` ints, indices into `labels`, class by class.
    """
    labels = np.asarray(labels)
    generator = np.random.default_rng(seed)
    return np.concatenate(
        [
            generator.permutation(np.flatnonzero(labels == index))[:shots]
            for index in range(labels.max() + 1)
        ]
    )


def best_l2(accuracies, l2=L2_GRID):
    """Choose one penalty for several data sets, by mean rank.

    Of equal accuracies in a data set the larger penalty ranks higher (in the papers'
    code their order depends on the CPU); equal mean ranks go to the smaller one.

    Args:
        accuracies: `(num_datasets, num_penalties)` floats.
        l2: `(num_penalties,)` floats in ascending order.

    Returns:
        Float, the chosen element of `l2`.

    Source: the few-shot evaluator released with V-MoE.
    """
    order = np.argsort(accuracies, axis=-1, kind="stable")
    ranks = np.argsort(order, axis=-1, kind="stable")
    return float(l2[int(ranks.mean(axis=0).argmax())])


@dataclass(frozen=True)
class RidgeProbe:
    """A ridge classifier, solved for every penalty at once. See `ridge_probe`.

    The weights at penalty `l2` are `basis / (eigenvalues + l2) @ targets`.

    Attributes:
        mean: `(D,)` float64, subtracted from the features.
        std: `(D,)` float64, population standard deviation + 1e-5, divided by.
        basis: `(D + 1, R)` float64.
        eigenvalues: `(R,)` float64, not negative.
        targets: `(R, num_classes)` float64.
    """

    mean: np.ndarray
    std: np.ndarray
    basis: np.ndarray
    eigenvalues: np.ndarray
    targets: np.ndarray

    def weights(self, l2):
        """Return the `(D + 1, num_classes)` weights; the last row is the bias."""
        return self.basis / (self.eigenvalues + l2) @ self.targets

    def scores(self, features, l2):
        """Return the `(N, num_classes)` scores of `features` `(N, D)`."""
        return _standardise(features, self.mean, self.std) @ self.weights(l2)

    def accuracy(self, features, labels, l2):
        """Return the top-1 accuracy for each penalty in `l2`, `(len(l2),)` float64."""
        correct = np.zeros(len(l2))
        for start in range(0, len(labels), ROWS):
            rows = slice(start, start + ROWS)
            projected = _standardise(features[rows], self.mean, self.std) @ self.basis
            for index, penalty in enumerate(l2):
                scores = projected / (self.eigenvalues + penalty) @ self.targets
                correct[index] += np.sum(scores.argmax(axis=-1) == labels[rows])
        return correct / len(labels)


def ridge_probe(features, labels, num_classes):
    """Fit a ridge classifier to a support set, for all penalties at once.

    The features are standardised and given a constant feature of 100, the targets
    are +1 for the image's class and -1 for the others, and the weights solve
    `(XᵀX + l2 I) W = XᵀY`.

    Args:
        features: `(N, D)` floats. The computation is in float64.
        labels: `(N,)` ints in `[0, num_classes)`.
        num_classes: int.

    Returns:
        `RidgeProbe`.

    Source: V-MoE, section 3.4, and its released few-shot evaluator.
    """
    features = np.asarray(features, "float64")
    mean = features.mean(axis=0)
    std = features.std(axis=0) + 1e-5
    x = _standardise(features, mean, std)
    y = 2.0 * (np.asarray(labels)[:, None] == np.arange(num_classes)) - 1.0
    # The smaller of XᵀX and XXᵀ is decomposed; penalties only rescale eigenvalues.
    if len(x) >= x.shape[1]:
        eigenvalues, basis = np.linalg.eigh(x.T @ x)
        targets = basis.T @ (x.T @ y)
    else:
        eigenvalues, vectors = np.linalg.eigh(x @ x.T)
        basis = x.T @ vectors
        targets = vectors.T @ y
    # Rounding can leave the zero eigenvalues slightly negative.
    return RidgeProbe(mean, std, basis, np.maximum(eigenvalues, 0.0), targets)


def _standardise(features, mean, std):
    x = (np.asarray(features, "float64") - mean) / std
    return np.concatenate([x, np.full((len(x), 1), BIAS_FEATURE)], axis=1)
