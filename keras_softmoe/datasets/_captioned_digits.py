"""Scikit-learn's handwritten digits with captions: real images, synthetic text."""

from typing import NamedTuple

import numpy as np

from keras_softmoe.datasets._captions import Wording
from keras_softmoe.datasets._digits import digits, training_half

DIGIT_NAMES = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
)

# "{}" is the digit, "{a}" the digit with its article.
_FRAMES = (
    "{}",
    "{a}",
    "the digit {}",
    "digit {}",
    "the number {}",
    "number {}",
    "a handwritten {}",
    "handwritten digit {}",
    "the handwritten number {}",
    "{a} written by hand",
    "someone wrote {a}",
    "someone has written the number {}",
    "a picture of the digit {}",
    "a picture of {a}",
    "an image of the number {}",
    "an image of a handwritten {}",
    "this is {a}",
    "this is the digit {}",
    "here is the number {}",
    "there is {a}",
    "we see {a}",
    "a white {} on black",
    "the number {} in white on a black background",
    "{a} drawn with a pen",
)


class CaptionedDigits(NamedTuple):
    """What `captioned_digits` returns: arrays with one entry for each of N images.

    Args:
        images: uint8 of shape (N, image_size, image_size, 3), 0 to 255.
        captions: array of N str.
        labels: int32 of shape (N,), 0 to 9, indices into `DIGIT_NAMES`.
    """

    images: np.ndarray
    captions: np.ndarray
    labels: np.ndarray


def captioned_digits(
    image_size: int = 32, split: str = "all", seed: int = 0
) -> CaptionedDigits:
    """Handwritten digits that ship with scikit-learn, each with a caption.

    The images and halves are those of `digits`. The captions are synthetic: plain
    English, lower case, from many wordings, with the digit as a word or a numeral:
    "the digit seven", "a handwritten 7". An image's caption is the same in every split.

    Args:
        image_size: int, side of the images in pixels, at least 8.
        split: `"all"`, or one of two disjoint halves, `"train"` (901 images) and
            `"test"` (896 images).
        seed: int, chooses the halves and the wordings.

    Returns:
        `CaptionedDigits`, a named tuple: `images`, `captions` and `labels`.

    Raises:
        ValueError: If a number is out of range or the split unknown.
        ImportError: If scikit-learn is missing (the extra `datasets`).

    Source:
        The images: see `digits`.

    Examples:
        >>> images, captions, labels = ksm.datasets.captioned_digits(split="train")
    """
    images, labels = digits(image_size, split, seed)
    everything = labels if split == "all" else digits(8, "all", seed)[1]
    captions = np.array(_captions(everything, np.random.default_rng((seed, 1))))
    if split != "all":
        captions = captions[training_half(everything, seed) == (split == "train")]
    return CaptionedDigits(images, captions, labels)


def _captions(labels, rng):
    """List of N captions for the digits `labels` (N,)."""
    captions = []
    for row, label in zip(rng.random((len(labels), 2)), labels.tolist(), strict=True):
        wording = Wording(row)
        digit = wording.one_of((DIGIT_NAMES[label], str(label)))
        # An eight is spoken with a vowel first, as a numeral too.
        with_article = f"{'an' if label == 8 else 'a'} {digit}"
        captions.append(wording.one_of(_FRAMES).format(digit, a=with_article))
    return captions
