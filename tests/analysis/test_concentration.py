"""Cumulative weights, against sorted sums of each average; no backend is needed."""

import numpy as np
import pytest

from keras_softmoe.analysis.concentration import (
    BANDS,
    NUM_BINS,
    Concentration,
    ConcentrationTotal,
)
from tests.support.close import assert_near


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
        reached = (curves >= share).mean(axis=0)
        assert_near(found.reached(share), reached, atol=1 / 150)
        needed = np.sort((curves < share).sum(axis=1) + 1)
        assert found.needed(share) == needed[149]
        assert found.needed(share, part=1) == needed[-1]


def test_a_uniform_average_is_a_straight_line():
    total = ConcentrationTotal()
    # Rounded like a softmax: no sum of fifths is exact.
    total.add(np.full((4, 2, 5), 0.2, "float32"))
    found = total.concentration()
    assert_near(found.mean, [0.2, 0.4, 0.6, 0.8, 1.0], atol=1e-6)
    np.testing.assert_array_equal(found.reached(0.6), [0, 0, 1, 1, 1])
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
        (lambda c: c.reached(1), "share=1"),
        (lambda c: c.needed(0), "share=0"),
        (lambda c: c.needed(0.5, part=1.5), "part=1.5"),
        (lambda c: c.bands([0.5, 1.2]), r"levels=\[0.5, 1.2\]"),
    ],
)
def test_shares_that_are_none(call, received):
    counts = np.ones((2, NUM_BINS), "int64")
    with pytest.raises(ValueError, match=f"Received: {received}"):
        call(Concentration(np.array([0.5, 1.0]), counts))
