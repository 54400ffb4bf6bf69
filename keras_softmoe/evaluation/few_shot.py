"""Few-shot linear probe: ridge regression on frozen features, in closed form.

Unlike the papers' code it computes in float64 (the eigenvalues of a float32
decomposition are too coarse for the smallest penalties), and by default it chooses the
penalty without looking at the test images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np

from keras_softmoe import checks

# The papers' grid, 2^-10 to 2^19.
L2_GRID = tuple(2.0**exponent for exponent in range(-10, 20))
# The constant feature is large, so that the penalty leaves the bias nearly free.
BIAS_FEATURE = 100.0
# Rows that are scored at a time, so that memory does not grow with the data.
ROWS = 4096


@dataclass(frozen=True)
class ShotResult:
    """Probe accuracy at one number of shots.

    Attributes:
        shots: int, labelled images per class.
        mean: float in [0, 1], test accuracy averaged over the support draws.
        std: float, sample standard deviation over the draws, NaN for one draw.
        l2: float, the penalty, shared by all draws.
        accuracies: tuple of floats, test accuracy of each draw, to compare in pairs.
    """

    shots: int
    mean: float
    std: float
    l2: float
    accuracies: tuple


@dataclass(frozen=True, eq=False)
class FewShotResult(Mapping):
    """A mapping from number of shots to `ShotResult`; prints as a table.

    Attributes:
        results: tuple of `ShotResult`, in the order of `shots`.
        l2_from: str, `"train"`, `"test"` or `"fixed"`.
    """

    results: tuple
    l2_from: str

    def __getitem__(self, shots):
        for result in self.results:
            if result.shots == shots:
                return result
        raise KeyError(f"{shots!r}: the probe was run at shots={tuple(self)}")

    def __iter__(self):
        return (result.shots for result in self.results)

    def __len__(self):
        return len(self.results)

    def __str__(self):
        chosen = {
            "train": "chosen on the training images outside the support draw",
            "test": "chosen on the TEST images: the accuracy is optimistic",
            "fixed": "fixed beforehand",
        }
        lines = [f"{'shots':>5}  {'accuracy':<15}  {'l2':>10}"]
        for r in self.results:
            spread = "" if math.isnan(r.std) else f" ± {r.std:.3f}"
            lines.append(f"{r.shots:>5}  {r.mean:.3f}{spread:<10}  {r.l2:>10g}")
        draws = len(self.results[0].accuracies)
        lines.append(
            f"mean ± sample standard deviation over {draws} support draw(s); "
            f"l2 {chosen[self.l2_from]}"
        )
        return "\n".join(lines)


def few_shot_probe(
    backbone: Callable | None,
    train: tuple,
    test: tuple,
    shots: Sequence = (1, 5, 10),
    seeds: int = 3,
    l2: str | float = "train",
    preprocessor: Callable | None = None,
    batch_size: int = 64,
    verbose: int = 1,
) -> FewShotResult:
    """Measure how well frozen features classify with a few labelled images per class.

    For each number of shots and each seed, images of each class are drawn from `train`,
    and a ridge classifier is fitted to their features and scored on `test`.

    Args:
        backbone: `keras.Model` that returns `(B, D)` or a dict with `"pooled_output"`;
            a task; any other callable; or `None`, if the arrays are features (pixels).
        train: pair `(x, y)`. `x`: images `(N, H, W, C)`, or features `(N, ...)` if
            `backbone` is `None`. `y`: int labels `(N,)` of all classes, from 0 on.
        test: pair `(x, y)`, as `train`, with images of the same shape.
        shots: sequence of distinct ints, labelled images per class.
        seeds: int, number of support draws (seeds 0, 1, ...), or a sequence of seeds.
        l2: the penalty, a positive float, or how to choose one for each number of
            shots: `"train"`, by the mean accuracy on the images of `train` that were
            not drawn; `"test"`, by the mean test accuracy, as the papers do.
        preprocessor: callable applied to each batch; by default a task's own, or none.
        batch_size: int, images per forward pass.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        `FewShotResult`: `result[5].mean`, `.std`, `.l2`, `.accuracies`; prints a table.

    Source: V-MoE, section 3.4; Soft MoE, section 3.

    Examples:
        >>> digits = [ksm.datasets.digits(split=split) for split in ("train", "test")]
        >>> train, test = [(x[:64], y[:64]) for x, y in digits]
        >>> print(ksm.evaluation.few_shot_probe(sparse, train, test, shots=(1, 2)))
    """
    shots = _integers("shots", shots, minimum=1)
    checks.check_whole_numbers(1, batch_size=batch_size)
    if not np.iterable(seeds):
        checks.check_whole_numbers(1, seeds=seeds)
        seeds = range(seeds)
    seeds = _integers("seeds", seeds, minimum=0)
    grid = L2_GRID
    if not isinstance(l2, str) or l2 not in ("train", "test"):
        if not checks.is_number(l2) or l2 <= 0:
            raise ValueError(
                f"`l2` must be 'train', 'test' or a positive number. Received: {l2=}."
            )
        grid = (float(l2),)
    model, preprocessor = _model_and_preprocessor(backbone, preprocessor)
    x_train, y_train = _check_split("train", train, images=model is not None)
    x_test, y_test = _check_split("test", test, images=model is not None)
    num_classes = _check_classes(y_train, y_test, max(shots), spare=l2 == "train")
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ValueError(
            "The arrays of `train` and `test` must agree in every axis but the first. "
            f"Received: train shape={x_train.shape}, test shape={x_test.shape}."
        )
    for name, x in (("train", x_train), ("test", x_test)):
        is_unscaled = isinstance(model, keras.Model) and preprocessor is None
        if is_unscaled and x.dtype.kind in "iub":
            raise ValueError(
                "A Keras model expects scaled images, or a `preprocessor`. Received: "
                f"images of dtype={x.dtype}, preprocessor=None. If the model scales "
                "images, pass `x.astype('float32')`."
            )
        checks.check_finite(f"The x of `{name}`", x)

    count = len(x_train) + len(x_test)
    bar = keras.utils.Progbar(count, verbose=verbose, unit_name="image")
    f_train = _features(model, preprocessor, x_train, batch_size, bar)
    f_test = _features(model, preprocessor, x_test, batch_size, bar)
    checks.check_finite("The features of `train`", f_train)
    checks.check_finite("The features of `test`", f_test)

    results = []
    for count in shots:
        draws = [sample_support(y_train, count, seed) for seed in seeds]
        probes = [ridge_probe(f_train[d], y_train[d], num_classes) for d in draws]
        if l2 == "train":
            rests = [np.delete(np.arange(len(y_train)), d) for d in draws]
            scored = [
                probe.accuracy(f_train[rest], y_train[rest], grid)
                for probe, rest in zip(probes, rests, strict=True)
            ]
        elif l2 == "test":
            scored = [probe.accuracy(f_test, y_test, grid) for probe in probes]
        else:
            scored = [[0.0]]
        best = best_l2([np.mean(scored, axis=0)], grid)
        found = tuple(float(p.accuracy(f_test, y_test, [best])[0]) for p in probes)
        std = float(np.std(found, ddof=1)) if len(seeds) > 1 else math.nan
        results.append(ShotResult(count, float(np.mean(found)), std, best, found))
    return FewShotResult(tuple(results), l2 if isinstance(l2, str) else "fixed")


def _model_and_preprocessor(backbone, preprocessor):
    """Split a task into its parts; return anything else as it is."""
    for name, given in (("backbone", backbone), ("preprocessor", preprocessor)):
        if given is not None and not callable(given):
            raise ValueError(
                f"`{name}` must be callable on a batch of images, or `None`. "
                + checks.received(**{name: given})
                + " Presets are loaded with `from_preset`."
            )
    if isinstance(getattr(backbone, "backbone", None), keras.Model):
        if preprocessor is None:
            preprocessor = getattr(backbone, "preprocessor", None)
        backbone = backbone.backbone
    return backbone, preprocessor


def _features(model, preprocessor, images, batch_size, bar):
    """Return the `(N, D)` features, float64 if they are computed so, else float32."""
    expected = getattr(model, "input_shape", None)
    if isinstance(model, keras.Model):
        model = model.predict_on_batch
    batches = []
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        size = len(batch)
        if preprocessor is not None:
            batch = preprocessor(batch)
        _check_shape(expected, batch)
        if model is not None:
            batch = model(batch)
        if isinstance(batch, Mapping):
            if "pooled_output" not in batch:
                raise ValueError(
                    "`backbone` must return features of shape (B, D), or a dict with "
                    f"'pooled_output'. Received: a dict with keys={sorted(batch)}."
                )
            batch = batch["pooled_output"]
        features = np.asarray(keras.ops.convert_to_numpy(batch))
        if model is None:
            features = features.reshape(len(features), -1)
        if features.ndim != 2 or len(features) != size:
            raise ValueError(
                "`backbone` must return one feature vector per image, shape "
                f"(B, D). Received: shape={features.shape} for {size} images."
            )
        # NumPy cannot decompose bfloat16.
        dtype = "float64" if features.dtype == "float64" else "float32"
        batches.append(features.astype(dtype))
        bar.add(size)
    return np.concatenate(batches)


def _integers(name, values, minimum):
    """Return `values` as a tuple of distinct ints."""
    found = tuple(values) if np.iterable(values) else (None,)
    whole = all(checks.is_whole_number(value, minimum) for value in found)
    if not found or not whole or len(set(found)) < len(found):
        raise ValueError(
            f"`{name}` must be distinct integers, at least {minimum}. "
            f"Received: {name}={values}."
        )
    return tuple(int(value) for value in found)


def _check_split(name, split, images):
    """Return the images and labels of a split as arrays, checked."""
    if not isinstance(split, tuple | list) or len(split) != 2:
        raise ValueError(
            f"`{name}` must be a pair of arrays (x, y). "
            f"Received: {name} of type {type(split).__name__}."
        )
    x, y = (np.asarray(part) for part in split)
    rank = x.ndim == 4 if images else x.ndim >= 2
    if not rank or x.size == 0 or x.dtype.kind in "OSUcmM":
        wanted = "images (N, H, W, C)" if images else "features (N, ...)"
        raise ValueError(
            f"The x of `{name}` must hold numbers, {wanted}, none of the axes empty. "
            f"Received: {name} x with shape={x.shape}, dtype={x.dtype}."
        )
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise ValueError(
            f"The labels of `{name}` must be integers of shape (N,). "
            f"Received: {name} y with shape={y.shape}, dtype={y.dtype}. "
            "One-hot labels become integers with `y.argmax(-1)`."
        )
    if len(x) != len(y):
        raise ValueError(
            f"`{name}` must hold one label per image. "
            f"Received: {len(x)} images and {len(y)} labels."
        )
    return x, y.astype("int64")


def _check_classes(y_train, y_test, shots, spare):
    """Return the number of classes; raise if one has under `shots + spare` images."""
    classes, counts = np.unique(y_train, return_counts=True)
    if len(classes) < 2 or classes[0] != 0 or classes[-1] != len(classes) - 1:
        raise ValueError(
            "The labels of `train` must be 0..num_classes-1, with at least two classes "
            f"and every class present. Received: {len(classes)} distinct labels from "
            f"{classes[0]} to {classes[-1]}. `np.unique(y, return_inverse=True)` "
            "renumbers them."
        )
    unknown = np.setdiff1d(y_test, classes)
    if len(unknown):
        raise ValueError(
            f"The labels of `test` must be among those of `train`, 0..{classes[-1]}. "
            f"Received: test labels {unknown[:5].tolist()}, which `train` lacks."
        )
    if counts.min() < shots + spare:
        rarest = counts.argmin()
        extra = " and one more to choose the penalty on, or a fixed `l2`"
        raise ValueError(
            f"Every class of `train` needs {shots} image(s) for shots={shots}"
            f"{extra if spare else ''}. Received: class {rarest} with {counts[rarest]} "
            "image(s)."
        )
    return len(classes)


def _check_shape(expected, batch):
    """Raise unless a batch has the shape that a model takes."""
    found = getattr(batch, "shape", None)
    if found is None or not isinstance(expected, tuple) or len(expected) != 4:
        return
    pairs = zip(found, expected, strict=True)
    if len(found) != 4 or any(size not in (None, own) for own, size in pairs):
        raise ValueError(
            f"The model takes images of shape {expected}. Received: batches of shape "
            f"{tuple(found)}. `preprocessor=ksm.models.ViTMoEImageConverter("
            f"{expected[1:3]})` resizes images."
        )


# === Ridge classifier ===


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

    Its `(D + 1, num_classes)` weights at penalty `l2`, the bias last, are
    `basis / (eigenvalues + l2) @ targets`. All arrays are float64.
    """

    # (D,) both, (D + 1, R), (R,), (R, num_classes)
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

    The `(N, D)` features are standardised and given a constant feature of 100, targets
    are +1 for the image's class, else -1. Source: V-MoE, section 3.4 and released code.
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
