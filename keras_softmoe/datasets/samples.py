"""Small data sets that need no network, and vocabularies of captions."""

import io
import string
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_softmoe.checks import check_choice, check_whole_numbers, received
from keras_softmoe.types import Texts

_DIRECTORY = Path(__file__).with_name("samples")
_SAMPLES = ("icons", "new_icons", "other_new_icons", "letters")

# Scikit-learn's digits are 8 x 8 counts of inked pixels, 0 to 16.
_SIDE = 8
_LEVELS = 16

# Characters of captions, in lower case.
_CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation


class Sample(NamedTuple):
    """N images with labels and captions.

    Attributes:
        images: uint8 array of shape (N, size, size, 3), 0 to 255, `size` 20 or 32.
        labels: int32 array of shape (N,), indices into `class_names`.
        class_names: list of str.
        captions: array of N str.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: list
    captions: np.ndarray


def sample(name: str, num_images: int | None = None) -> Sample:
    """Return images that no preset was trained on.

    - `"icons"`: 1,000 icons of concepts that the presets `*_icons` learned, in styles
      that they never saw, 32 x 32, grey. Classes are all 1,229 concepts, and labels are
      those of the presets. The caption is the name that its authors gave the icon.
    - `"new_icons"` and `"other_new_icons"`: 3,007 and 1,949 icons of 129 concepts that
      no preset learned, the latter in other styles than the former.
    - `"letters"`: 512 letters and signs of 2,600 classes, anywhere in 20 x 20 pixels.
      The caption is the sign itself.

    Authors and licences of the icons are in `datasets/samples/ATTRIBUTIONS.md`.

    Args:
        name: str, one of the above.
        num_images: int, return the first `num_images` only.

    Examples:
        >>> images, labels, class_names, captions = ksm.datasets.sample("icons", 20)
        >>> images.shape, class_names[labels[0]], captions[0]
    """
    check_choice("name", name, _SAMPLES)
    with np.load(_DIRECTORY / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file}
    if num_images is not None:
        check_whole_numbers(1, num_images=num_images)
        if num_images > (found := len(arrays["images"])):
            raise ValueError(
                f"The sample has {found} images. {received(num_images=num_images)}"
            )
    images = arrays["images"][:num_images]
    return Sample(
        # Grey images are stored with one channel.
        images=np.repeat(images, 3 // images.shape[-1], axis=-1),
        labels=arrays["labels"][:num_images],
        class_names=arrays["class_names"].tolist(),
        captions=arrays["captions"][:num_images],
    )


def digits(
    image_size: int = 32, split: str = "all", seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the handwritten digits that ship with scikit-learn, ten classes.

    1,797 images by 13 writers, 8 x 8 pixels, white on black, enlarged bilinearly.
    The two halves are random within each class; both hold images of every writer.

    Args:
        image_size: int, side of the images in pixels, at least 8.
        split: `"all"`, or a half: `"train"` (901 images) or `"test"` (896 images).
        seed: int, chooses the halves.

    Returns:
        Tuple of images, uint8 of shape (number, image_size, image_size, 3) with equal
        channels, and labels, int32 of shape (number,), in the order of the data set.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
    Machine Learning Repository, 1998 (test part), as bundled by scikit-learn.

    Examples:
        >>> images, labels = ksm.datasets.digits(image_size=32, split="train")
        >>> images.shape, labels.shape
    """
    check_whole_numbers(_SIDE, image_size=image_size)
    check_whole_numbers(0, seed=seed)
    check_choice("split", split, ("all", "train", "test"))
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "`digits` reads images of scikit-learn, which is not installed: "
            "`pip install 'keras-softmoe[datasets]'`."
        ) from error
    small, labels = load_digits(return_X_y=True)
    labels = labels.astype("int32")
    if split != "all":
        rng = np.random.default_rng(seed)
        # Half of each class, the larger one if odd
        half = np.zeros(len(labels), bool)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            half[members[: -(-len(members) // 2)]] = True
        chosen = np.flatnonzero(half == (split == "train"))
        small, labels = small[chosen], labels[chosen]
    # Bilinear, with aligned centres and edges held: (image_size, 8)
    position = (np.arange(image_size) + 0.5) * _SIDE / image_size - 0.5
    columns = [np.interp(position, np.arange(_SIDE), row) for row in np.eye(_SIDE)]
    enlarge = np.stack(columns, axis=1).astype("float32")
    images = enlarge @ small.reshape(-1, _SIDE, _SIDE).astype("float32") @ enlarge.T
    images = np.rint(images * (255 / _LEVELS)).astype("uint8")
    return np.repeat(images[..., None], 3, axis=-1), labels


def train_vocabulary(captions: Texts, vocabulary_size: int = 400) -> bytes:
    """Train a SentencePiece vocabulary on captions, the same for the same captions.

    Special pieces are as in T5: padding 0, end of text 1, unknown 2, no beginning of
    text. Text is lower-cased and normalized (`nmt_nfkc_cf`). All lower-case ASCII
    letters, digits and punctuation are pieces; byte-pair encoding merges the others.

    Args:
        captions: list, tuple or one-dimensional array of str.
        vocabulary_size: int, number of pieces, special ones included.

    Returns:
        bytes, the `proto` of `keras_hub.tokenizers.SentencePieceTokenizer`.

    Source: T5 (arXiv 1910.10683), for the special pieces.

    Examples:
        >>> captions = ksm.datasets.sample("icons").captions
        >>> proto = ksm.datasets.train_vocabulary(captions, vocabulary_size=100)
        >>> tokenizer = ksm.models.LIMoETokenizer(proto)
        >>> tokenizer(["coffee cup"])
    """
    check_whole_numbers(1, vocabulary_size=vocabulary_size)
    known = isinstance(captions, (list, tuple, np.ndarray))
    texts = list(captions) if known and np.ndim(captions) == 1 else []
    others = [text for text in texts if not isinstance(text, str)]
    if not texts or others:
        found = f"{others[0]!r} among them" if others else repr(captions)[:60]
        raise ValueError(
            "`captions` must be a list, tuple or one-dimensional array of str, with at "
            f"least one. Received: captions={found}."
        )
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=map(str, texts),
            model_writer=model,
            vocab_size=vocabulary_size,
            # The default, unigram models, have few whole words on so little text.
            model_type="bpe",
            normalization_rule_name="nmt_nfkc_cf",
            character_coverage=1.0,
            required_chars=_CHARACTERS,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            # More threads add up in another order. Level 2: errors alone.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"SentencePiece cannot make this vocabulary: {error} Received: "
            f"vocabulary_size={vocabulary_size}, {len(texts)} captions."
        ) from error
    return model.getvalue()
