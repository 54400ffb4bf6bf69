"""Preprocessing of pairs of image and caption: converters, tokenizers."""

import os
import sys

import keras
import keras_hub
import numpy as np

from keras_softmoe.checks import check_whole_numbers, quote
from keras_softmoe.models.image_preprocessor import (
    ViTMoEImageConverter,
    fit_image_size,
)
from keras_softmoe.models.limoe import LIMoEBackbone
from keras_softmoe.models.two_towers import TwoTowerBackbone


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoEImageConverter(ViTMoEImageConverter):
    """`ViTMoEImageConverter` in presets of `LIMoEBackbone`.

    KerasHub finds the class of a converter by the class of the backbone.
    """

    backbone_cls = LIMoEBackbone


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoETokenizer(keras_hub.tokenizers.SentencePieceTokenizer):
    """Splits captions into pieces of a SentencePiece vocabulary.

    The presets that were trained here bring their own small vocabulary. The paper's is
    T5's: download its `spiece.model` and pass the path. Id 0 must be the padding, as it
    is in both.

    Args:
        proto: path of a SentencePiece model, or its content as bytes, for example from
            `datasets.train_vocabulary`.
        **kwargs: as in `keras_hub.tokenizers.SentencePieceTokenizer`.

    Examples:
        >>> captions = ksm.datasets.sample("shapes").captions
        >>> proto = ksm.datasets.train_vocabulary(captions, vocabulary_size=100)
        >>> tokenizer = ksm.models.LIMoETokenizer(proto)
        >>> tokenizer(["a red circle"])
    """

    backbone_cls = LIMoEBackbone

    def load_assets(self, dir_path):
        # KerasHub leaves the file open.
        (name,) = self.file_assets
        with open(os.path.join(dir_path, name), "rb") as file:
            self.set_proto(file.read())


class ContrastivePreprocessor(keras_hub.models.Preprocessor):
    """Base class of the preprocessors for pairs of image and caption.

    Args:
        tokenizer: `LIMoETokenizer`, without a `sequence_length` of its own.
        image_converter: `ViTMoEImageConverter` or `None`.
        sequence_length: int, tokens of a text, padded with zeros.
        truncate: bool, whether longer captions are cut. By default they are refused.
        **kwargs: as in `keras_hub.models.Preprocessor`.

    Call arguments:
        - `x`: images `(B, height, width, channels)` from 0 to 255.
        - `y`: `B` captions, str, or `(B, sequence_length)` int token ids.
        - `sample_weight`: must be `None`.

    Returns:
        dict of `"images"` in `[-1, 1]` and `"token_ids"` `(B, sequence_length)` int32,
        the inputs of the backbone.

    Raises:
        ValueError: if a caption is empty, or longer than the sequence and not to be
            cut, or is not a string. (In a `tf.data` pipeline it is TensorFlow's
            `InvalidArgumentError`.)
    """

    def __init__(
        self,
        tokenizer,
        image_converter=None,
        sequence_length=16,
        truncate=False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if getattr(tokenizer, "sequence_length", None):
            raise ValueError(
                "The preprocessor pads captions itself, and refuses those that are too "
                "long: make the tokenizer without a length. Received: a tokenizer "
                f"with sequence_length={tokenizer.sequence_length}."
            )
        check_whole_numbers(1, sequence_length=sequence_length)
        self.tokenizer = tokenizer
        self.image_converter = image_converter
        self.sequence_length = sequence_length
        self.truncate = truncate

    def call(self, x, y=None, sample_weight=None):
        if sample_weight is not None:
            raise no_weights("sample_weight", sample_weight)
        if isinstance(x, dict):
            x, y = x["images"], x["captions"]
        return {"images": self.convert(x), "token_ids": self.tokenize(y)}

    def convert(self, images):
        """Convert a batch of images to inputs of the backbone."""
        return images if self.image_converter is None else self.image_converter(images)

    def tokenize(self, captions):
        """Convert captions to `(B, sequence_length)` int32 ids (ids pass unchanged).

        A NumPy array, or a symbolic tensor in a `tf.data` pipeline.
        """
        if "int" in str(getattr(captions, "dtype", "")):
            return captions
        if _is_symbolic(captions):
            return self._tokenize_symbolic(captions)
        captions = checked_captions(captions)
        tokens = [np.asarray(ids).tolist() for ids in self.tokenizer(captions)]
        for caption, ids in zip(captions, tokens, strict=True):
            self._check_length(caption, len(ids))
        token_ids = np.zeros((len(tokens), self.sequence_length), "int32")
        for row, ids in zip(token_ids, tokens, strict=True):
            row[: len(ids)] = ids[: self.sequence_length]
        return token_ids

    def _check_length(self, caption, length):
        if not length:
            raise ValueError(
                "A caption must not be empty. Write one, or leave the pair out. "
                f"Received: caption={caption!r}."
            )
        if length > self.sequence_length and not self.truncate:
            raise ValueError(
                f"A caption has more tokens than the model takes: {length}, with "
                f"sequence_length={self.sequence_length}. Received: "
                f"caption={caption!r}. Shorten it, or let captions be cut: "
                "`truncate=True` in the preprocessor."
            )

    def _tokenize_symbolic(self, captions):
        import tensorflow as tf

        if captions.dtype != tf.string or captions.shape.rank not in (None, 1):
            raise ValueError(
                "A dataset gives batches of images and captions, the captions str. "
                f"Received: captions of shape {captions.shape}, "
                f"dtype {captions.dtype.name}. Call its `batch` first."
            )
        # `keras.utils.set_random_seed` clears the caches of TensorFlow that hold the
        # vocabularies of existing tokenizers.
        with tf.init_scope():
            self.tokenizer.set_proto(self.tokenizer.proto)
        tokens = self.tokenizer(captions)
        lengths = tokens.row_lengths()
        checks = [
            tf.debugging.assert_positive(
                lengths, message="A caption is empty. Leave such pairs out."
            )
        ]
        if not self.truncate:
            message = (
                f"A caption has more than sequence_length={self.sequence_length} "
                "tokens. Shorten it, or let captions be cut: `truncate=True` in the "
                "preprocessor."
            )
            longest = tf.cast(self.sequence_length, lengths.dtype)
            checks.append(
                tf.debugging.assert_less_equal(lengths, longest, message=message)
            )
        with tf.control_dependencies(checks):
            return tokens.to_tensor(shape=(None, self.sequence_length))

    def get_config(self):
        return {
            **super().get_config(),
            "sequence_length": self.sequence_length,
            "truncate": self.truncate,
        }


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoEPreprocessor(ContrastivePreprocessor):
    """Prepares pairs of image and caption for `LIMoEContrastive`.

    Args:
        tokenizer: `LIMoETokenizer`, without a `sequence_length` of its own.
        image_converter: `ViTMoEImageConverter` or `None`.
        sequence_length: int, tokens of a text, padded with zeros.
        truncate: bool, whether longer captions are cut, as in the paper. By default
            they are refused, since a cut loses words without notice.
        **kwargs: as in `keras_hub.models.Preprocessor`.

    Source: LIMoE, appendix A (16 tokens; images in `[-1, 1]`).

    Examples:
        >>> preprocessor = ksm.models.LIMoEPreprocessor(
        ...     limoe.preprocessor.tokenizer, ksm.models.ViTMoEImageConverter((32, 32))
        ... )
        >>> preprocessor(scenes[:2], ["a red circle", "two blue stars"])[
        ...     "token_ids"
        ... ].shape
        (2, 16)
    """

    backbone_cls = LIMoEBackbone
    tokenizer_cls = LIMoETokenizer
    image_converter_cls = ViTMoEImageConverter


@keras.saving.register_keras_serializable(package="keras_softmoe")
class TwoTowerPreprocessor(ContrastivePreprocessor):
    """Prepares pairs of image and caption for `TwoTowerContrastive`.

    Arguments and inputs are those of `LIMoEPreprocessor`.

    Examples:
        >>> preprocessor = ksm.models.TwoTowerPreprocessor(
        ...     limoe.preprocessor.tokenizer, ksm.models.ViTMoEImageConverter((32, 32))
        ... )
        >>> preprocessor(scenes[:2], ["a red circle", "two blue stars"])[
        ...     "token_ids"
        ... ].shape
        (2, 16)
    """

    backbone_cls = TwoTowerBackbone
    tokenizer_cls = LIMoETokenizer
    image_converter_cls = ViTMoEImageConverter


def no_weights(name, value):
    """Return the error for weights, which pairs do not have."""
    return ValueError(
        "Pairs are compared with each other and have no weights. Received: "
        f"{name}={quote(value)}. Leave it out."
    )


def checked_captions(captions):
    """Return captions as a list of str.

    Raises:
        ValueError: if there are others than strings among them, or a single string was
            given.
    """
    captions = np.asarray(captions, dtype=object)
    if captions.ndim != 1 or not len(captions):
        raise ValueError(
            "Captions are a list or one-dimensional array of str, at least one. "
            f"Received: captions of shape {captions.shape}: {captions!r:.80}. Put a "
            "single caption into a list."
        )
    captions = [c.decode() if isinstance(c, bytes) else c for c in captions]
    wrong = [(i, c) for i, c in enumerate(captions) if not isinstance(c, str)]
    if wrong:
        raise ValueError(
            "Captions must be strings. Received: "
            f"captions[{wrong[0][0]}]={wrong[0][1]!r} of type "
            f"{type(wrong[0][1]).__name__}."
        )
    return [str(c) for c in captions]


def fit_preprocessor(preprocessor, backbone):
    """Set the size of images to the backbone's, and check lengths and vocabulary."""
    fit_image_size(preprocessor, backbone.image_shape[:2])
    length = getattr(preprocessor, "sequence_length", backbone.sequence_length)
    if length != backbone.sequence_length:
        raise ValueError(
            "Preprocessor and backbone must agree on the length of a text. Received: "
            f"sequence_length={length} and {backbone.sequence_length}."
        )
    tokenizer = getattr(preprocessor, "tokenizer", None)
    rows = getattr(backbone, "text_backbone", backbone).vocabulary_size
    # While a file is read the tokenizer has no vocabulary yet.
    has_vocabulary = getattr(tokenizer, "proto", None) is not None
    if has_vocabulary and tokenizer.vocabulary_size() > rows:
        raise ValueError(
            "The tokenizer has pieces that the backbone does not know. Received: "
            f"{tokenizer.vocabulary_size()} pieces for vocabulary_size={rows}."
        )


def _is_symbolic(captions):
    # Without TensorFlow there are no pipelines of it.
    tf = sys.modules.get("tensorflow")
    return tf is not None and tf.is_symbolic_tensor(captions)
