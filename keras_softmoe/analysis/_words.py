"""Kinds of words that the experts of a LIMoE take, such as parts of speech."""

from typing import NamedTuple

import numpy as np

from keras_softmoe.analysis._blocks import experts_of_tokens
from keras_softmoe.analysis._pairs import PADDING, PADDING_TAG

# SentencePiece's sign at the beginning of a word.
WORD_BEGINS = "▁"


class WordStatistics(NamedTuple):
    """The tokens of text at one block by the tag of their word.

    The pieces into which the tokenizer cuts a caption are put together to words, the
    words of a caption are tagged, and each piece has the tag of its word. A piece
    without a letter or digit, and a special one such as `</s>`, is a word by itself: a
    comma does not stick to the word before it. The padding of captions has the tag
    `"padding"`.

    Attributes:
        tags: tuple of `T` str, the most frequent first, `"padding"` last.
        num_tokens: `(T,)` int64 array, how many tokens have each tag.
        assigned: `(T, E)` int64 array, how many of them each expert processes; tokens
            that `K` experts process count at each.
    """

    tags: tuple
    num_tokens: np.ndarray
    assigned: np.ndarray

    @property
    def share(self):
        """`(T, E)` float64: of the text that an expert processes, the share of a tag.

        Zero where an expert processes no text.
        """
        return self.assigned / np.maximum(self.assigned.sum(axis=0), 1)


class WordReducer:
    """Reducer to a dict from each block to its `WordStatistics`.

    Args:
        pairs: `Pairs`, whose decisions it will see.
        tagger: callable from the list of the words of a caption, str, to as many tags.

    Raises:
        ValueError: if the pairs have no captions or no tokenizer.
    """

    def __init__(self, pairs, tagger):
        if pairs.tokenizer is None or pairs.captions is None:
            kind = type(pairs.captions).__name__
            raise ValueError(
                "Words need a tokenizer: pass captions, and a task or its "
                f"preprocessor. Received: captions of type {kind}, "
                f"preprocessor={pairs.preprocessor!r}."
            )
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
        # (G, S), -1 for images and masked tokens
        tags = np.full(valid.shape, -1)
        self._pairs.by_pair(tags, "text", len(token_ids))[:] = self._batch[1]
        tags = np.where(valid, tags, -1)
        taken, _, _ = experts_of_tokens(decision)
        assigned = [taken[tags == tag].sum(0) for tag in range(len(self._index))]
        count = np.bincount(tags[tags >= 0], minlength=len(self._index))
        self._counts.setdefault(name, []).append((count, np.array(assigned)))

    def result(self):
        return {name: self._statistics(c) for name, c in self._counts.items()}

    def _statistics(self, counts):
        # A later batch may have brought new tags.
        num_tokens = np.zeros(len(self._index), "int64")
        assigned = np.zeros((len(self._index), counts[0][1].shape[1]), "int64")
        for of_batch, placed in counts:
            num_tokens[: len(of_batch)] += of_batch
            assigned[: len(placed)] += placed
        tags = list(self._index)
        order = sorted(
            range(len(tags)), key=lambda i: (tags[i] == PADDING_TAG, -num_tokens[i])
        )
        names = tuple(tags[i] for i in order)
        return WordStatistics(names, num_tokens[order], assigned[order])

    def _tags(self, token_ids):
        """Return the index of the tag of each token of a caption, a list."""
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
    """Return the words of a caption, and the word of each token, `None` for padding."""
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
