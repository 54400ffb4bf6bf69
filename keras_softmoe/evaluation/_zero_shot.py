"""Zero-shot classification, by the names of the classes alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.evaluation._retrieval import check_embeddings


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
    """Classify images by the names of the classes.

    The name of a class is put into every template ("a photo of a {}."), and the
    embeddings of these texts, of length 1 each, are averaged and scaled back to length
    1. An image is of the class whose embedding its own is closest to. To classify
    several sets of images by the same classes, encode them once:
    `model.encode_image(images) @ model.class_embeddings(names, templates).T`.

    Args:
        model: any object with `encode_image(images, batch_size=..., verbose=...)` and
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
            encoded, or the model does not return embeddings.

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
    # On first use, since `models` imports KerasHub.
    from keras_softmoe.backbones import class_embeddings as named

    names = named.check_names(class_names)
    if labels is not None:
        labels = _check_labels(labels, len(images), len(names))
    classes = named.class_embeddings(model.encode_text, names, templates)
    embeddings = model.encode_image(images, batch_size=batch_size, verbose=verbose)
    return _classify(embeddings, classes, labels, named.unit)


def _classify(image_embeddings, class_embeddings, labels, unit):
    """Return the `ZeroShot` of embeddings; `unit` scales rows to length 1."""
    images = check_embeddings("image_embeddings", image_embeddings)
    classes = check_embeddings("class_embeddings", class_embeddings)
    if images.shape[1] != classes.shape[1]:
        raise ValueError(
            "Embeddings of images and classes must have the same width. Received: "
            f"image_embeddings with shape={images.shape}, class_embeddings with "
            f"shape={classes.shape}. Take both from one model."
        )
    num_classes = len(classes)
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
