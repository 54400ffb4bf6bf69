"""Scikit-learn's handwritten digits: real images that need no network."""

import numpy as np

from keras_softmoe.checks import check_whole_numbers

# The images are 8 x 8 counts of inked pixels, 0 to 16.
_SIDE = 8
_LEVELS = 16


def digits(
    image_size: int = 32, split: str = "all", seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Handwritten digits that ship with scikit-learn, ten classes.

    1,797 images by 13 writers, 8 x 8 pixels, white on black, enlarged bilinearly.
    The two halves are random within each class; both hold images of every writer.

    Args:
        image_size: int, side of the images in pixels, at least 8.
        split: `"all"`, or one of two disjoint halves, `"train"` (901 images) and
            `"test"` (896 images).
        seed: int, chooses the halves.

    Returns:
        Tuple of the images, uint8 of shape (number, image_size, image_size, 3) in
        0..255 with equal channels, and the labels, int32 of shape (number,). Images
        keep the order of the data set.

    Raises:
        ValueError: If a number is out of range or the split unknown.
        ImportError: If scikit-learn is missing (the extra `datasets`).

    Source:
        E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
        Machine Learning Repository, 1998 (test part), as bundled by scikit-learn.

    Examples:
        >>> images, labels = ksm.datasets.digits(image_size=32, split="train")
        >>> images.shape, labels.shape
    """
    check_whole_numbers(_SIDE, image_size=image_size)
    check_whole_numbers(0, seed=seed)
    if split not in ("all", "train", "test"):
        raise ValueError(
            "`split` must be 'all', 'train' or 'test'. "
            f"Received: split={split!r}. Use 'all' and index it for other parts."
        )
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "digits() reads the images bundled with scikit-learn, which is not "
            "installed. Install the extra `datasets`: "
            "`pip install 'keras-softmoe[datasets]'`."
        ) from error
    small, labels = load_digits(return_X_y=True)
    labels = labels.astype("int32")
    if split != "all":
        chosen = np.flatnonzero(_training_half(labels, seed) == (split == "train"))
        small, labels = small[chosen], labels[chosen]
    # (number, 8, 8) -> (number, image_size, image_size)
    enlarge = _bilinear_matrix(image_size, _SIDE)
    images = enlarge @ small.reshape(-1, _SIDE, _SIDE).astype("float32") @ enlarge.T
    images = np.rint(images * (255 / _LEVELS)).astype("uint8")
    return np.repeat(images[..., None], 3, axis=-1), labels


def _bilinear_matrix(size, source):
    """Return (size, source) float32: enlarging with aligned centres, edges held."""
    position = (np.arange(size) + 0.5) * source / size - 0.5
    rows = np.eye(source)
    columns = [np.interp(position, np.arange(source), row) for row in rows]
    return np.stack(columns, axis=1).astype("float32")


def _training_half(labels, seed):
    """Return a boolean (number,), True for half of each class (the larger, if odd)."""
    rng = np.random.default_rng(seed)
    half = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        half[members[: -(-len(members) // 2)]] = True
    return half
