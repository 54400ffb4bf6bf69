"""Zero-shot classification: classes are given by their names alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.evaluation._retrieval import check_embeddings
from keras_softmoe.types import Tensor


class ZeroShot(NamedTuple):
    """Classes that a model finds in images by the names of the classes.

    Attributes:
        predictions: `(N,)` int64 array, the class of the highest score; of equal
            scores the one that comes first.
        scores: `(N, C)` float32 array, cosines of images and classes.
        accuracy: float from 0 to 1, the share of right predictions. `None` without
            labels.
        class_accuracy: `(C,)` float64 array, the same for the images of each class;
            NaN for a class without images. `None` without labels.
    """

    predictions: np.ndarray
    scores: np.ndarray
    accuracy: float | None = None
    class_accuracy: np.ndarray | None = None


def zero_shot(
    model: Any,
    images: ArrayLike,
    class_names: Sequence,
    templates: Sequence,
    labels: ArrayLike | None = None,
    batch_size: int = 64,
    verbose: int = 0,
) -> ZeroShot:
    """Classify images by comparing them with the names of the classes.

    The name of a class is put into every template ("a photo of a {}."), and the
    embeddings of these texts, of length 1 each, are averaged and scaled back to length
    1: `class_embeddings`. An image is of the class whose embedding its own is closest
    to: `classify`. To classify several sets of images by the same classes, call these
    two.

    Args:
        model: what has `encode_image(images, batch_size=..., verbose=...)` and
            `encode_text(texts)`, both returning `(N, D)` embeddings, such as a
            `LIMoEContrastive`.
        images: `(N, height, width, channels)` array, as `model.encode_image` takes it.
        class_names: strings, all different.
        templates: strings, each with `{}` where the name goes. `("{}",)` for the names
            alone.
        labels: `(N,)` ints in `[0, C)`, indices of the right names; `None` to predict
            only.
        batch_size: int, images per forward pass.
        verbose: 0 or 1, whether to show the progress of encoding the images.

    Returns:
        `ZeroShot`.

    Raises:
        ValueError: if names, templates or labels cannot be used, before anything is
            encoded, or what the model returns are not embeddings.

    Source: LIMoE, appendix D.2, which follows Radford et al. 2021 (CLIP), section
    3.1.4.

    Examples:
        >>> found = ksm.evaluation.zero_shot(
        ...     limoe, scenes, ["red circle", "blue star"], ["a {}", "a small {}"]
        ... )
        >>> found.predictions.shape
        (8,)
    """
    check_whole_numbers(1, batch_size=batch_size)
    names = _classes().check_names(class_names)
    if labels is not None:
        labels = _check_labels(labels, len(images), len(names))
    classes = class_embeddings(model, names, templates)
    embeddings = model.encode_image(images, batch_size=batch_size, verbose=verbose)
    return classify(embeddings, classes, labels)


def class_embeddings(
    model: Any, class_names: Sequence, templates: Sequence
) -> np.ndarray:
    """Embeddings of classes from their names, averaged over templates.

    Args:
        model: what has `encode_text(texts)`, returning `(N, D)` embeddings.
        class_names: `C` strings, all different.
        templates: strings, each with `{}` where the name goes.

    Returns:
        `(C, D)` float32 array, of length 1 in each row.

    Raises:
        ValueError: if names or templates cannot be used, or what the model returns are
            not embeddings.

    Source: as `zero_shot`.

    Examples:
        >>> names = ["red circle", "blue star"]
        >>> ksm.evaluation.class_embeddings(limoe, names, ["a {}", "a small {}"]).shape
        (2, 128)
    """
    return _classes().class_embeddings(model.encode_text, class_names, templates)


def classify(
    image_embeddings: Tensor, class_embeddings: Tensor, labels: ArrayLike | None = None
) -> ZeroShot:
    """Give each image the class whose embedding is closest to its own.

    Args:
        image_embeddings: `(N, D)` float array or tensor. Its rows are scaled to
            length 1.
        class_embeddings: `(C, D)` float array or tensor, as from the function of that
            name, scaled likewise.
        labels: `(N,)` ints in `[0, C)`, the right classes; `None` to predict only.

    Returns:
        `ZeroShot`.

    Raises:
        ValueError: if the embeddings are not two matrices of equal width with finite
            numbers, or the labels do not match them.

    Examples:
        >>> classes = ksm.evaluation.class_embeddings(
        ...     limoe, ["red", "blue"], ["a {} star"]
        ... )
        >>> ksm.evaluation.classify(
        ...     limoe.encode_image(scenes), classes
        ... ).predictions.shape
        (8,)
    """
    images = check_embeddings("image_embeddings", image_embeddings)
    classes = check_embeddings("class_embeddings", class_embeddings)
    if images.shape[1] != classes.shape[1]:
        raise ValueError(
            "Embeddings of images and classes must have the same width. Received: "
            f"image_embeddings with shape={images.shape}, class_embeddings with "
            f"shape={classes.shape}. Take both from one model."
        )
    num_classes = len(classes)
    if labels is not None:
        labels = _check_labels(labels, len(images), num_classes)
    unit = _classes().unit
    scores = (unit(images) @ unit(classes).T).astype("float32")
    predictions = scores.argmax(axis=1)
    if labels is None:
        return ZeroShot(predictions, scores)
    hits = predictions == labels
    counts = np.bincount(labels, minlength=num_classes)
    right = np.bincount(labels, weights=hits, minlength=num_classes)
    of_class = np.full(num_classes, np.nan)
    np.divide(right, counts, out=of_class, where=counts > 0)
    return ZeroShot(predictions, scores, float(hits.mean()), of_class)


def _check_labels(labels, num_images, num_classes):
    labels = np.asarray(labels)
    if labels.shape != (num_images,) or labels.dtype.kind not in "iu":
        raise ValueError(
            "`labels` must hold one integer per image. Received: labels with "
            f"shape={labels.shape}, dtype={labels.dtype} for {num_images} images. Turn "
            "names into integers with `class_names.index(name)`, one-hot labels with "
            "`labels.argmax(-1)`."
        )
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise ValueError(
            f"`labels` must be indices of the {num_classes} classes, from 0 to "
            f"{num_classes - 1}. Received: labels with {outside[:5].tolist()}. Add the "
            "names of these classes, or leave out their images."
        )
    return labels.astype("int64")


def _classes():
    # On first use, since `models` imports KerasHub.
    from keras_softmoe.models import class_embeddings

    return class_embeddings
