"""Statistics of blocks against sums over the decisions themselves."""

import keras
import numpy as np
import pytest
from sklearn.metrics import mutual_info_score

from keras_softmoe import analysis, layers, ops, routers
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.gradients import recorded
from tests.support.references import to_numpy

LOADED = {
    "token choice": routers.SoftmaxTokenChoiceRouter(3, 1, 0.5),
    "expert choice": routers.SoftmaxExpertChoiceRouter(3, 0.5),
    "identity": routers.IdentityRouter(4),
    "soft": routers.SoftRouter(3, slots_per_expert=2),
}
NUM_TOKENS = 4


@pytest.mark.parametrize(
    ("cls", "load", "dropped"),
    [
        (routers.SoftmaxTokenChoiceRouter, [2, 1, 1], 4 / 8),
        # The expert that no token of the first image wants takes one all the same.
        (routers.SoftmaxExpertChoiceRouter, [2, 2, 2], None),
    ],
)
def test_demand(cls, load, dropped):
    x = 3.0 * np.eye(3, dtype="float32")[np.array([[0, 0, 0, 1], [0, 0, 2, 2]])]
    inputs = keras.Input((NUM_TOKENS, 3))
    # One slot for each of three experts in an image
    layer = layers.MoE(cls(3, capacity_factor=0.75), 8, group_images=1, name="moe")
    model = keras.Model(inputs, layer(inputs))
    layer.router.set_directions(np.eye(3))
    routing = analysis.analyze(model, x, verbose=0)
    found = routing.blocks["moe"]
    np.testing.assert_array_equal(found.demand, [5, 1, 2])
    np.testing.assert_array_equal(found.load, load)
    assert found.demand_imbalance == pytest.approx(5 / (8 / 3))
    assert found.imbalance == pytest.approx(max(load) / np.mean(load))
    assert found.experts_used == 3
    if dropped is not None:
        assert found.dropped == dropped
        line = next(x for x in str(routing).splitlines() if x.split()[:1] == ["moe"])
        assert line.split() == "moe 8 50% 1.50× 1.88× 3 of 3".split()


@pytest.mark.parametrize("name", LOADED)
def test_load(name):
    # Three inputs in groups of two, in batches of two.
    x = np.random.default_rng(0).normal(size=(3, NUM_TOKENS, 6)).astype("float32")
    inputs = keras.Input((NUM_TOKENS, 6))
    layer = layers.MoE(LOADED[name], 8, group_images=2, name="moe")
    model = keras.Model(inputs, layer(inputs))
    found = analysis.analyze(model, x, batch_size=2, verbose=0).blocks
    assert list(found) == ["moe"]
    _, (routing, _) = recorded(layer, x)
    num_experts = layer.router.num_experts
    dispatch, combine = map(to_numpy, ops.to_dense(routing, 2 * NUM_TOKENS))
    load, dropped = np.zeros(num_experts), 0
    for token in range(3 * NUM_TOKENS):
        group, place = divmod(token, 2 * NUM_TOKENS)
        taken = combine if name == "soft" else dispatch
        load += taken[group, place].sum(-1)
        dropped += not dispatch[group, place].any()
    np.testing.assert_allclose(found["moe"].load, load, rtol=1e-5)
    np.testing.assert_allclose(found["moe"].dropped, dropped / (3 * NUM_TOKENS))
    assert found["moe"].num_groups == 2
    assert found["moe"].num_tokens == 3 * NUM_TOKENS
    assert found["moe"].imbalance == pytest.approx(load.max() / load.mean(), 1e-5)
    assert (dropped > 0) == name.endswith("choice")


def test_names_that_are_there_twice():
    class Block(keras.layers.Layer):
        """Its layers build without a scope of its own."""

        def __init__(self):
            super().__init__()
            self.moe = layers.SoftMoE(2, 4, name="mixed")

        def build(self, shape):
            self.moe.build(shape)

        def call(self, x):
            return self.moe(x)

    inputs = keras.Input((NUM_TOKENS, 6))
    model = keras.Model(inputs, Block()(Block()(inputs)))
    x = np.ones((1, NUM_TOKENS, 6), "float32")
    found = analysis.analyze(model, x, verbose=0).blocks
    assert len(found) == 2
    for load in found.values():
        np.testing.assert_allclose(load.load.sum(), NUM_TOKENS, rtol=1e-5)


def test_images_must_be_finite():
    """NaN has no best expert."""
    images = tiny.pixels(4)
    images[2, 1, 1, 0] = np.inf
    with pytest.raises(ValueError, match="Images must be finite.*image 2 of 4"):
        analysis.analyze(tiny.classifier(), images, verbose=0)


TOKEN_CHOICE = routers.SoftmaxTokenChoiceRouter(
    4, num_selected_experts=2, capacity_factor=0.5
)
ROUTERS = {
    "token_choice": TOKEN_CHOICE,
    "expert_choice": routers.SoftmaxExpertChoiceRouter(4, 0.5),
    "identity": routers.IdentityRouter(4),
    "soft": routers.SoftRouter(4, slots_per_expert=2),
}
# Five images in batches of four, groups of two: padding in the last group.
NUM_IMAGES, BATCH_SIZE = 5, 4


def statistics_of(router, labels=None, group_images=2):
    backbone = tiny.backbone(router=router, pooling="gap", group_images=group_images)
    images, settings = tiny.images(NUM_IMAGES), {"batch_size": BATCH_SIZE, "verbose": 0}
    routing = analysis.analyze(backbone, images, labels, **settings)
    assert list(routing.blocks) == [1]
    return backbone, images, routing.blocks[1]


def decisions(backbone, images):
    """Dispatch, combine (images, tokens, E, C) and probabilities, batch by batch."""
    parts = []
    for batch in (images[:4], images[4:]):
        routing, summary = backbone.route(batch)[1]
        arrays = [*ops.to_dense(routing, 2 * NUM_TOKENS)]
        arrays.append(summary.get("probabilities", keras.ops.sum(arrays[1], -1)))
        tokens = (to_numpy(x).reshape(-1, NUM_TOKENS, *x.shape[2:]) for x in arrays)
        parts.append([x[: len(batch)] for x in tokens])
    return [np.concatenate(x) for x in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", ROUTERS)
def test_counts(name):
    labels = np.array([0, 2, 2, 0, 0])
    backbone, images, statistics = statistics_of(ROUTERS[name], labels)
    dispatch, combine, given = decisions(backbone, images)
    weights = combine.sum(-1)

    expected = np.mean(dispatch.sum((2, 3)) == 0)
    np.testing.assert_allclose(statistics.dropped, expected, rtol=1e-6)
    load = (weights if name == "soft" else dispatch.sum(-1)).sum((0, 1)) / NUM_IMAGES
    np.testing.assert_allclose(statistics.load / NUM_IMAGES, load, rtol=1e-5)
    used = (dispatch.sum((1, 3)) > 0).sum(1)
    np.testing.assert_array_equal(statistics.experts_per_image, used)
    assert_near(statistics.weight_by_position, weights.mean(0), rtol=1e-5, atol=1e-7)
    first, last = weights[[0, 3, 4]].mean((0, 1)), weights[[1, 2]].mean((0, 1))
    by_class = np.stack([first, np.full(4, np.nan), last])
    assert_near(statistics.weight_by_class, by_class, rtol=1e-5, atol=1e-7)
    assert (statistics.dropped > 0) == (name in ("token_choice", "expert_choice"))
    assert statistics.choice_histogram.shape == (2, 50)
    assert set(statistics.choice_histogram.sum(1)) == {NUM_IMAGES * NUM_TOKENS}
    largest = -np.sort(-given, axis=-1)
    for k in range(2):
        expected, _ = np.histogram(largest[..., k], 50, (0, 1))
        # A number beside the edge of a bin may fall on either side.
        assert np.abs(statistics.choice_histogram[k] - expected).sum() <= 2


@pytest.mark.parametrize(
    "overrides, labels, received",
    [
        (tiny.DENSE, None, "ViTMoEBackbone without any"),
        ({}, np.zeros(3, int), "5 images, 3 labels"),
        ({}, np.zeros(6, int), "5 images, 6 labels"),
    ],
)
def test_bad_arguments_are_named(overrides, labels, received):
    backbone = tiny.backbone(**overrides)
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        analysis.analyze(backbone, tiny.images(5), labels, verbose=0)


@pytest.mark.parametrize("count", [4, 6])
def test_labels_of_other_images(count):
    """In batches, whose number of images is known at the end only."""
    model = tiny.backbone(router=tiny.SPARSE)
    with pytest.raises(ValueError, match=f"Received: 5 images, {count} labels"):
        analysis.analyze(model, [tiny.images(5)], np.zeros(count, int), verbose=0)


def test_labels_of_unknown_tokens():
    inputs = keras.Input((NUM_TOKENS, 6))
    model = keras.Model(inputs, layers.SoftMoE(2, 8)(inputs))
    with pytest.raises(ValueError, match="Received: labels with Functional"):
        analysis.analyze(model, np.ones((2, NUM_TOKENS, 6)), [0, 1], verbose=0)


def information(router, labels=None, group_images=1):
    backbone, images, found = statistics_of(router, labels, group_images)
    return backbone, images, found.information


def test_position_is_all_that_identity_knows():
    labels = np.array([0, 1, 1, 0, 1])
    _, _, found = information(routers.IdentityRouter(4), labels=labels)
    assert found.entropy == pytest.approx(2.0) == found.position
    assert found.position_share == pytest.approx(1.0)
    assert found.label == pytest.approx(0.0, abs=1e-9)
    assert found.label_share == pytest.approx(0.0, abs=1e-9)


def test_sparse_routers_against_scikit_learn():
    router = routers.SoftmaxTokenChoiceRouter(4, capacity_factor=0.5)
    labels = np.array([0, 2, 2, 0, 2])
    # Five images in groups of two: padding in the last one.
    backbone, images, found = information(router, labels=labels, group_images=2)
    dispatch, _, _ = decisions(backbone, images)
    image, place, expert = np.nonzero(dispatch.sum(-1))
    assert len(expert) < NUM_TOKENS * len(images)

    def bits(other):
        return mutual_info_score(other, expert) / np.log(2)

    assert found.position == pytest.approx(bits(place), abs=1e-6)
    assert found.label == pytest.approx(bits(labels[image]), abs=1e-6)
    assert found.entropy == pytest.approx(bits(expert), abs=1e-6)
    shuffled = np.random.default_rng(0).permutation(labels)
    assert found.label_chance == pytest.approx(bits(shuffled[image]), abs=1e-6)
    share = (found.label - found.label_chance) / found.entropy
    assert found.label_share == pytest.approx(share)


def test_soft_routers_count_combine_weights():
    backbone, images, found = information(routers.SoftRouter(4, slots_per_expert=2))
    _, combine, _ = decisions(backbone, images)
    joint = combine.sum(-1).sum(0)
    joint /= joint.sum()
    expert, place = joint.sum(0), joint.sum(1)
    expected = np.sum(joint * np.log2(joint / np.outer(place, expert)))
    assert found.position == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert found.entropy == pytest.approx(-np.sum(expert * np.log2(expert)), rel=1e-5)
    assert found.label is None and found.label_share is None


def test_one_expert_has_no_entropy():
    _, _, found = information(routers.IdentityRouter(1), labels=np.arange(5))
    assert found.entropy == 0.0
    assert found.position_share == found.label_share == 0.0
