"""Figures of what a Soft MoE mixes show the numbers that they are given."""

import numpy as np
import pytest

from keras_softmoe.analysis.soft import TOKEN_WEIGHT_EDGES
from tests.support.close import assert_near
from tests.support.made_up import plot
from tests.support.reading import legend_names, png, tick_names
from tests.support.soft_blocks import NUM_TOKENS, make_directions, statistics


def test_token_weights():
    given = statistics()
    (ax,) = plot("token_weights", given).axes
    for line, block in zip(ax.lines, given.values(), strict=False):
        weights, shares = line.get_data()
        np.testing.assert_array_equal(weights, TOKEN_WEIGHT_EDGES[1:-1])
        found = [block.tokens_above(weight) for weight in weights]
        assert_near(shares, found, atol=1e-12)
        # All that changes is in sight.
        left, right = ax.get_xlim()
        moving = (shares > 0) & (shares < 1)
        assert left <= weights[moving].min() and weights[moving].max() <= right
    # One mean for both blocks.
    (mean,) = ax.lines[2:]
    np.testing.assert_allclose(mean.get_xdata(), 6 / NUM_TOKENS)


@pytest.mark.parametrize("weights", ["dispatch", "combine"])
def test_concentration(weights):
    given = statistics()
    levels = (0.9, 0.5)
    figure = plot("concentration", given, weights=weights, levels=levels)
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
        plot("concentration", statistics(), weights="both")


def test_slot_correlation():
    given = statistics()
    one_slot = {"slot_contribution": np.ones((4, 1))}
    directions = make_directions(4)
    given["one"] = given[1]._replace(slot_directions=directions, **one_slot)
    figure = plot("slot_correlation", given)
    for ax, block in zip(figure.axes, given.values(), strict=False):
        experts, slots = block.slot_contribution.shape
        (image,) = ax.get_images()
        np.testing.assert_array_equal(image.get_array(), block.slot_cosines)
        assert (image.norm.vmin, image.norm.vmax) == (-1, 1)
        assert tick_names(ax.xaxis) == [str(e) for e in range(experts)]
        names = ax.get_title().split("\n")[1]
        between = f"between {block.cosine_between_experts:.2f}"
        if slots == 1:
            assert names == between.replace("-0.00", "0.00")
            assert len(ax.collections) == 0
        else:
            assert (
                names == f"within experts {block.cosine_within_experts:.2f}, {between}"
            )
            # Lines between the experts.
            edges = [s[0][1] for s in ax.collections[0].get_segments()]
            np.testing.assert_allclose(edges, [1.5, 3.5])
            # Ticks in the middle of the expert's slots.
            np.testing.assert_allclose(ax.get_xticks(), [0.5, 2.5, 4.5])
    assert png(figure).startswith(b"\x89PNG")
    large = plot(
        "slot_correlation",
        {
            1: given[1]._replace(
                slot_directions=make_directions(100), slot_contribution=np.ones((50, 2))
            )
        },
    )
    assert len(large.axes[0].collections) == 0
    assert len(large.axes[0].get_xticks()) <= 8
