"""Text by the tags of its words, against a count of the tokens one by one."""

import numpy as np
import pytest

from keras_softmoe import analysis
from keras_softmoe.analysis import plot_tags
from keras_softmoe.analysis._tags import TagStatistics, _words
from tests.analysis import pairs
from tests.analysis.reading import legend_names, png, tick_names
from tests.models import tiny_limoe

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


@pytest.mark.parametrize("batch_size", [2, 4])
@pytest.mark.parametrize("with_images", [True, False])
def test_counts(batch_size, with_images):
    backbone = pairs.limoe(vocabulary_size=8)
    images = pairs.images() if with_images else None
    statistics = analysis.tag_statistics(
        *(backbone, TOKEN_IDS, tagger, images),
        batch_size=batch_size,
        preprocessor=Preprocessor(),
        verbose=0,
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
        np.testing.assert_array_equal(found.seated, expected)
        total = expected.sum(axis=0)
        for expert in range(4):
            share = expected[:, expert] / total[expert] if total[expert] else 0
            np.testing.assert_allclose(found.share[:, expert], share)
    # With images some text is dropped, alone none is.
    assert statistics[0].seated.sum() == 9 or with_images


def test_captions_of_a_task():
    model = tiny_limoe.task()
    captions = ["a red circle", "a heart"]
    seen = []

    def known(words):
        seen.append(words)
        return [TAGS[word] for word in words]

    statistics = analysis.tag_statistics(model, captions, known, verbose=0)
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
        "captions": TOKEN_IDS,
        "tagger": tagger,
        "preprocessor": Preprocessor(),
        **arguments,
    }
    with pytest.raises(ValueError, match=f"Received: .*{message}"):
        analysis.tag_statistics(pairs.limoe(vocabulary_size=8), verbose=0, **arguments)


# === Figure ===


def test_bars_are_shares():
    seated = np.array([[6, 0, 1], [2, 0, 1], [0, 0, 2]])
    block = TagStatistics(("noun", "verb", "padding"), np.array([10, 4, 6]), seated)
    figure = plot_tags({1: block, 3: block._replace(seated=seated[:, ::-1])})
    assert [ax.get_title() for ax in figure.axes] == ["block 1", "block 3"]
    ax = figure.axes[0]
    # The second expert has no text.
    assert tick_names(ax.xaxis) == ["0", "2", "all"]
    expected = np.array([[0.75, 0.25, 0.5], [0.25, 0.25, 0.2], [0.0, 0.5, 0.3]])
    bottom = np.zeros(3)
    for bars, heights in zip(ax.containers, expected, strict=True):
        np.testing.assert_allclose([bar.get_height() for bar in bars], heights)
        np.testing.assert_allclose([bar.get_y() for bar in bars], bottom)
        bottom += heights
    assert [text.get_text() for text in ax.texts] == ["40%", "20%"]
    assert tick_names(figure.axes[1].xaxis) == ["0", "2", "all"]
    assert legend_names(figure.legends[0]) == ["padding", "verb", "noun"]
    assert png(figure).startswith(b"\x89PNG")


def test_figure_of_many_tags_and_of_some_blocks():
    tags = tuple(map(str, range(12)))
    block = TagStatistics(tags, np.ones(12, int), np.ones((12, 2), int))
    figure = plot_tags({1: block, 3: block}, layers=[3])
    (ax,) = figure.axes
    assert len({tuple(bars[0].get_facecolor()) for bars in ax.containers}) == 12
    for wrong in ({}, {1: None}):
        with pytest.raises(ValueError, match="analysis.tag_statistics"):
            plot_tags(wrong)
