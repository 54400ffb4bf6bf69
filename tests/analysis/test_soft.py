"""Statistics of soft routing, against sums over tokens and slots one by one."""

import keras
import numpy as np
import pytest

from keras_softmoe import analysis, layers, routers
from keras_softmoe.analysis.panels_blocks import BANDS
from keras_softmoe.analysis.soft import (
    NUM_BINS,
    TOKEN_WEIGHT_EDGES,
    Concentration,
    ConcentrationTotal,
)
from keras_softmoe.routers.recording import is_recording
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.references import to_numpy

ROUTER = routers.SoftRouter(3, slots_per_expert=2)
NUM_TOKENS = 4
# Five images in groups of two: the last group is half padding.
NUM_IMAGES, GROUP_IMAGES = 5, 2
NUM_GROUPS = 3


def soft_backbone(router=ROUTER, **overrides):
    """Two blocks of experts whose weights are far from uniform."""
    arguments = {
        "moe_layers": (0, 1),
        "pooling": "gap",
        "group_images": GROUP_IMAGES,
        **overrides,
    }
    backbone = tiny.backbone(router=router, **arguments)
    for router in backbone.routers.values():
        if hasattr(router, "scale"):
            router.scale.assign(6.0)
    return backbone


@pytest.fixture(scope="module")
def backbone():
    return soft_backbone()


@pytest.fixture(scope="module")
def found(backbone):
    return analysis.analyze(backbone, tiny.images(NUM_IMAGES), verbose=0).soft


def groups_of(backbone):
    """Dict from the block to dispatch and combine weights of each group, `(S, E, C)`.

    Without padding.
    """
    decisions = backbone.route(tiny.images(NUM_IMAGES))
    return {
        block: [
            [
                weights[group][: NUM_TOKENS * min(2, NUM_IMAGES - 2 * group)]
                for weights in map(to_numpy, routing)
            ]
            for group in range(NUM_GROUPS)
        ]
        for block, (routing, _) in decisions.items()
    }


def cumulative(weights, length):
    """Cumulative weights from the largest on; after the last of them one."""
    largest = np.sort(np.asarray(weights, "float64"))[::-1]
    sums = [largest[: n + 1].sum() for n in range(len(largest))]
    return np.array(sums + [1.0] * (length - len(sums)))


def check_concentration(found, curves):
    np.testing.assert_allclose(found.mean, np.mean(curves, axis=0), rtol=1e-5)
    bins = np.minimum((np.array(curves) + 1e-6) * NUM_BINS, NUM_BINS - 1).astype(int)
    for counts, column in zip(found.counts, bins.T, strict=True):
        expected = np.bincount(column, minlength=NUM_BINS)
        # A number beside the edge of a bin may fall on either side.
        assert np.abs(counts - expected).sum() <= 2


@pytest.mark.parametrize("block", [0, 1])
def test_every_number_of_a_block(backbone, found, block):
    groups = groups_of(backbone)[block]
    statistics = found[block]
    assert statistics.num_groups == NUM_GROUPS
    assert statistics.num_tokens == NUM_IMAGES * NUM_TOKENS

    # Of tokens.
    totals = [
        sum(dispatch[token, e, c] for e, c in np.ndindex(3, 2))
        for dispatch, _ in groups
        for token in range(len(dispatch))
    ]
    assert np.std(totals) > 0.05
    expected, _ = np.histogram(np.multiply(totals, 1 + 1e-6), TOKEN_WEIGHT_EDGES)
    assert np.abs(statistics.token_weight_counts - expected).sum() <= 2
    np.testing.assert_allclose(statistics.mean_token_weight, np.mean(totals), rtol=1e-5)
    for weight in (0.25, 1.0, 2.0):
        above = np.mean(np.array(totals) >= weight)
        np.testing.assert_allclose(statistics.tokens_above(weight), above)

    # Of slots.
    combine = np.concatenate([weights for _, weights in groups])
    contribution = sum(combine[token] for token in range(len(combine))) / len(combine)
    np.testing.assert_allclose(statistics.slot_contribution, contribution, rtol=1e-5)
    by_expert = [sum(contribution[e]) for e in range(3)]
    np.testing.assert_allclose(statistics.expert_contribution, by_expert, rtol=1e-5)

    # Of averages.
    length = GROUP_IMAGES * NUM_TOKENS
    curves = np.array(
        [
            [
                [cumulative(dispatch[:, e, c], length) for c in range(2)]
                for e in range(3)
            ]
            for dispatch, _ in groups
        ]
    )
    np.testing.assert_allclose(statistics.slot_curves, curves.mean(axis=0), rtol=1e-5)
    check_concentration(statistics.dispatch, curves.reshape(-1, length))
    check_concentration(
        statistics.combine, [cumulative(token.ravel(), 6) for token in combine]
    )
    needed = (curves.mean(axis=0) < 0.9).sum(axis=-1) + 1
    np.testing.assert_array_equal(statistics.tokens_needed(0.9), needed)
    peaks = [dispatch[:, e, c].max() for dispatch, _ in groups for e, c in SLOTS]
    np.testing.assert_allclose(statistics.dispatch_peak, np.mean(peaks), rtol=1e-5)
    peaks = combine.reshape(len(combine), -1).max(axis=1)
    np.testing.assert_allclose(statistics.combine_peak, np.mean(peaks), rtol=1e-5)


SLOTS = list(np.ndindex(3, 2))


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, block in expected.items():
        for field in ("num_groups", "num_tokens"):
            assert getattr(found[name], field) == getattr(block, field)
        for field in ("slot_contribution", "slot_curves"):
            values = getattr(found[name], field), getattr(block, field)
            np.testing.assert_allclose(*values, rtol=1e-5)
        for field in ("dispatch", "combine"):
            values = getattr(found[name], field), getattr(block, field)
            np.testing.assert_allclose(values[0].mean, values[1].mean, rtol=1e-5)
            difference = values[0].counts - values[1].counts
            assert np.abs(difference).sum() <= 4
        difference = found[name].token_weight_counts - block.token_weight_counts
        assert np.abs(difference).sum() <= 4


def test_batches_add_up(backbone, found):
    images = tiny.images(NUM_IMAGES)
    for batch_size in (2, 4):
        parts = analysis.analyze(
            backbone, images, batch_size=batch_size, verbose=0
        ).soft
        assert_equal(parts, found)


def test_uniform_mixing():
    router = routers.SoftRouter(2, dispatch="uniform", combine="uniform")
    backbone = soft_backbone(router, moe_layers=(1,), group_images=1)
    (block,) = analysis.analyze(backbone, tiny.images(3), verbose=0).soft.values()
    np.testing.assert_allclose(block.dispatch.mean, [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    np.testing.assert_allclose(block.combine.mean, [0.5, 1.0], rtol=1e-6)
    assert block.dispatch.needed(0.5) == 2
    # All tokens give the mean.
    assert block.mean_token_weight == block.tokens_above(0.25) * 0.5 == 0.5
    assert block.tokens_above(0.51) == 0
    assert block.slot_directions is block.slot_cosines is None
    np.testing.assert_allclose(block.expert_contribution, [0.5, 0.5], rtol=1e-6)


class Rows(keras.utils.PyDataset):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.x[2 * index : 2 * index + 2], np.zeros(2)


def own_model():
    """A user's model: two soft layers, one that chooses, and a name given twice."""
    inputs = keras.Input((NUM_TOKENS, 6))
    x = inputs + layers.SoftMoE(3, 8, slots_per_expert=2, name="mixed")(inputs)
    x = x + layers.MoE(routers.SoftmaxTokenChoiceRouter(2), 8)(x)
    x = x + layers.MoE(routers.SoftRouter(2), 8, name="grouped", group_images=2)(x)
    return keras.Model(inputs, x)


def test_a_model_of_ones_own_and_every_kind_of_data():
    model = own_model()
    x = np.random.default_rng(0).normal(size=(4, NUM_TOKENS, 6)).astype("float32")
    expected = analysis.analyze(model, x, batch_size=2, verbose=0).soft
    assert list(expected) == ["mixed", "grouped"]
    assert expected["mixed"].slot_curves.shape == (3, 2, NUM_TOKENS)
    assert expected["grouped"].slot_curves.shape == (2, 1, 2 * NUM_TOKENS)
    for data in (
        [x[:2], x[2:]],
        ((part, np.zeros(2)) for part in (x[:2], x[2:])),
        Rows(x),
        [keras.ops.convert_to_tensor(part) for part in (x[:2], x[2:])],
    ):
        assert_equal(analysis.analyze(model, data, verbose=0).soft, expected)
    doubled = analysis.analyze(
        model, x / 2, batch_size=2, preprocessor=lambda batch: batch * 2, verbose=0
    ).soft
    assert_equal(doubled, expected)


def test_dict_inputs():
    one, other = keras.Input((NUM_TOKENS, 6), name="a"), keras.Input((6,), name="b")
    x = one + keras.ops.expand_dims(other, 1)
    model = keras.Model({"a": one, "b": other}, layers.SoftMoE(2, 8, name="moe")(x))
    rng = np.random.default_rng(0)
    data = {
        "a": rng.normal(size=(3, NUM_TOKENS, 6)).astype("float32"),
        "b": rng.normal(size=(3, 6)).astype("float32"),
    }
    (block,) = analysis.analyze(model, data, batch_size=2, verbose=0).soft.values()
    tokens = data["a"] + data["b"][:, None]
    combine = to_numpy(model.get_layer("moe").moe.router(tokens).routing.combine)
    np.testing.assert_allclose(
        block.slot_contribution, combine.mean(axis=(0, 1)), rtol=1e-5
    )


def test_a_task_brings_its_preprocessor(found):
    task = tiny.classifier(
        moe_layers=(0, 1), pooling="gap", group_images=GROUP_IMAGES, router=ROUTER
    )
    task.backbone.set_weights(soft_backbone().get_weights())
    of_pixels = analysis.analyze(task, tiny.pixels(NUM_IMAGES), verbose=0).soft
    assert_equal(of_pixels, found)


def test_errors_of_data_come_through(backbone):
    def broken():
        yield tiny.images(2)
        raise RuntimeError("no more data")

    with pytest.raises(RuntimeError, match="no more data"):
        analysis.analyze(backbone, broken(), verbose=0)
    assert not is_recording()


class Unbuilt(keras.Model):
    """A model that was never called."""


@pytest.mark.parametrize(
    "model, data, message",
    [
        (
            lambda: tiny.backbone(**tiny.DENSE),
            tiny.images(1),
            "MoE layers.*Received: a ViT",
        ),
        (Unbuilt, tiny.images(1), "Received: Unbuilt with built=False"),
        (soft_backbone, iter([]), "at least one batch.*Received: data="),
        (soft_backbone, None, "at least one batch.*Received: data="),
        (soft_backbone, tiny.images(1)[:, :4], "Received: images of shape="),
        (soft_backbone, tiny.images(1).astype("int32"), "need a preprocessor"),
    ],
)
def test_what_cannot_be_routed(model, data, message):
    with pytest.raises(ValueError, match=message):
        analysis.analyze(model(), data, verbose=0)


def test_weights_that_are_none(found):
    with pytest.raises(ValueError, match="Received: weight=0"):
        found[0].tokens_above(0)
    with pytest.raises(ValueError, match="Received: share=1"):
        found[0].tokens_needed(1)


def test_cosines_of_all_pairs(backbone, found):
    for block, router in backbone.routers.items():
        mu = to_numpy(router.mu)
        expected = np.empty((6, 6))
        within, between = [], []
        for e, c, f, d in np.ndindex(3, 2, 3, 2):
            one, other = mu[:, e, c], mu[:, f, d]
            cosine = one @ other / np.sqrt((one @ one) * (other @ other))
            expected[2 * e + c, 2 * f + d] = cosine
            if e != f:
                between.append(cosine)
            elif c != d:
                within.append(cosine)
        s = found[block]
        assert_near(s.slot_cosines, expected, atol=1e-5)
        assert_near(
            [s.cosine_within_experts, s.cosine_between_experts],
            [np.mean(within), np.mean(between)],
            atol=1e-5,
        )


def test_one_slot_or_one_expert(found):
    one_slot = found[0]._replace(
        slot_directions=np.eye(4, dtype="float32"), slot_contribution=np.ones((4, 1))
    )
    assert np.isnan(one_slot.cosine_within_experts)
    assert one_slot.cosine_between_experts == 0
    one_expert = one_slot._replace(slot_contribution=np.ones((1, 4)))
    assert np.isnan(one_expert.cosine_between_experts)
    assert one_expert.cosine_within_experts == 0


def averages(seed, shape):
    rng = np.random.default_rng(seed)
    weights = rng.gamma(0.3, size=shape)
    return weights / weights.sum(axis=-1, keepdims=True)


def curves_of(weights):
    """Cumulative weights, one average after the other."""
    curves = np.empty_like(weights)
    for place in np.ndindex(weights.shape[:-1]):
        largest = sorted(weights[place], reverse=True)
        for n in range(len(largest)):
            curves[place][n] = min(sum(largest[: n + 1]), 1.0)
    return curves


@pytest.fixture(scope="module")
def example():
    """Concentration of 300 averages of 7 weights, added in two parts; their curves."""
    total = ConcentrationTotal()
    weights = averages(0, (100, 3, 7))
    total.add(weights[:60])
    total.add(weights[60:])
    return total, curves_of(weights)


def test_sums(example):
    total, curves = example
    np.testing.assert_allclose(total.curves, curves.mean(axis=0), rtol=1e-9)
    found = total.concentration()
    curves = curves.reshape(-1, 7)
    np.testing.assert_allclose(found.mean, curves.mean(axis=0), rtol=1e-9)
    # What is a rounding error below an edge counts as on it.
    edges = np.linspace(0, 1, NUM_BINS + 1) - 1e-6
    edges[-1] = 1.0
    for counts, values in zip(found.counts, curves.T, strict=True):
        expected, _ = np.histogram(values, edges)
        # A number beside the edge of a bin may fall on either side.
        assert np.abs(counts - expected).sum() <= 2
        assert counts.sum() == 300


def test_bands(example):
    total, curves = example
    bands = total.concentration().bands()
    assert bands.shape == (len(BANDS), 2, 7)
    for (low, high), level in zip(bands, BANDS, strict=True):
        for ends, part in ((low, (1 - level) / 2), (high, (1 + level) / 2)):
            lower, upper = (
                np.quantile(curves.reshape(-1, 7), part, axis=0, method=method)
                for method in ("lower", "higher")
            )
            assert (ends >= lower - 1 / NUM_BINS).all()
            assert (ends <= upper + 1 / NUM_BINS).all()
    # Everything.
    ((low, high),) = total.concentration().bands([1.0])
    assert_near(low, curves.min(axis=(0, 1)), atol=1 / NUM_BINS)
    assert_near(high, curves.max(axis=(0, 1)), atol=1 / NUM_BINS)


def test_how_many_are_needed(example):
    total, curves = example
    found, curves = total.concentration(), curves.reshape(-1, 7)
    for share in (0.5, 0.9):
        needed = np.sort((curves < share).sum(axis=1) + 1)
        assert found.needed(share) == needed[149]
        assert found.needed(share, part=1) == needed[-1]


def test_a_uniform_average_is_a_straight_line():
    total = ConcentrationTotal()
    # Rounded like a softmax: no sum of fifths is exact.
    total.add(np.full((4, 2, 5), 0.2, "float32"))
    found = total.concentration()
    assert_near(found.mean, [0.2, 0.4, 0.6, 0.8, 1.0], atol=1e-6)
    assert found.needed(0.6) == 3
    # Shares closer to one than the width of a bin.
    assert found.needed(0.9996) == 5
    assert found.needed(0.601) == 4


def test_shorter_averages_go_on_at_one():
    short, long = averages(1, (3, 2, 4)), averages(2, (2, 2, 6))
    padded = np.pad(short, ((0, 0), (0, 0), (0, 2)))
    expected = ConcentrationTotal()
    expected.add(padded)
    expected.add(long)
    for parts in ((short, long), (long, short)):
        total = ConcentrationTotal()
        for part in parts:
            total.add(part)
        np.testing.assert_allclose(total.curves, expected.curves, rtol=1e-12)
        counts = total.concentration().counts
        np.testing.assert_array_equal(counts, expected.concentration().counts)


@pytest.mark.parametrize(
    "call, received",
    [
        (lambda c: c.needed(1), "share=1"),
        (lambda c: c.needed(0), "share=0"),
        (lambda c: c.needed(0.5, part=1.5), "part=1.5"),
        (lambda c: c.bands([0.5, 1.2]), r"levels=\[0.5, 1.2\]"),
    ],
)
def test_shares_that_are_none(call, received):
    counts = np.ones((2, NUM_BINS), "int64")
    with pytest.raises(ValueError, match=f"Received: {received}"):
        call(Concentration(np.array([0.5, 1.0]), counts))
