"""Text by the tags of its words, against a count of the tokens one by one."""

import numpy as np
import pytest

from keras_softmoe import analysis
from keras_softmoe.analysis._words import _words
from tests.support import pairs, tiny_limoe

TAGS = {"a": "article", "red": "adjective", "circle": "noun", "heart": "noun"}


class Pieces:
    """A vocabulary that cuts words and knows signs."""

    PIECES = ("<pad>", "</s>", "▁red", "▁cir", "cle", ",", "▁", "a")

    def id_to_token(self, index):
        assert isinstance(index, int)
        return self.PIECES[index]


class Preprocessor:
    tokenizer = Pieces()

    def convert(self, images):
        return images


@pytest.mark.parametrize(
    "ids, words, word_of",
    [
        ((2, 3, 4, 0), ["red", "circle"], [0, 1, 1, None]),
        # A sign is a word, and so is what follows it.
        ((3, 5, 4, 1), ["cir", ",", "cle", "</s>"], [0, 1, 2, 3]),
        # A word may begin with a piece that is nothing else.
        ((6, 7, 6, 3, 4), ["a", "circle"], [0, 0, 1, 1, 1]),
        ((4, 6, 5, 6), ["cle", ",", "▁"], [0, 1, 1, 2]),
        ((0, 0), [], [None, None]),
    ],
)
def test_words(ids, words, word_of):
    assert _words(Pieces(), np.array(ids)) == (words, word_of)


def tagger(words):
    """Colours and others; a word that no batch but the first has makes a tag."""
    return ["sign" if word == "," else word[0] for word in words]


# Tag of each token, by hand.
TOKEN_IDS = np.array([[2, 3, 4], [6, 7, 5], [2, 0, 0]], "int32")
TOKEN_TAGS = [["r", "c", "c"], ["a", "a", "sign"], ["r", "padding", "padding"]]


def words_of(model, images, captions, tagger, **kwargs):
    routing = analysis.analyze(
        model, images, captions=captions, tagger=tagger, verbose=0, **kwargs
    )
    return {block: found.words for block, found in routing.modalities.items()}


@pytest.mark.parametrize("batch_size", [2, 4])
@pytest.mark.parametrize("with_images", [True, False])
def test_counts(batch_size, with_images):
    backbone = pairs.limoe(vocabulary_size=8)
    images = pairs.images() if with_images else None
    statistics = words_of(
        *(backbone, images, TOKEN_IDS, tagger),
        batch_size=batch_size,
        preprocessor=Preprocessor(),
    )
    tokens = pairs.routed_tokens(backbone, images, TOKEN_IDS)
    assert list(statistics) == list(tokens)
    for block, found in statistics.items():
        assert found.tags == ("r", "c", "a", "sign", "padding")
        np.testing.assert_array_equal(found.num_tokens, [2, 2, 2, 1, 2])
        expected = np.zeros((5, 4), int)
        for token in tokens[block]:
            if token.modality == "text":
                tag = TOKEN_TAGS[token.pair][token.index]
                for expert in token.gates:
                    expected[found.tags.index(tag), expert] += 1
        np.testing.assert_array_equal(found.assigned, expected)
        total = expected.sum(axis=0)
        for expert in range(4):
            share = expected[:, expert] / total[expert] if total[expert] else 0
            np.testing.assert_allclose(found.share[:, expert], share)
    # With images some text is dropped, alone none is.
    assert statistics[0].assigned.sum() == 9 or with_images


def test_captions_of_a_task():
    model = tiny_limoe.task()
    captions = ["a red circle", "a heart"]
    seen = []

    def known(words):
        seen.append(words)
        return [TAGS[word] for word in words]

    statistics = words_of(model, None, captions, known)
    assert seen == [["a", "red", "circle"], ["a", "heart"]]
    token_ids = model.preprocessor.tokenize(captions)
    for found in statistics.values():
        counts = dict(zip(found.tags, found.num_tokens, strict=True))
        assert found.tags[-1] == "padding" and set(counts) == {
            *TAGS.values(),
            "padding",
        }
        assert counts["padding"] == (token_ids == 0).sum()
        assert counts["article"] == 2 and sum(counts.values()) == token_ids.size


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tagger": lambda words: ["x"]}, r"1 tags, \['x'\], for the words \['red"),
        ({"preprocessor": None}, "preprocessor=None"),
        ({"captions": None, "images": pairs.images()}, "captions of type NoneType"),
    ],
)
def test_bad_arguments(arguments, message):
    arguments = {
        "images": None,
        "captions": TOKEN_IDS,
        "tagger": tagger,
        "preprocessor": Preprocessor(),
        **arguments,
    }
    with pytest.raises(ValueError, match=f"Received: .*{message}"):
        words_of(pairs.limoe(vocabulary_size=8), **arguments)
