"""Retrieval and zero-shot classification, by embeddings of images and texts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe import checks
from keras_softmoe.types import Tensor


class Retrieval(NamedTuple):
    """Recall in both directions.

    Attributes:
        image_to_text: dict from `k` to the share of images, from 0 to 1, for which one
            of their captions is among the `k` captions most similar to them.
        text_to_image: dict from `k` to the same share of captions.
    """

    image_to_text: dict
    text_to_image: dict


def retrieval(
    image_embeddings: Tensor,
    text_embeddings: Tensor,
    image_of_caption: ArrayLike | None = None,
    ks: Sequence = (1, 5, 10),
    chunk_size: int = 2048,
) -> Retrieval:
    """Compute recall@k of images among captions and of captions among images.

    Similarities are dot products in float64. Ties (within rounding errors) are broken
    at random, in expectation: if `b` wrong candidates are more similar than the right
    one and `t` equally similar, a query counts `(k - b) / (t + 1)`, clipped to [0, 1].

    Args:
        image_embeddings: `(N, D)` float array or tensor, two images or more.
        text_embeddings: `(M, D)` float array or tensor.
        image_of_caption: `(M,)` ints in `[0, N)`, the image of each caption. `None`:
            all images have the same number of captions, which follow each other.
        ks: distinct positive ints.
        chunk_size: int, rows and columns of a block.

    Raises:
        ValueError: if the embeddings are not two matrices of equal width with finite
            numbers and two images or more, or captions and images do not match.

    Source: LIMoE, tables 4 and 7. (The paper does not say how ties count.)

    Examples:
        >>> embeddings = limoe.encode_image(images), limoe.encode_text(captions)
        >>> found = ksm.evaluation.retrieval(*embeddings)
        >>> found.image_to_text[1], found.text_to_image[1]
    """
    images = check_embeddings("image_embeddings", image_embeddings)
    texts = check_embeddings("text_embeddings", text_embeddings)
    if images.shape[1] != texts.shape[1] or len(images) < 2:
        raise ValueError(
            "Embeddings of images, two or more, and of captions must have the same "
            f"width. Received: image_embeddings with shape={images.shape}, "
            f"text_embeddings with shape={texts.shape}."
        )
    owner = _owner(image_of_caption, len(images), len(texts))
    ks = tuple(ks) if np.iterable(ks) else (ks,)
    if not ks or not all(map(checks.is_whole_number, ks)) or len(set(ks)) < len(ks):
        raise ValueError(f"`ks` must be distinct positive integers. Received: ks={ks}.")
    checks.check_whole_numbers(1, chunk_size=chunk_size)
    of_image, of_text = _ranks(images, texts, owner, chunk_size)
    return Retrieval(
        {int(k): float(_hit_rate(*of_image, k)) for k in ks},
        {int(k): float(_hit_rate(*of_text, k)) for k in ks},
    )


def _ranks(images, texts, owner, chunk_size):
    """For each image, then for each caption: better ones, wrong ties, right ties."""
    better_texts, tied_texts = np.zeros((2, len(images)), "int64")
    better_images, tied_images = np.zeros((2, len(texts)), "int64")
    own = np.empty(len(texts))
    longest = [0.0, 0.0]
    for part in _chunks(len(texts), chunk_size):
        image = images[owner[part]].astype("float64")
        text = texts[part].astype("float64")
        own[part] = np.einsum("nd,nd->n", image, text)
        lengths = [np.linalg.norm(x, axis=-1).max() for x in (image, text)]
        longest = np.maximum(longest, lengths)
    # Twice the bound on the rounding error of a dot product
    tolerance = 2 * images.shape[1] * np.finfo("float64").eps * np.prod(longest)
    best = np.full(len(images), -np.inf)
    np.maximum.at(best, owner, own)
    right_texts = np.bincount(owner[own >= best[owner] - tolerance])

    for rows in _chunks(len(images), chunk_size):
        image = images[rows].astype("float64")
        for columns in _chunks(len(texts), chunk_size):
            # (images, texts)
            block = image @ texts[columns].astype("float64").T
            row = owner[columns] - rows.start
            here = np.flatnonzero((row >= 0) & (row < len(block)))
            # Exclude the correct pairs.
            block[row[here], here] = -np.inf
            better, tied = _compare(block, own[columns], tolerance, axis=0)
            better_images[columns] += better
            tied_images[columns] += tied
            better, tied = _compare(block, best[rows, None], tolerance, axis=1)
            better_texts[rows] += better
            tied_texts[rows] += tied
    of_text = better_images, tied_images, np.ones(len(texts), "int64")
    return (better_texts, tied_texts, right_texts), of_text


def _compare(block, target, tolerance, axis):
    better = np.count_nonzero(block > target + tolerance, axis=axis)
    return better, np.count_nonzero(block >= target - tolerance, axis=axis) - better


def _hit_rate(better, tied, right, k):
    """Mean probability that a right candidate is among the first `k`."""
    places = np.clip(k - better, 0, None)
    # Probability that wrong candidates win every tie
    missed = np.ones(len(better))
    for place in range(int(np.minimum(places, tied + 1).max(initial=0))):
        taken = np.clip(tied - place, 0, None) / np.maximum(tied + right - place, 1)
        missed = np.where(place < places, missed * taken, missed)
    return (1.0 - missed).mean()


def _chunks(total, size):
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def check_embeddings(name, embeddings):
    """Return embeddings as a NumPy matrix, or raise if they are not finite numbers."""
    array = np.asarray(ops.convert_to_numpy(embeddings))
    # bfloat16 is of no kind that NumPy has a letter for.
    if array.ndim != 2 or not array.size or array.dtype.kind in "OSUcmMb":
        raise ValueError(
            f"`{name}` must be numbers of shape (N, D), one row or more. Received: "
            f"{name} with shape={array.shape}, dtype={array.dtype}. They come from "
            "`model.encode_image` and `model.encode_text`."
        )
    checks.check_finite(f"`{name}`", array)
    return array


def _owner(image_of_caption, num_images, num_captions):
    """Return the image of each caption."""
    if image_of_caption is None:
        if num_captions % num_images:
            raise ValueError(
                "Without `image_of_caption` every image has the same number of "
                f"captions. Received: {num_images} images, {num_captions} captions."
            )
        return np.repeat(np.arange(num_images), num_captions // num_images)
    owner = np.asarray(ops.convert_to_numpy(image_of_caption))
    if owner.shape != (num_captions,) or owner.dtype.kind not in "iu":
        raise ValueError(
            "`image_of_caption` must hold one integer per caption. Received: "
            f"image_of_caption with shape={owner.shape}, dtype={owner.dtype} for "
            f"{num_captions} captions."
        )
    owner = owner.astype("int64")
    strange = np.setdiff1d(owner, np.arange(num_images))
    without = np.setdiff1d(np.arange(num_images), owner)
    if len(strange) or len(without):
        raise ValueError(
            "`image_of_caption` must name images by their index from 0 to "
            f"{num_images - 1}, and each at least once. Received: image_of_caption "
            f"with {strange[:5].tolist()} outside, without {without[:5].tolist()}."
        )
    return owner


class ZeroShot(NamedTuple):
    """Classes that a model finds in images by the names of the classes.

    Attributes:
        predictions: `(N,)` int64 array, the class of the highest score, or the first.
        scores: `(N, C)` float32 array, cosines of images and classes.
        accuracy: float, the share of right predictions. `None` without labels.
        class_accuracy: `(C,)` float64 array, the same for each class, NaN without any.
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

    The embedding of a class is the mean over templates, scaled to length 1.

    Args:
        model: any object with `encode_image(images, batch_size=..., verbose=...)` and
            `encode_text(texts)` to `(N, D)` embeddings, such as a `LIMoEContrastive`.
        images: `(N, height, width, channels)` array.
        class_names: strings, all different.
        templates: strings with `{}` where the name goes, such as "a photo of a {}.".
        labels: `(N,)` ints in `[0, C)`, indices of the right names, or `None`.
        batch_size: int, images per forward pass.
        verbose: 1 for the progress of encoding the images, or 0.

    Raises:
        ValueError: if names, templates, labels or the model's embeddings are invalid.

    Source: LIMoE, appendix D.2, which follows CLIP (arXiv 2103.00020), section 3.1.4.

    Examples:
        >>> names, templates = ["hammer", "cloud"], ["{}", "a {}"]
        >>> found = ksm.evaluation.zero_shot(limoe, images, names, templates)
        >>> found.predictions.shape
        (8,)
    """
    checks.check_whole_numbers(1, batch_size=batch_size)
    # On first use, since `models` imports KerasHub.
    from keras_softmoe.models import pair_encoding as named

    names = named.check_names(class_names)
    if labels is not None:
        labels = np.asarray(labels)
        if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
            raise ValueError(
                "`labels` must hold one integer per image. Received: labels with "
                f"shape={labels.shape}, dtype={labels.dtype} for {len(images)} images."
            )
        outside = labels[(labels < 0) | (labels >= len(names))]
        if len(outside):
            raise ValueError(
                f"`labels` must be indices of the {len(names)} classes, from 0 to "
                f"{len(names) - 1}. Received: labels with {outside[:5].tolist()}."
            )
        labels = labels.astype("int64")
    classes = named.class_embeddings(model.encode_text, names, templates)
    classes = check_embeddings("class_embeddings", classes)
    embeddings = model.encode_image(images, batch_size=batch_size, verbose=verbose)
    embeddings = check_embeddings("image_embeddings", embeddings)
    if embeddings.shape[1] != classes.shape[1]:
        raise ValueError(
            "Embeddings of images and classes must have the same width. Received: "
            f"image_embeddings with shape={embeddings.shape}, class_embeddings with "
            f"shape={classes.shape}."
        )
    num_classes = len(classes)
    rows = (x.astype("float64") for x in (embeddings, classes))
    embeddings, classes = map(keras.utils.normalize, rows)
    scores = (embeddings @ classes.T).astype("float32")
    predictions = scores.argmax(axis=1)
    if labels is None:
        return ZeroShot(predictions, scores)
    hits = predictions == labels
    counts = np.bincount(labels, minlength=num_classes)
    right = np.bincount(labels, weights=hits, minlength=num_classes)
    of_class = np.full(num_classes, np.nan)
    np.divide(right, counts, out=of_class, where=counts > 0)
    return ZeroShot(predictions, scores, float(hits.mean()), of_class)
