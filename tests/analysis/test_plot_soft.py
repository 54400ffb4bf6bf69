"""Figures of what a Soft MoE mixes show the numbers that they are given."""

import numpy as np
import pytest

from keras_softmoe.analysis import (
    plot_concentration,
    plot_expert_contributions,
    plot_expert_load,
    plot_slot_correlation,
    plot_token_weights,
    plot_tokens_per_slot,
)
from keras_softmoe.analysis._load import ExpertLoad
from keras_softmoe.analysis._soft_statistics import TOKEN_WEIGHT_EDGES
from tests.analysis.reading import legend_names, png, tick_names
from tests.analysis.soft_blocks import (
    NUM_EXPERTS,
    NUM_TOKENS,
    SLOTS,
    blocks,
    make_block,
    make_correlation,
)


def make_load(seed=0):
    rng = np.random.default_rng(seed)
    return ExpertLoad(2, 40, rng.uniform(1, 9, size=4), dropped=0.125)


MAKERS = {
    plot_concentration: make_block,
    plot_expert_contributions: make_block,
    plot_expert_load: make_load,
    plot_slot_correlation: make_correlation,
    plot_token_weights: make_block,
    plot_tokens_per_slot: make_block,
}


def titles(figure):
    return [ax.get_title().split("\n")[0] for ax in figure.axes if ax.get_title()]


@pytest.mark.parametrize("plot", MAKERS)
def test_blocks_are_chosen(plot):
    # More than fit side by side, by number and by name.
    given = blocks(MAKERS[plot], (0, 1, 2, 3, 4, "my_moe"))
    figure = plot(given)
    assert png(figure).startswith(b"\x89PNG")
    names = ["block 0", "block 1", "block 2", "block 3", "block 4", "my_moe"]
    if titles(figure):
        assert titles(figure) == names
        assert titles(plot(given, layers=["my_moe", 2])) == ["my_moe", "block 2"]
    else:
        found = [name.split(":")[0] for name in legend_names(figure.legends[0])]
        assert found[:6] == names
        chosen = plot(given, layers=["my_moe", 2]).legends[0]
        found = [name.split(":")[0] for name in legend_names(chosen)]
        assert found[:2] == ["my_moe", "block 2"]
    with pytest.raises(ValueError, match=r"blocks \[0, 1, .*Received: layers=\[7\]"):
        plot(given, layers=[7])


@pytest.mark.parametrize("plot", MAKERS)
def test_other_things_than_statistics(plot):
    other = make_load() if plot is not plot_expert_load else make_block()
    for given in ({}, other, {1: other}):
        with pytest.raises(ValueError, match="Received: statistics of type"):
            plot(given)


def test_token_weights():
    given = blocks()
    (ax,) = plot_token_weights(given).axes
    for line, block in zip(ax.lines, given.values(), strict=False):
        weights, shares = line.get_data()
        np.testing.assert_array_equal(weights, TOKEN_WEIGHT_EDGES[1:-1])
        found = [block.tokens_above(weight) for weight in weights]
        np.testing.assert_allclose(shares, found, atol=1e-12)
        # All that changes is in sight.
        left, right = ax.get_xlim()
        moving = (shares > 0) & (shares < 1)
        assert left <= weights[moving].min() and weights[moving].max() <= right
    # One mean for both blocks.
    (mean,) = ax.lines[2:]
    np.testing.assert_allclose(mean.get_xdata(), 6 / NUM_TOKENS)


def test_expert_contributions():
    given = blocks()
    # Far apart; one counts for nothing.
    weights = np.array([[0, 0], [0.01, 0], [0.49, 0.5]])
    given[3] = given[3]._replace(slot_contribution=weights)
    (ax,) = plot_expert_contributions({1: given[1]}).axes
    (line,) = ax.lines
    ordered = np.sort(given[1].expert_contribution)
    np.testing.assert_allclose(line.get_xdata(), [1, 2, 3])
    np.testing.assert_allclose(line.get_ydata(), ordered / ordered[0])
    assert line.get_label() == f"block 1: {ordered[-1] / ordered[0]:.3g}×"
    assert ax.get_ylim()[0] <= 1 < ordered[-1] / ordered[0] <= ax.get_ylim()[1]
    (ax,) = plot_expert_contributions(given).axes
    assert ax.get_yscale() == "log"
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [0, 1, 99])


def test_tokens_per_slot():
    given = blocks()
    figure = plot_tokens_per_slot(given, share=0.8)
    for ax, block in zip(figure.axes, given.values(), strict=True):
        curves = block.slot_curves.reshape(-1, NUM_TOKENS)
        *slots, fewest, most, uniform = ax.lines
        for line, curve in zip(slots, curves, strict=True):
            np.testing.assert_array_equal(line.get_xdata(), np.arange(NUM_TOKENS + 1))
            np.testing.assert_array_equal(line.get_ydata(), [0, *curve])
        needed = block.tokens_needed(0.8)
        found = legend_names(ax.get_legend())
        for line, name, extreme in (
            (fewest, found[0], needed.min()),
            (most, found[1], needed.max()),
        ):
            expert, slot, count = (
                int(word.strip(",:")) for word in name.split() if word[0].isdigit()
            )
            assert needed[expert, slot] == count == extreme
            np.testing.assert_array_equal(
                line.get_ydata()[1:], block.slot_curves[expert, slot]
            )
        assert ax.get_legend().get_title().get_text() == "tokens for 80%"
        np.testing.assert_array_equal(uniform.get_xydata(), [[0, 0], [NUM_TOKENS, 1]])
    with pytest.raises(ValueError, match="Received: share=1.5"):
        plot_tokens_per_slot(given, share=1.5)


@pytest.mark.parametrize("weights", ["dispatch", "combine"])
def test_concentration(weights):
    given = blocks()
    levels = (0.9, 0.5)
    figure = plot_concentration(given, weights, levels=levels)
    for ax, block in zip(figure.axes, given.values(), strict=True):
        found = getattr(block, weights)
        mean, uniform = ax.lines
        np.testing.assert_array_equal(mean.get_ydata(), [0, *found.mean])
        length = len(found.mean)
        np.testing.assert_array_equal(uniform.get_xydata(), [[0, 0], [length, 1]])
        # The wide band below the narrow one.
        bands = found.bands(levels)
        assert len(ax.collections) == 2
        for area, (low, high) in zip(ax.collections, bands, strict=True):
            (path,) = area.get_paths()
            for n in range(1, length + 1):
                at = path.vertices[path.vertices[:, 0] == n][:, 1]
                np.testing.assert_allclose(
                    [at.min(), at.max()], [low[n - 1], high[n - 1]]
                )
    names = legend_names(figure.legends[0])
    assert names == ["uniform", "mean", "central 50%", "central 90%"]
    dark, light = (handle.get_facecolor() for handle in figure.legends[0].get_patches())
    assert sum(dark[:3]) < sum(light[:3])
    assert weights in figure.get_supylabel()


def test_weights_of_no_kind():
    with pytest.raises(ValueError, match="'dispatch', 'combine'. Received: weights="):
        plot_concentration(blocks(), "both")


def test_slot_correlation():
    given = blocks(make_correlation)
    given["one"] = make_correlation(0, 4, 1)
    figure = plot_slot_correlation(given)
    for ax, block in zip(figure.axes, given.values(), strict=False):
        (image,) = ax.get_images()
        np.testing.assert_array_equal(image.get_array(), block.cosine)
        assert (image.norm.vmin, image.norm.vmax) == (-1, 1)
        assert tick_names(ax.xaxis) == [str(e) for e in range(block.num_experts)]
        names = ax.get_title().split("\n")[1]
        between = f"between {block.between:.2f}"
        if block.slots_per_expert == 1:
            assert names == between.replace("-0.00", "0.00")
            assert len(ax.collections) == 0
        else:
            assert names == f"within experts {block.within:.2f}, {between}"
            # Lines between the experts.
            edges = [s[0][1] for s in ax.collections[0].get_segments()]
            np.testing.assert_allclose(edges, [1.5, 3.5])
            # Ticks in the middle of the expert's slots.
            np.testing.assert_allclose(ax.get_xticks(), [0.5, 2.5, 4.5])
    assert png(figure).startswith(b"\x89PNG")
    large = plot_slot_correlation({1: make_correlation(0, 50, 2)})
    assert len(large.axes[0].collections) == 0
    assert len(large.axes[0].get_xticks()) <= 8


def test_expert_load():
    given = {**blocks(make_load), 5: ExpertLoad(1, 4, np.zeros(3), 1.0)}
    figure = plot_expert_load(given)
    for ax, block in zip(figure.axes, given.values(), strict=True):
        heights = [bar.get_height() for bar in ax.patches]
        expected = block.load / (block.load.mean() or 1)
        np.testing.assert_allclose(heights, expected)
        assert f"dropped {100 * block.dropped:g}% of tokens" in ax.get_title()
    assert NUM_EXPERTS * SLOTS == 6
