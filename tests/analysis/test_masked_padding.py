"""Where a model masks the padding of text, no statistic counts it."""

import keras
import numpy as np
import pytest

from keras_softmoe import analysis, models, routers
from tests.analysis.test_modalities import TOKEN_IDS, Preprocessor, tagger, words_of
from tests.support import pairs
from tests.support.layer_checks import randomize
from tests.support.references import to_numpy


@pytest.fixture(scope="module")
def limoe():
    return pairs.limoe(mask_padding=True, vocabulary_size=8)


@pytest.mark.parametrize("with_images", [True, False])
def test_modalities(limoe, with_images):
    ids = pairs.token_ids()
    images = pairs.images() if with_images else None
    routing = analysis.analyze(limoe, images, captions=ids, verbose=0)
    for s in routing.modalities.values():
        assert s.num_tokens["text"] == np.count_nonzero(ids) == 6
        assert s.routed["text"].sum() == s.confidence_histogram["text"].sum() == 6
        assert not s.padding.any()
        if with_images:
            assert s.num_tokens["image"] == 3 * pairs.NUM_PATCHES


def test_tags(limoe):
    statistics = words_of(
        *(limoe, pairs.images(), TOKEN_IDS, tagger),
        batch_size=2,
        preprocessor=Preprocessor(),
    )
    for s in statistics.values():
        counts = dict(zip(s.tags, s.num_tokens, strict=True))
        assert counts == {"c": 2, "a": 2, "r": 2, "sign": 1, "padding": 0}


def test_examples(limoe):
    """As in a model that sees no padding: of captions without any."""
    ids = pairs.token_ids()
    routing = analysis.analyze(limoe, captions=ids, num_pictures=1, verbose=0)
    found = routing.maps[1].examples
    with routers.record() as decisions:
        limoe.text_encoder(keras.ops.convert_to_tensor(ids), training=False)
    decision = list(decisions.values())[1]
    first = to_numpy(decision.summary["selection"]).argmax(-1).ravel()[: ids.size]
    count = np.bincount(first[ids.ravel() != 0], minlength=4)
    np.testing.assert_allclose(found.share["text"], count / count.sum())
    assert all("0" not in words for words in found.words)


TEXTS = np.array([[1, 2, 3, 4], [5, 6, 0, 0], [0, 0, 0, 0], [7, 0, 0, 0]], "int32")


def text_tower(router):
    experts = {"moe_layers": (0,), "router": router}
    backbone = models.TextMoEBackbone(8, 4, 1, 2, 8, 8, **experts, mask_padding=True)
    randomize(backbone, seed=1)
    return backbone


def decision_of(backbone):
    with routers.record() as decisions:
        backbone(keras.ops.convert_to_tensor(TEXTS), training=False)
    (decision,) = decisions.values()
    return keras.tree.map_structure(to_numpy, decision)


def test_routing():
    backbone = text_tower(routers.SoftmaxTokenChoiceRouter(2, capacity_factor=0.75))
    labels = np.array([0, 1, 1, 0])
    found = analysis.analyze(backbone, TEXTS, labels, batch_size=3, verbose=0)
    statistics = found.blocks[0]
    routing, summary = decision_of(backbone)
    valid = TEXTS != 0
    assert summary["dropped"].any()
    share = summary["dropped"].sum() / valid.sum()
    np.testing.assert_allclose(statistics.dropped, share)
    # (N, T, E)
    weights = np.zeros((4, 4, 2))
    for group, expert, slot in zip(*np.nonzero(routing.filled), strict=True):
        token = routing.token[group, expert, slot]
        weights[group, token, expert] = routing.gate[group, expert, slot]
    np.testing.assert_allclose(
        statistics.weight_by_position, weights.sum(0) / valid.sum(0)[:, None], rtol=1e-5
    )
    mean = weights.sum(1) / np.maximum(valid.sum(1), 1)[:, None]
    np.testing.assert_allclose(
        statistics.weight_by_class,
        [mean[[0, 3]].mean(0), mean[[1, 2]].mean(0)],
        rtol=1e-5,
    )
    assert list(statistics.experts_per_image) == list((weights > 0).any(1).sum(-1))
    np.testing.assert_array_equal(statistics.choice_histogram.sum(-1), valid.sum())
    share = (weights > 0).sum((0, 1)) / (weights > 0).sum()
    assert 0 < share.min()
    entropy = -np.sum(share * np.log2(share))
    np.testing.assert_allclose(statistics.information.entropy, entropy, rtol=1e-6)


def test_soft():
    """A text without any token has slots that take nothing, and is left out."""
    backbone = text_tower(routers.SoftRouter(2))
    statistics = analysis.analyze(backbone, TEXTS, verbose=0).soft[0]
    rest = analysis.analyze(backbone, TEXTS[[0, 1, 3]], verbose=0).soft[0]
    assert statistics.num_groups == 3
    for name, value in statistics._asdict().items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(value, getattr(rest, name), rtol=1e-5)
    dispatch = decision_of(backbone).routing.dispatch
    assert not dispatch[TEXTS == 0].any()
    np.testing.assert_allclose(dispatch.sum(1)[[0, 1, 3]], 1.0, rtol=1e-6)
