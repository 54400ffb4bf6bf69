"""Examples of what experts take, against a search among all tokens."""

import numpy as np
import pytest

from keras_softmoe import analysis, routers
from keras_softmoe.analysis._modality_examples import _WordCounts
from tests.analysis import pairs
from tests.models import tiny
from tests.references import to_numpy

ROWS = COLUMNS = 2


@pytest.fixture(scope="module")
def backbone():
    return pairs.limoe()


@pytest.fixture(scope="module")
def tokens(backbone):
    return pairs.routed_tokens(backbone, pairs.images(), pairs.token_ids())[1]


class Letters:
    """As much of a tokenizer as is asked for."""

    def id_to_token(self, index):
        assert isinstance(index, int)
        return "_▁abcde"[index]


class Preprocessor:
    tokenizer = Letters()

    def convert(self, images):
        return images

    def tokenize(self, captions):
        raise AssertionError("Token ids need no tokenizer.")


def examples_of(backbone, images, token_ids, **kwargs):
    return analysis.expert_examples(backbone, images, token_ids, verbose=0, **kwargs)


def patch_of(token):
    image = pairs.images()[token.pair]
    row, column = divmod(token.index, COLUMNS)
    return image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]


@pytest.mark.parametrize("num_patches", [2, 12])
def test_patches(backbone, tokens, num_patches):
    found = examples_of(
        backbone, pairs.images(), pairs.token_ids(), layer=1, num_patches=num_patches
    )
    assert found.layer == 1
    counts = []
    for expert in range(4):
        mine = [
            token
            for token in tokens
            if token.modality == "image" and token.selection.argmax() == expert
        ]
        counts.append(len(mine))
        mine.sort(key=lambda token: -token.probabilities[expert])
        # Of each pair the first.
        best = {token.pair: token for token in reversed(mine)}
        expected = [token for token in mine if best[token.pair] is token][:num_patches]
        assert len(found.patches[expert]) == len(expected)
        for patch, probability, token in zip(
            found.patches[expert],
            found.patch_probabilities[expert],
            expected,
            strict=True,
        ):
            np.testing.assert_array_equal(patch, patch_of(token))
            np.testing.assert_allclose(
                probability, token.probabilities[expert], rtol=1e-5
            )
    np.testing.assert_allclose(found.share["image"], np.array(counts) / 12)


@pytest.mark.parametrize("num_words", [1, 12])
def test_words(backbone, tokens, num_words):
    token_ids = pairs.token_ids()
    found = examples_of(
        backbone, pairs.images(), token_ids, layer=1, num_words=num_words
    )
    text = [token for token in tokens if token.modality == "text"]
    by_word = {}
    for token in text:
        by_word.setdefault(token_ids[token.pair, token.index], []).append(token)
    for expert in range(4):
        mean = {
            word: np.mean([token.probabilities[expert] for token in found])
            for word, found in by_word.items()
            if expert in [token.selection.argmax() for token in found]
        }
        words = sorted((w for w in mean if mean[w] >= 1 / 4), key=lambda w: -mean[w])
        words = words[:num_words]
        assert found.words[expert] == [str(word) for word in words]
        np.testing.assert_allclose(
            found.word_probabilities[expert], [mean[word] for word in words], rtol=1e-5
        )
    assert sum(map(len, found.words)) > 0
    first = np.bincount([t.selection.argmax() for t in text], minlength=4)
    np.testing.assert_allclose(found.share["text"], first / 9)


def test_one_modality_and_names_of_tokens(backbone):
    images = examples_of(backbone, pairs.images(), None)
    assert images.layer == 0
    assert images.words is images.word_probabilities is None
    assert list(images.share) == ["image"]
    text = examples_of(backbone, None, pairs.token_ids(), preprocessor=Preprocessor())
    assert text.patches is text.patch_probabilities is None
    ids = examples_of(backbone, None, pairs.token_ids()).words
    letters = [[Letters().id_to_token(int(i)) for i in words] for words in ids]
    assert text.words == letters
    assert any("_" in words for words in letters)


def test_a_word_is_judged_by_all_its_places():
    """Rare ones that are sure come before frequent ones that are not."""
    counts = _WordCounts(4, 2)
    token_ids = np.array([[1, 1, 2, 3]])
    sure = np.array([0.9, 0.2, 0.8, 0.55])
    probabilities = np.stack([sure, 1 - sure], -1)[None]
    counts.add(token_ids, probabilities, probabilities.argmax(-1))
    # The same again, but for one word that is not there.
    counts.add(token_ids[:, :3], probabilities[:, :3], probabilities.argmax(-1)[:, :3])
    ids, means = counts.surest(5)
    # Word 1 chose the second expert once, but goes there less than half of the time.
    assert [list(i) for i in ids] == [[2, 1, 3], []]
    np.testing.assert_allclose(means[0], [0.8, 0.55, 0.55])


# === One pair ===


@pytest.mark.parametrize("num_selected_experts", [1, 2])
def test_a_pair(num_selected_experts):
    # Alone in its group it finds every expert full but for one slot.
    router = routers.LIMoERouter(4, num_selected_experts, capacity_factor=0.3)
    backbone = pairs.limoe(router, group_images=1)
    image, ids = pairs.images()[0], pairs.token_ids()[0]
    found = analysis.pair_routing(
        backbone, image, ids, layer=1, preprocessor=Preprocessor()
    )
    assert found.layer == 1
    assert found.num_experts == 4
    np.testing.assert_array_equal(found.image, image)
    assert found.words == [Letters().id_to_token(int(i)) for i in ids]
    assert found.patch_experts.shape == (ROWS, COLUMNS)
    decision = backbone.route(image[None], ids[None])[1]
    dropped = to_numpy(decision.summary["dropped"])[0]
    experts = [*found.patch_experts.ravel(), *found.word_experts]
    np.testing.assert_array_equal(np.array(experts) < 0, dropped)
    assert 0 < dropped.sum() < 7
    probabilities = to_numpy(decision.summary["probabilities"])[0]
    token, filled = (to_numpy(x)[0] for x in decision.routing[:2])
    for place, expert in enumerate(experts):
        seats = [e for e in range(4) if place in token[e][filled[e]]]
        best = max(seats, key=lambda e: probabilities[place, e], default=-1)
        assert expert == best


def test_a_pair_competes_with_no_other(backbone):
    # In a group of two there is room for one pair.
    found = analysis.pair_routing(backbone, pairs.images()[0], [3, 1, 5])
    decision = backbone.route(pairs.images()[:1], pairs.token_ids()[:1])[0]
    first = to_numpy(decision.summary["selection"])[0].argmax(-1)
    np.testing.assert_array_equal(found.patch_experts.ravel(), first[:4])
    np.testing.assert_array_equal(found.word_experts, first[4:7])
    assert found.words == ["3", "1", "5"]


def test_blocks_that_route_nothing():
    backbone = pairs.limoe(moe_layers=(1,))
    with pytest.raises(ValueError, match=r"blocks \(1,\).*Received: layer=0"):
        examples_of(backbone, pairs.images(), None, layer=0)
    with pytest.raises(ValueError, match="Received: layer=2"):
        analysis.pair_routing(backbone, pairs.images()[0], [1, 2, 3], layer=2)
    with pytest.raises(ValueError, match="preprocessor=None"):
        analysis.pair_routing(backbone, tiny.images(1)[0], "a b c")
