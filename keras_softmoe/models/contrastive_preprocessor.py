"""Preprocessing of pairs of image and caption: converters, tokenizers."""

import os
import sys

import keras
import keras_hub
import numpy as np

from keras_softmoe.checks import check_whole_numbers, quote
from keras_softmoe.models import image_preprocessor
from keras_softmoe.models.limoe import LIMoEBackbone
from keras_softmoe.models.two_towers import TwoTowerBackbone


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoEImageConverter(image_preprocessor.ViTMoEImageConverter):
    """`ViTMoEImageConverter` in presets of `LIMoEBackbone`."""

    backbone_cls = LIMoEBackbone


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoETokenizer(keras_hub.tokenizers.SentencePieceTokenizer):
    """Tokenizer that splits captions into pieces of a SentencePiece vocabulary.

    The paper's vocabulary is T5's: download its `spiece.model` and pass the path.

    Args:
        proto: path of a SentencePiece model (padding is 0), or its content as bytes.
        **kwargs: as in `keras_hub.tokenizers.SentencePieceTokenizer`.

    Examples:
        >>> captions = ksm.datasets.sample("icons").captions
        >>> proto = ksm.datasets.train_vocabulary(captions, vocabulary_size=100)
        >>> tokenizer = ksm.models.LIMoETokenizer(proto)
        >>> tokenizer(["coffee cup"])
    """

    backbone_cls = LIMoEBackbone

    def load_assets(self, dir_path):
        # KerasHub leaves the file open.
        (name,) = self.file_assets
        with open(os.path.join(dir_path, name), "rb") as file:
            self.set_proto(file.read())


class ContrastivePreprocessor(keras_hub.models.Preprocessor):
    """Base class of preprocessors of pairs, with arguments as `LIMoEPreprocessor`."""

    tokenizer_cls = LIMoETokenizer
    image_converter_cls = image_preprocessor.ViTMoEImageConverter

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
                "The tokenizer must be made without a length, as the preprocessor pads "
                f"captions. Received: sequence_length={tokenizer.sequence_length}."
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
        """Convert captions to `(B, sequence_length)` int32 ids; ids stay the same."""
        if "int" in str(getattr(captions, "dtype", "")):
            return captions
        # Without TensorFlow there are no pipelines of it.
        tf = sys.modules.get("tensorflow")
        if tf is not None and tf.is_symbolic_tensor(captions):
            return self._tokenize_symbolic(captions)
        captions = checked_captions(captions)
        token_ids = np.zeros((len(captions), self.sequence_length), "int32")
        found = zip(token_ids, captions, self.tokenizer(captions), strict=True)
        for row, caption, ids in found:
            ids = np.asarray(ids)
            if not len(ids):
                raise ValueError(f"A caption must not be empty. Received: {caption=}.")
            if len(ids) > self.sequence_length and not self.truncate:
                raise ValueError(
                    f"A caption has more tokens, {len(ids)}, than sequence_length="
                    f"{self.sequence_length}: shorten it, or set `truncate=True`. "
                    f"Received: caption={caption!r}."
                )
            row[: len(ids)] = ids[: self.sequence_length]
        return token_ids

    def _tokenize_symbolic(self, captions):
        import tensorflow as tf

        if captions.dtype != tf.string or captions.shape.rank not in (None, 1):
            raise ValueError(
                "A dataset must give batches of images and captions str. Received: "
                f"captions of shape {captions.shape}, dtype {captions.dtype.name}."
            )
        # `keras.utils.set_random_seed` clears the caches that hold vocabularies.
        with tf.init_scope():
            self.tokenizer.set_proto(self.tokenizer.proto)
        tokens = self.tokenizer(captions)
        lengths = tokens.row_lengths()
        checks = [tf.debugging.assert_positive(lengths, message="A caption is empty.")]
        if not self.truncate:
            message = (
                f"A caption has more than sequence_length={self.sequence_length} "
                "tokens, and is not cut (`truncate=True`)."
            )
            longest = tf.cast(self.sequence_length, lengths.dtype)
            known = {"message": message}
            checks.append(tf.debugging.assert_less_equal(lengths, longest, **known))
        with tf.control_dependencies(checks):
            return tokens.to_tensor(shape=(None, self.sequence_length))

    def get_config(self):
        names = ("sequence_length", "truncate")
        return {**super().get_config(), **{n: getattr(self, n) for n in names}}


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LIMoEPreprocessor(ContrastivePreprocessor):
    """Preprocessor of pairs of image and caption for `LIMoEContrastive`.

    Args:
        tokenizer: `LIMoETokenizer`, without a `sequence_length` of its own.
        image_converter: `ViTMoEImageConverter` or `None`.
        sequence_length: int, tokens of a text, padded with zeros.
        truncate: bool, whether longer captions are cut, as in the paper, or an error.
        **kwargs: as in `keras_hub.models.Preprocessor`.

    Returns, when called on images `(B, height, width, channels)` from 0 to 255 and `B`
        captions, str (or `(B, sequence_length)` int token ids): dict of `"images"` in
        `[-1, 1]` and `"token_ids"` `(B, sequence_length)` int32.

    Raises:
        ValueError: if a caption is empty, too long or not a string. (In a `tf.data`
            pipeline it is TensorFlow's `InvalidArgumentError`.)

    Source: LIMoE, appendix A (16 tokens; images in `[-1, 1]`).

    Examples:
        >>> converter = ksm.models.ViTMoEImageConverter((32, 32))
        >>> tokenizer = limoe.preprocessor.tokenizer
        >>> preprocessor = ksm.models.LIMoEPreprocessor(tokenizer, converter)
        >>> x = preprocessor(images[:2], ["coffee cup", "hammer"])
        >>> x["token_ids"].shape
        (2, 16)
    """

    backbone_cls = LIMoEBackbone


@keras.saving.register_keras_serializable(package="keras_softmoe")
class TwoTowerPreprocessor(ContrastivePreprocessor):
    """Preprocessor of pairs of image and caption for `TwoTowerContrastive`.

    Arguments, inputs, outputs and errors are those of `LIMoEPreprocessor`.

    Examples:
        >>> preprocessor = ksm.models.TwoTowerPreprocessor(
        ...     limoe.preprocessor.tokenizer, ksm.models.ViTMoEImageConverter((32, 32))
        ... )
        >>> x = preprocessor(images[:2], ["coffee cup", "hammer"])
        >>> x["token_ids"].shape
        (2, 16)
    """

    backbone_cls = TwoTowerBackbone


def no_weights(name, value):
    """Return the error for weights, which pairs do not have."""
    return ValueError(
        "Pairs are compared with each other and have no weights. Received: "
        f"{name}={quote(value)}."
    )


def checked_captions(captions):
    """Return captions as a list of str, or raise."""
    captions = np.asarray(captions, dtype=object)
    if captions.ndim != 1 or not len(captions):
        raise ValueError(
            "Captions must be a list or one-dimensional array of str, at least one. "
            f"Received: captions of shape {captions.shape}: {captions!r:.80}."
        )
    captions = [c.decode() if isinstance(c, bytes) else c for c in captions]
    for i, caption in enumerate(captions):
        if not isinstance(caption, str):
            raise ValueError(
                f"Captions must be strings. Received: captions[{i}]={caption!r} of "
                f"type {type(caption).__name__}."
            )
    return [str(c) for c in captions]


def fit_preprocessor(preprocessor, backbone):
    """Set the size of images to the backbone's, and check lengths and vocabulary."""
    image_preprocessor.fit_image_size(preprocessor, backbone.image_shape[:2])
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
