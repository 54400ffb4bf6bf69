"""Which kinds of words each expert of a LIMoE takes, such as parts of speech."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe.analysis._pairs import PADDING, Pairs
from keras_softmoe.types import Texts

# What SentencePiece writes where a word begins.
WORD_BEGINS = "▁"
PADDING_TAG = "padding"


class TagStatistics(NamedTuple):
    """The tokens of text at one block by the tag of their word.

    Attributes:
        tags: tuple of `T` str, the most frequent first, `"padding"` last.
        num_tokens: `(T,)` int64 array, how many tokens have each tag.
        seated: `(T, E)` int64 array, how many of them each expert processes; those that
            `K` experts process count at each.
    """

    tags: tuple
    num_tokens: np.ndarray
    seated: np.ndarray

    @property
    def share(self):
        """`(T, E)` float64: of the text that an expert processes, the share of a tag.

        Zero where an expert processes no text.
        """
        return self.seated / np.maximum(self.seated.sum(axis=0), 1)


def tag_statistics(
    model: keras.Model,
    captions: Texts,
    tagger: Callable,
    images: ArrayLike | None = None,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> dict:
    """Count by the kind of word what each expert processes of a text.

    The pieces into which the tokenizer cuts a caption are put together to words, the
    words of a caption are tagged, and each piece has the tag of its word. A piece
    without a letter or digit, and a special one such as `</s>`, is a word by itself: a
    comma does not stick to the word before it. What fills captions up has the tag
    `"padding"`.

    Args:
        model: `LIMoEBackbone`, or a task that has one (its `preprocessor`, if any, is
            applied to images and captions).
        captions: `N` str, or `(N, sequence_length)` ints.
        tagger: callable from the list of the words of a caption, str, to as many tags,
            str. With NLTK, whose data have to be downloaded first:
            `lambda words: [tag for _, tag in nltk.pos_tag(words, tagset="universal")]`.
        images: `(N, height, width, channels)` array that is routed with the captions
            and competes with them for slots, or `None` for text alone.
        batch_size: int, pairs routed at a time, rounded up to whole groups.
        preprocessor: as in `analysis.modality_statistics`.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        dict from the index of each MoE block to its `TagStatistics`.

    Raises:
        ValueError: as `analysis.modality_statistics`, or if there is no tokenizer to
            tell the words of the captions, or the tagger does not return one tag for
            each word.

    Source: LIMoE, appendix G.1 (figure 40), with parts of speech as tags.

    Examples:
        >>> def tagger(words):
        ...     return ["article" if word == "a" else "other" for word in words]
        >>> statistics = ksm.analysis.tag_statistics(limoe, captions, tagger)
        >>> statistics[3].tags, statistics[3].share[:, 0]
    """
    pairs = Pairs(model, images, captions, preprocessor)
    if pairs.tokenizer is None or captions is None:
        raise ValueError(
            "Words are told by a tokenizer: pass captions, and a task or its "
            f"preprocessor. Received: model of type {type(model).__name__}, captions "
            f"of type {type(captions).__name__}, preprocessor={preprocessor!r}."
        )
    (found,) = pairs.observe([TagReducer(pairs, tagger)], batch_size, verbose)
    return found


class TagReducer:
    """Reducer to a dict from each block to its `TagStatistics`.

    Args:
        pairs: `Pairs` with captions and a tokenizer, whose decisions it will see.
        tagger: as in `tag_statistics`.
    """

    def __init__(self, pairs, tagger):
        self._pairs = pairs
        self._tagger = tagger
        self._index = {}
        self._batch = None, None
        # Block -> list of (T,) tokens and (T, E) tokens in slots, batch by batch.
        self._counts = {}

    def update(self, name, decision, inputs):
        _, token_ids = self._pairs.halves(inputs)
        if inputs is not self._batch[0]:
            # Once for all blocks.
            self._batch = inputs, np.array([self._tags(ids) for ids in token_ids])
        valid = decision.summary["valid"]
        # (G, S), -1 for images and what is not there
        tags = np.full(valid.shape, -1)
        self._pairs.by_pair(tags, "text", len(token_ids))[:] = self._batch[1]
        tags = np.where(valid, tags, -1)
        token, filled, _ = decision.routing
        # (G, E, C)
        placed = np.where(filled, np.take_along_axis(tags[:, None], token, -1), -1)
        seated = [(placed == tag).sum((0, 2)) for tag in range(len(self._index))]
        count = np.bincount(tags[tags >= 0], minlength=len(self._index))
        self._counts.setdefault(name, []).append((count, np.array(seated)))

    def result(self):
        return {name: self._statistics(c) for name, c in self._counts.items()}

    def _statistics(self, counts):
        # A later batch may have brought new tags.
        num_tokens = np.zeros(len(self._index), "int64")
        seated = np.zeros((len(self._index), counts[0][1].shape[1]), "int64")
        for of_batch, placed in counts:
            num_tokens[: len(of_batch)] += of_batch
            seated[: len(placed)] += placed
        tags = list(self._index)
        order = sorted(
            range(len(tags)), key=lambda i: (tags[i] == PADDING_TAG, -num_tokens[i])
        )
        names = tuple(tags[i] for i in order)
        return TagStatistics(names, num_tokens[order], seated[order])

    def _tags(self, token_ids):
        """The index of the tag of each token of a caption, a list."""
        words, word_of = _words(self._pairs.tokenizer, token_ids)
        tags = list(self._tagger(list(words)))
        if len(tags) != len(words):
            raise ValueError(
                "The tagger must return one tag for each word. Received: "
                f"{len(tags)} tags, {tags}, for the words {words}."
            )
        found = [PADDING_TAG if w is None else str(tags[w]) for w in word_of]
        return [self._index.setdefault(tag, len(self._index)) for tag in found]


def _words(tokenizer, token_ids):
    """Words of a caption, and for each token which one it is of, `None` for padding."""
    words, word_of = [], []
    joins = False
    for token_id in token_ids:
        if token_id == PADDING:
            word_of.append(None)
            continue
        piece = tokenizer.id_to_token(int(token_id))
        text = piece.removeprefix(WORD_BEGINS)
        # A comma, or a special piece such as `</s>`
        is_sign = not any(map(str.isalnum, text)) or text[0] + text[-1] == "<>"
        is_new = piece.startswith(WORD_BEGINS) or is_sign or not joins
        # A word may have begun with a piece that is nothing else.
        if not words or (is_new and words[-1]):
            words.append("")
        words[-1] += text
        word_of.append(len(words) - 1)
        joins = not is_sign or not text
    return [word or WORD_BEGINS for word in words], word_of
