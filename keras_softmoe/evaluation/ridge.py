"""Ridge classification in closed form, and the support draws it is fitted to.

Plain NumPy, in float64: the eigenvalues of a float32 decomposition (the papers'
code) are too coarse for the smallest penalties.
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

    `labels` are `(N,)` ints; returns `(num_classes * shots,)` indices, class by class.
    At one seed, the images of fewer shots are among those of more shots.
    """
    labels = np.asarray(labels)
    generator = np.random.default_rng(seed)
    of_classes = (np.flatnonzero(labels == i) for i in range(labels.max() + 1))
    return np.concatenate([generator.permutation(x)[:shots] for x in of_classes])


def best_l2(accuracies, l2=L2_GRID):
    """Choose one penalty by mean rank over the rows of `(num_datasets, num_penalties)`.

    Of equal accuracies the larger penalty ranks higher, equal mean ranks go to the
    smaller one. Source: the few-shot evaluator released with V-MoE.
    """
    order = np.argsort(accuracies, axis=-1, kind="stable")
    ranks = np.argsort(order, axis=-1, kind="stable")
    return float(l2[int(ranks.mean(axis=0).argmax())])


@dataclass(frozen=True)
class RidgeProbe:
    """A ridge classifier, solved for every penalty at once. See `ridge_probe`.

    The `(D + 1, num_classes)` weights at penalty `l2`, of which the last row is the
    bias, are `basis / (eigenvalues + l2) @ targets`, with `mean` and `std` `(D,)`,
    `basis` `(D + 1, R)`, `eigenvalues` `(R,)` and `targets` `(R, num_classes)` in
    float64.
    """

    mean: np.ndarray
    std: np.ndarray
    basis: np.ndarray
    eigenvalues: np.ndarray
    targets: np.ndarray

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

    The `(N, D)` features are standardised and given a constant feature of 100, the
    targets are +1 for the image's class and -1 for the others. Source: V-MoE, section
    3.4, and its released few-shot evaluator.
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
