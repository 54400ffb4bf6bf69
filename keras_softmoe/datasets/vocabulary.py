"""SentencePiece vocabularies small enough to ship with a small model."""

import io
import string

import numpy as np

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.types import Texts

# Characters of captions, in lower case.
_CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation


def train_vocabulary(captions: Texts, vocabulary_size: int = 400) -> bytes:
    """Train a SentencePiece vocabulary on captions.

    Special pieces are as in T5: padding 0, end of text 1, unknown 2, no beginning of
    text. Text is lower-cased and normalized (`nmt_nfkc_cf`). All lower-case ASCII
    letters, digits and punctuation are pieces; byte-pair encoding merges the others.
    The same captions in the same order give the same bytes.

    Args:
        captions: list, tuple or one-dimensional array of str.
        vocabulary_size: int, number of pieces, special ones included.

    Returns:
        The model as bytes, the `proto` of
        `keras_hub.tokenizers.SentencePieceTokenizer`.

    Raises:
        ValueError: if `captions` are no texts, or do not give `vocabulary_size` pieces.

    Source: T5 (arXiv 1910.10683), for the special pieces.

    Examples:
        >>> captions = ksm.datasets.sample("shapes").captions
        >>> proto = ksm.datasets.train_vocabulary(captions, vocabulary_size=100)
        >>> tokenizer = ksm.models.LIMoETokenizer(proto)
        >>> tokenizer(["a red circle"])
    """
    check_whole_numbers(1, vocabulary_size=vocabulary_size)
    captions = _checked(captions)
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(captions),
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
            "SentencePiece cannot make a vocabulary of this size from these captions. "
            f"Received: vocabulary_size={vocabulary_size}, {len(captions)} captions. "
            f"SentencePiece says: {error}"
        ) from error
    return model.getvalue()


def _checked(captions):
    """Return the captions as a list of str."""
    known = isinstance(captions, (list, tuple, np.ndarray))
    texts = list(captions) if known and np.ndim(captions) == 1 else []
    others = [text for text in texts if not isinstance(text, str)]
    if not texts or others:
        found = f"{others[0]!r} among them" if others else repr(captions)[:60]
        raise ValueError(
            "`captions` must be a list, tuple or one-dimensional array of str, with at "
            f"least one. Received: captions={found}."
        )
    return [str(text) for text in texts]
