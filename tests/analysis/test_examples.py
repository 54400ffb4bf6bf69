"""Examples of what experts take, against a search among all tokens."""

import numpy as np
import pytest

from keras_softmoe import analysis, routers
from keras_softmoe.analysis._examples import ExampleReducer, _WordCounts
from keras_softmoe.analysis._pairs import Pairs
from keras_softmoe.models import ViTMoEBackbone
from tests.support import pairs

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


def examples_of(backbone, images, token_ids, preprocessor=None, **kwargs):
    """Examples of the second block."""
    given = Pairs(backbone, images, token_ids, preprocessor)
    (found,) = given.observe([ExampleReducer(given, **kwargs)], 64, verbose=0)
    assert list(found) == [0, 1]
    return found[1]


def patch_of(token):
    image = pairs.images()[token.pair]
    row, column = divmod(token.index, COLUMNS)
    return image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]


@pytest.mark.parametrize("num_patches", [2, 12])
def test_patches(backbone, tokens, num_patches):
    found = examples_of(backbone, pairs.images(), pairs.token_ids(), count=num_patches)
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
    found = examples_of(backbone, pairs.images(), token_ids, count=num_words)
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


# === Patches of images ===

ROUTERS = {
    "token choice": routers.SoftmaxTokenChoiceRouter(
        3, num_selected_experts=2, capacity_factor=0.5
    ),
    "expert choice": routers.SoftmaxExpertChoiceRouter(3),
}


@pytest.mark.parametrize("pooling", ["gap", "token"])
@pytest.mark.parametrize("name", ROUTERS)
def test_patches_against_maps(name, pooling):
    # Groups of two, of which the last one is partly empty.
    backbone = ViTMoEBackbone(
        *((8, 16, 3), 4, 1, 2, 8, 16),
        moe_layers=(0,),
        router=ROUTERS[name],
        pooling=pooling,
        group_images=2,
    )
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (13, 8, 16, 3)).astype("float32")

    def analyzed(images):
        return analysis.analyze(
            backbone, images, num_pictures=4, batch_size=4, verbose=0
        ).maps[0]

    found = analyzed(images).patches
    maps = [analyzed(images[start : start + 4]) for start in range(0, 13, 4)]
    taken = np.concatenate([(m.dispatch > 0).any(-1) for m in maps])
    weights = np.concatenate([m.combine.sum(-1) for m in maps])
    share = taken.sum((0, 1, 2)) / taken.sum()
    np.testing.assert_allclose(found.share, share)
    for expert in range(3):
        # (images, rows, columns), the best place of each image
        own = np.where(taken[..., expert], weights[..., expert], -1)
        best = own.reshape(13, -1).max(1)
        order = np.argsort(-best, kind="stable")[:10]
        order = order[best[order] >= 0]
        np.testing.assert_allclose(found.weights[expert], best[order], rtol=1e-5)
        for picture, image in zip(found.pictures[expert], order, strict=True):
            row, column = np.unravel_index(own[image].argmax(), (2, 4))
            patch = images[image, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            np.testing.assert_array_equal(picture[4:8, 4:8], patch)
            # Nothing above the first row, nothing below the second.
            outside = picture[:4] if row == 0 else picture[8:]
            assert np.isnan(outside).all()
            beside = picture[4:8, 8:]
            if column < 3:
                start = 4 * column + 4
                neighbour = images[image, 4 * row : 4 * row + 4, start : start + 4]
                np.testing.assert_array_equal(beside, neighbour)
            else:
                assert np.isnan(beside).all()
