"""Figures of routing statistics show the numbers that they are given."""

import numpy as np
import pytest

from keras_softmoe.analysis.soft import TOKEN_WEIGHT_EDGES
from tests.support import soft_blocks
from tests.support.close import assert_near
from tests.support.made_up import plot
from tests.support.reading import legend_names, png, tick_names
from tests.support.routing_blocks import make_block, statistics


def panels(figure):
    """Dict from the block to its axes, without those of colour bars."""
    titled = [ax for ax in figure.axes if ax.get_title().startswith("block")]
    return {int(ax.get_title().removeprefix("block ")): ax for ax in titled}


def even_line(image):
    """Where the white line on the scale of an image is."""
    lines = [line for line in image.colorbar.ax.lines if line.get_color() == "white"]
    ((low, high),) = (line.get_ydata() for line in lines)
    assert low == high
    return low


def picture(ax):
    (image,) = ax.get_images()
    return image


def test_expert_load():
    given = statistics()
    given[5] = make_block(5)._replace(load=np.zeros(3), dropped=1.0)
    figure = plot("load", given)
    for ax, block in zip(figure.axes, given.values(), strict=True):
        heights = [bar.get_height() for bar in ax.patches]
        expected = block.load / (block.load.mean() or 1)
        np.testing.assert_allclose(heights, expected)
        assert f"dropped {100 * block.dropped:.3g}% of tokens" in ax.get_title()


def test_experts_by_class_in_the_order_of_the_numbers():
    given = statistics()
    # A class without images.
    given[3].weight_by_class[1] = np.nan
    shown = panels(plot("by_class", given, class_names="abcd", sort=False))
    kept = {1: [0, 1, 2, 3], 3: [0, 2, 3]}
    for layer, ax in shown.items():
        image, weights = picture(ax), given[layer].weight_by_class[kept[layer]]
        np.testing.assert_array_equal(image.get_array(), weights)
        assert image.norm.vmin == 0
        np.testing.assert_allclose(image.norm.vmax, np.quantile(weights, 0.995))
        np.testing.assert_allclose(even_line(image), weights.mean())
        assert tick_names(ax.xaxis) == ["0", "1", "2"]
        assert tick_names(ax.yaxis) == [*np.array(list("abcd"))[kept[layer]]]


def mosaic_tiles(ax, shape):
    """Dict from the expert to the map beneath its number."""
    mosaic = picture(ax).get_array().filled(np.nan)
    tiles = {}
    for text in ax.texts:
        column, row = (int(np.floor(x + 1)) for x in text.get_position())
        tiles[int(text.get_text())] = mosaic[
            row : row + shape[0], column : column + shape[1]
        ]
    assert np.isfinite(mosaic).sum() == len(tiles) * np.prod(shape)
    return tiles


@pytest.mark.parametrize(
    "num_tokens, shape",
    [
        (9, (2, 4)),
        # With registers
        (11, (2, 4)),
        (1, (1, 1)),
    ],
)
def test_experts_by_position(num_tokens, shape):
    given = statistics(num_tokens=num_tokens, num_experts=7, patch_grid=shape)
    figure = plot("by_position", given)
    for layer, ax in panels(figure).items():
        tiles = mosaic_tiles(ax, shape)
        # Without the class token.
        patches = given[layer].weight_by_position[-np.prod(shape) :]
        for expert, tile in tiles.items():
            np.testing.assert_array_equal(tile, patches[:, expert].reshape(shape))
        assert list(tiles) == np.argsort(-patches.std(0), kind="stable").tolist()
        assert picture(ax).norm.vmin == 0
        np.testing.assert_allclose(even_line(picture(ax)), patches.mean())
    unsorted = panels(plot("by_position", given, sort=False))
    assert list(mosaic_tiles(unsorted[1], shape)) == list(range(7))


def test_an_expert_without_work_is_drawn():
    weights = np.zeros((4, 3))
    block = make_block()._replace(weight_by_position=weights, weight_by_class=weights)
    for name in ("by_class", "by_position"):
        image = picture(panels(plot(name, {1: block}))[1])
        assert image.get_array().max() == 0
        assert image.norm.vmax > 0


@pytest.mark.parametrize("num_choices", [1, 2, 5])
def test_choice_weights(num_choices):
    given = statistics(num_choices=num_choices)
    names = ["largest", "2nd largest", "3rd largest", "4th largest", "5th largest"]
    figure = plot("choice_weights", given)
    for layer, ax in panels(figure).items():
        steps = [patch for patch in ax.patches if not patch.get_fill()]
        assert [patch.get_label() for patch in steps] == names[:num_choices]
        for counts, patch in zip(given[layer].choice_histogram, steps, strict=True):
            shares, edges, _ = patch.get_data()
            np.testing.assert_allclose(shares, counts / counts.sum())
            np.testing.assert_allclose(edges, np.arange(51) / 50)
            assert ax.get_ylim()[0] == 0
            assert ax.get_ylim()[1] > shares.max()
        (least,) = ax.lines
        np.testing.assert_allclose(least.get_xdata(), 1 / 3)
    legend = legend_names(panels(figure)[1].get_legend())
    assert legend == [*names[:num_choices], "1/E"]


def test_experts_per_image():
    given = statistics()
    for layer, ax in panels(plot("experts_per_image", given)).items():
        used = given[layer].experts_per_image
        (bars,) = ax.containers
        np.testing.assert_allclose(
            [bar.get_height() for bar in bars],
            [np.mean(used == count) for count in range(4)],
        )
        (mean,) = ax.lines
        np.testing.assert_allclose(mean.get_xdata(), used.mean())
        (name,) = legend_names(ax.get_legend())
        assert name == f"mean {used.mean():.1f} of 3"


# === What a Soft MoE mixes ===


def test_token_weights():
    given = soft_blocks.statistics()
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
    np.testing.assert_allclose(mean.get_xdata(), 6 / soft_blocks.NUM_TOKENS)


@pytest.mark.parametrize("weights", ["dispatch", "combine"])
def test_concentration(weights):
    given = soft_blocks.statistics()
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
        plot("concentration", soft_blocks.statistics(), weights="both")


def test_slot_correlation():
    given = soft_blocks.statistics()
    one_slot = {"slot_contribution": np.ones((4, 1))}
    given["one"] = given[1]._replace(
        slot_directions=soft_blocks.make_directions(4), **one_slot
    )
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
                slot_directions=soft_blocks.make_directions(100),
                slot_contribution=np.ones((50, 2)),
            )
        },
    )
    assert len(large.axes[0].collections) == 0
    assert len(large.axes[0].get_xticks()) <= 8
