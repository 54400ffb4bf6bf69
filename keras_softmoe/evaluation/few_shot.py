"""Few-shot linear probe: ridge regression on frozen features, in closed form.

Unlike the papers' code it computes in float64, and by default it chooses the penalty
without looking at the test images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np

from keras_softmoe import checks
from keras_softmoe.evaluation import ridge


@dataclass(frozen=True)
class ShotResult:
    """Probe accuracy at one number of shots.

    Attributes:
        shots: int, labelled images per class.
        mean: float in [0, 1], test accuracy averaged over the support draws.
        std: float, sample standard deviation over the draws, NaN for one draw.
        l2: float, the penalty, shared by all draws.
        accuracies: tuple of floats, test accuracy of each draw. With the same seeds and
            data, models can be compared in pairs.
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
        backbone: a `keras.Model` that returns `(B, D)` or a dict with `"pooled_output"`
            of that shape; a task, whose `preprocessor` is used, too; any other
            callable; or `None`, if the arrays are features (or pixels).
        train: pair `(x, y)`. `x`: images `(N, H, W, C)`, or features `(N, ...)` if
            `backbone` is `None`. `y`: int labels `(N,)` in `[0, num_classes)`, every
            class present.
        test: pair `(x, y)`, as `train`, with images of the same shape.
        shots: sequence of distinct ints, labelled images per class.
        seeds: int, number of support draws (seeds 0, 1, ...), or a sequence of
            distinct non-negative ints.
        l2: the penalty, a positive float, or how to choose one for each number of
            shots: `"train"`, by the mean accuracy on the images of `train` that were
            not drawn; `"test"`, by the mean test accuracy, as the papers do.
        preprocessor: callable applied to each batch of images before `backbone`. By
            default a task's own, else none.
        batch_size: int, images per forward pass.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        `FewShotResult`: `result[5].mean`, `.std`, `.l2`, `.accuracies` at 5 shots;
        `print(result)` shows a table.

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
    grid = ridge.L2_GRID
    if not isinstance(l2, str) or l2 not in ("train", "test"):
        if not checks.is_number(l2) or l2 <= 0:
            raise ValueError(
                "`l2` must be 'train', 'test' or a positive number. Received: "
                f"l2={l2!r}."
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
        draws = [ridge.sample_support(y_train, count, seed) for seed in seeds]
        probes = [ridge.ridge_probe(f_train[d], y_train[d], num_classes) for d in draws]
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
        best = ridge.best_l2([np.mean(scored, axis=0)], grid)
        found = [probe.accuracy(f_test, y_test, [best])[0] for probe in probes]
        accuracies = np.array(found)
        std = accuracies.std(ddof=1) if len(seeds) > 1 else math.nan
        mean, accuracies = float(accuracies.mean()), tuple(accuracies.tolist())
        results.append(ShotResult(count, mean, float(std), best, accuracies))
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
            f"`{name}` must be distinct integers, each at least {minimum}. "
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
    if len(found) != 4 or any(
        None not in pair and len(set(pair)) > 1 for pair in pairs
    ):
        raise ValueError(
            f"The model takes images of shape {expected}. Received: batches of shape "
            f"{tuple(found)}. `preprocessor=ksm.models.ViTMoEImageConverter("
            f"{expected[1:3]})` resizes images."
        )
