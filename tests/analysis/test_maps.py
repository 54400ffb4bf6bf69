"""Routing maps against the routers' decisions, and examples against a search in all."""

import keras
import numpy as np
import pytest

from keras_softmoe.analysis import RoutingMaps, analyze
from keras_softmoe.analysis.maps import ExampleReducer, _WordCounts
from keras_softmoe.analysis.streaming import Pairs
from keras_softmoe.layers import SoftMoE
from keras_softmoe.models import ViTMoEBackbone
from keras_softmoe.routers import (
    LIMoERouter,
    SoftmaxExpertChoiceRouter,
    SoftmaxTokenChoiceRouter,
    SoftRouter,
)
from tests.support import pairs
from tests.support.references import to_numpy

# 2 x 3 patches, so that rows cannot be taken for columns.
GRID = (2, 3)
IMAGE_SHAPE = (8, 12, 3)


def make_backbone(router, **kwargs):
    arguments = {"moe_layers": (1,) if router else (), "router": router, **kwargs}
    return ViTMoEBackbone(IMAGE_SHAPE, 4, 2, 2, 8, 16, **arguments)


def routing_maps(model, images, layer=0, **kwargs):
    """Maps of all images, in one batch."""
    routing = analyze(model, images, num_pictures=len(images), verbose=0, **kwargs)
    return routing.maps[layer]


def make_images(count):
    rng = np.random.default_rng(0)
    return rng.uniform(-1, 1, (count, *IMAGE_SHAPE)).astype("float32")


@pytest.mark.parametrize("pooling", ["gap", "token"])
def test_soft_weights_lie_on_the_grid(pooling):
    router = SoftRouter(4, slots_per_expert=2)
    backbone = make_backbone(router, pooling=pooling, moe_layers=(0, 1))
    images = make_images(2)
    maps = routing_maps(backbone, images, layer=1)
    routing = backbone.route(images)[1].routing
    first = int(pooling == "token")
    assert maps.block == 1
    assert maps.dispatch.shape == maps.combine.shape == (2, *GRID, 4, 2)
    for found, wanted in zip((maps.dispatch, maps.combine), routing, strict=True):
        wanted = keras.ops.convert_to_numpy(wanted)
        for row, column in np.ndindex(GRID):
            token = wanted[:, first + row * GRID[1] + column]
            np.testing.assert_allclose(found[:, row, column], token, rtol=1e-5)
    total = maps.dispatch.sum(axis=(1, 2))
    if pooling == "gap":
        np.testing.assert_allclose(total, 1.0, rtol=1e-5)
    else:
        assert (total < 1.0).all()


def test_seats_of_grouped_images_find_their_image():
    # Six images in groups of four: the second group is half padding.
    router = SoftmaxTokenChoiceRouter(3, 2, capacity_factor=0.6)
    backbone = make_backbone(router, pooling="token", group_images=4)
    images = make_images(6)
    maps = routing_maps(backbone, images, 1)
    routing = backbone.route(images)[1].routing
    token, filled, gate = (keras.ops.convert_to_numpy(part) for part in routing)
    num_tokens = 1 + GRID[0] * GRID[1]
    dispatch, combine = np.zeros((2, *maps.dispatch.shape))
    for group, expert, slot in np.argwhere(filled):
        image, place = divmod(token[group, expert, slot], num_tokens)
        if place > 0:
            seat = (4 * group + image, *divmod(place - 1, GRID[1]), expert, slot)
            dispatch[seat] = 1.0
            combine[seat] = gate[group, expert, slot]
    assert dispatch.sum() > 0
    np.testing.assert_array_equal(maps.dispatch, dispatch)
    np.testing.assert_allclose(maps.combine, combine, rtol=1e-5)


def test_main_experts():
    # One image of three patches, two experts of two slots.
    combine = np.array(
        [
            # 0.5 + 0.0 against 0.3 + 0.3
            [[0.5, 0.0], [0.3, 0.3]],
            # equal: the lower number
            [[0.2, 0.3], [0.5, 0.0]],
            # no seat
            [[0.0, 0.0], [0.0, 0.0]],
        ]
    )[None, None]
    dispatch = (combine > 0).astype("float32")
    maps = RoutingMaps(0, 3, 2, False, dispatch=dispatch, combine=combine)
    assert maps.main_experts.tolist() == [[[1, 0, -1]]]


def test_some_images_of_many():
    backbone = make_backbone(SoftRouter(2))
    images = make_images(6)
    maps = analyze(backbone, images, num_pictures=3, batch_size=4, verbose=0).maps[1]
    expected = routing_maps(backbone, images[:4], 1)
    np.testing.assert_array_equal(maps.images, images[:3])
    np.testing.assert_allclose(maps.combine, expected.combine[:3], rtol=1e-5)
    # Of the first batch at most.
    maps = analyze(backbone, images, num_pictures=6, batch_size=4, verbose=0).maps[1]
    assert len(maps.images) == 4
    assert analyze(backbone, images, verbose=0).maps == {}


def test_wrong_arguments():
    backbone = make_backbone(SoftRouter(2))
    with pytest.raises(ValueError, match="preprocessor.*dtype=uint8"):
        routing_maps(backbone, np.zeros((1, *IMAGE_SHAPE), "uint8"))
    for images in (make_images(1)[0], make_images(1)[:, :4], make_images(0)):
        with pytest.raises(
            ValueError, match=r"batches of \(8, 12, 3\).*shape=|one batch"
        ):
            routing_maps(backbone, images)
    inputs = keras.Input((4, 6))
    own = keras.Model(inputs, SoftMoE(2, 8)(inputs))
    with pytest.raises(ValueError, match="num_pictures=1 with Functional"):
        analyze(own, np.ones((1, 4, 6)), num_pictures=1, verbose=0)


class Letters:
    """As much of a tokenizer as is needed."""

    def id_to_token(self, index):
        assert isinstance(index, int)
        return "_▁abcde"[index]


class Preprocessor:
    tokenizer = Letters()

    def convert(self, images):
        return images

    def tokenize(self, captions):
        raise AssertionError("Token ids need no tokenizer.")


@pytest.mark.parametrize("num_selected_experts", [1, 2])
def test_a_pair(num_selected_experts):
    # Alone in its group it finds every expert full but for one slot.
    router = LIMoERouter(4, num_selected_experts, capacity_factor=0.3)
    backbone = pairs.limoe(router, group_images=1)
    images, ids = pairs.images()[:1], pairs.token_ids()[:1]
    found = routing_maps(backbone, images, 1, captions=ids, preprocessor=Preprocessor())
    assert (found.block, found.num_experts) == (1, 4)
    np.testing.assert_array_equal(found.images, images)
    assert found.words == [[Letters().id_to_token(int(i)) for i in ids[0]]]
    assert found.main_experts.shape == (1, 2, 2)
    decision = backbone.route(images, ids)[1]
    dropped = to_numpy(decision.summary["dropped"])[0]
    experts = [*found.main_experts.ravel(), *found.word_experts[0]]
    np.testing.assert_array_equal(np.array(experts) < 0, dropped)
    assert 0 < dropped.sum() < 7
    probabilities = to_numpy(decision.summary["probabilities"])[0]
    token, filled = (to_numpy(x)[0] for x in decision.routing[:2])
    for place, expert in enumerate(experts):
        takers = [e for e in range(4) if place in token[e][filled[e]]]
        best = max(takers, key=lambda e: probabilities[place, e], default=-1)
        assert expert == best


def test_one_pair_competes_with_no_other():
    # In a group of two there is room for one pair.
    backbone = pairs.limoe()
    images, ids = pairs.images()[:1], np.array([[3, 1, 5]])
    found = routing_maps(backbone, images, captions=ids)
    decision = backbone.route(images, pairs.token_ids()[:1])[0]
    first = to_numpy(decision.summary["selection"])[0].argmax(-1)
    np.testing.assert_array_equal(found.main_experts.ravel(), first[:4])
    np.testing.assert_array_equal(found.word_experts[0], first[4:7])
    assert found.words == [["3", "1", "5"]]


def test_text_alone_has_no_pictures():
    ids = pairs.token_ids()
    found = analyze(pairs.limoe(), captions=ids, num_pictures=2, verbose=0).maps[0]
    assert found.images is found.dispatch is found.main_experts is None
    assert found.word_experts.shape == (2, 3) and len(found.words) == 2


@pytest.fixture(scope="module")
def backbone():
    return pairs.limoe()


@pytest.fixture(scope="module")
def tokens(backbone):
    return pairs.routed_tokens(backbone, pairs.images(), pairs.token_ids())[1]


def examples_of(backbone, images, token_ids, preprocessor=None, **kwargs):
    """Examples of the second block."""
    given = Pairs(backbone, images, token_ids, preprocessor)
    (found,) = given.observe([ExampleReducer(given, **kwargs)], 64, verbose=0)
    assert list(found) == [0, 1]
    return found[1]


def patch_of(token):
    image = pairs.images()[token.pair]
    row, column = divmod(token.index, 2)
    return image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]


@pytest.mark.parametrize("num_patches", [2, 12])
def test_patches_of_experts(backbone, tokens, num_patches):
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
def test_words_of_experts(backbone, tokens, num_words):
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


CHOOSING = {
    "token choice": SoftmaxTokenChoiceRouter(
        3, num_selected_experts=2, capacity_factor=0.5
    ),
    "expert choice": SoftmaxExpertChoiceRouter(3),
    "no capacity": SoftmaxTokenChoiceRouter(3, eval_capacity_factor="dropless"),
}


@pytest.mark.parametrize("pooling", ["gap", "token"])
@pytest.mark.parametrize("name", CHOOSING)
def test_patches_against_maps(name, pooling):
    # Groups of two, of which the last one is partly empty.
    backbone = ViTMoEBackbone(
        *((8, 16, 3), 4, 1, 2, 8, 16),
        moe_layers=(0,),
        router=CHOOSING[name],
        pooling=pooling,
        group_images=2,
    )
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (13, 8, 16, 3)).astype("float32")

    def analyzed(images):
        return analyze(backbone, images, num_pictures=4, batch_size=4, verbose=0).maps[
            0
        ]

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
        for picture, image in zip(found.images[expert], order, strict=True):
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
