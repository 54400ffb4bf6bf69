"""Figures of statistics by modality show the numbers that they are given."""

import numpy as np
import pytest

from tests.support.made_up import plot
from tests.support.modality_blocks import statistics
from tests.support.reading import legend_names, lines, png, tick_names

BLUE, RED = "#0072b2", "#d55e00"


def hex_color(artist):
    from matplotlib.colors import to_hex

    return to_hex(
        artist.get_facecolor() if artist.get_fill() else artist.get_edgecolor()
    )


@pytest.mark.parametrize(
    "name", ["modality_load", "confidence", "coverage", "priorities", "trajectories"]
)
@pytest.mark.parametrize("modalities", [("image", "text"), ("image",), ("text",)])
def test_every_modality_can_be_drawn(name, modalities):
    figure = plot(name, statistics(modalities=modalities))
    if len(modalities) == 2:
        # Saving takes longest.
        assert png(figure).startswith(b"\x89PNG")
    if name != "coverage":
        (legend,) = figure.legends
        named = {x.split(",")[0].split(":")[0] for x in legend_names(legend)}
        assert named & {"image", "text"} == set(modalities)


def test_load():
    given = statistics((1, 3, 5))
    figure = plot("modality_load", given, (5, 1))
    assert [ax.get_title() for ax in figure.axes] == ["block 5", "block 1"]
    for ax, layer in zip(figure.axes, (5, 1), strict=True):
        block = given[layer]
        expected = {
            "text: words": block.assigned["text"] - block.padding,
            "text: padding": block.padding,
            "image": block.assigned["image"],
            "text, dropped": block.chosen["text"] - block.assigned["text"],
            "image, dropped": block.chosen["image"] - block.assigned["image"],
        }
        bottom = np.zeros(3)
        assert [bars.get_label() for bars in ax.containers] == list(expected)
        for bars, counts in zip(ax.containers, expected.values(), strict=True):
            np.testing.assert_allclose([bar.get_y() for bar in bars], bottom)
            np.testing.assert_allclose([bar.get_height() for bar in bars], counts)
            bottom += counts
        (capacity,) = ax.lines
        np.testing.assert_allclose(capacity.get_ydata(), 60)
        assert ax.get_ylim()[1] > max(bottom.max(), 60)
    assert legend_names(figure.legends[0]) == [*expected, "capacity"]


def test_a_capacity_far_above_is_written():
    figure = plot("modality_load", statistics(capacity=5000))
    for ax in figure.axes:
        assert not ax.lines
        assert [text.get_text() for text in ax.texts] == ["capacity 10,000 ↑"]
        # The line would have made the bars invisible.
        assert ax.get_ylim()[1] < 200
    assert "capacity" not in legend_names(figure.legends[0])


def test_confidence():
    given = statistics((1, 3))
    (ax,) = plot("confidence", given).axes
    found = lines(ax)
    for name in ("text", "image"):
        points, spread = found[name]
        mean = np.array([block.confidence_mean[name] for block in given.values()])
        std = np.array([block.confidence_std[name] for block in given.values()])
        np.testing.assert_allclose(points[:, 1], mean)
        np.testing.assert_allclose(spread, np.stack([mean - std, mean + std], 1))
    assert ax.get_ylim() == (0, 1.04)
    assert tick_names(ax.xaxis) == ["block 1", "block 3"]
    # Text to the left of its block, images to the right.
    patches = [patch for patch in ax.patches]
    blocks = [
        (p, b, n) for p, b in enumerate(given.values()) for n in ("image", "text")
    ]
    for patch, (place, block, name) in zip(patches, blocks, strict=True):
        values, edges, baseline = patch.get_data()
        counts = block.confidence_histogram[name]
        side = -1 if name == "text" else 1
        assert baseline == place
        widths = side * (values - place)
        np.testing.assert_allclose(widths / widths.max(), counts / counts.max())
        assert widths.max() < 0.5
        np.testing.assert_allclose(edges, np.arange(51) / 50)
        assert hex_color(patch) == (BLUE if name == "text" else RED)
    (least,) = [c for c in ax.collections if c.get_label() == "1/E"]
    np.testing.assert_allclose(np.array(least.get_segments())[..., 1], 1 / 3)


def test_coverage():
    given = statistics((1, 3))
    figure = plot("coverage", given, share=0.8)
    for ax, name in zip(figure.axes, ("text", "image"), strict=True):
        assert ax.get_title() == name
        blocks, (even, level) = ax.lines[:2], ax.lines[2:]
        for line, block in zip(blocks, given.values(), strict=True):
            np.testing.assert_allclose(line.get_xdata(), [1, 2, 3])
            np.testing.assert_allclose(line.get_ydata(), block.coverage[name])
        np.testing.assert_allclose(even.get_xydata(), [[0, 0], [3, 1]])
        np.testing.assert_allclose(level.get_ydata(), 0.8)
        needed = [block.experts_needed(0.8)[name] for block in given.values()]
        legend = ax.get_legend()
        assert legend.get_title().get_text() == "experts for 80%"
        assert legend_names(legend) == [
            f"block {layer}: {n}" for layer, n in zip(given, needed, strict=True)
        ]
    with pytest.raises(ValueError, match="Received: share=2"):
        plot("coverage", given, share=2)


def test_priorities():
    given = statistics((1, 3))
    figure = plot("priorities", given)
    axes = np.reshape(figure.axes, (2, 3))
    assert [ax.get_title() for ax in axes[0]] == ["expert 0", "expert 1", "expert 2"]
    for row, (layer, block) in zip(axes, given.items(), strict=True):
        assert row[0].get_ylabel() == f"block {layer}"
        for expert, ax in enumerate(row):
            # Of two groups and four places in a bin.
            text, image = (block.queue[n][expert] / 8 for n in ("text", "image"))
            shown = [patch.get_data() for patch in ax.patches]
            np.testing.assert_allclose(shown[0].values, text)
            np.testing.assert_allclose(shown[0].baseline, 0)
            np.testing.assert_allclose(shown[1].values, text + image)
            np.testing.assert_allclose(shown[1].baseline, text)
            for data in shown:
                np.testing.assert_allclose(data.edges, 4 * np.arange(13))
            assert [hex_color(patch) for patch in ax.patches] == [BLUE, RED]
            (capacity,) = ax.lines
            np.testing.assert_allclose(capacity.get_xdata(), 30)
            assert ax.get_xlim()[1] >= 48
    assert legend_names(figure.legends[0]) == ["text", "image", "capacity"]


def test_experts_of_many():
    given = statistics((1,), num_experts=20)
    figure = plot("priorities", given)
    most = np.argsort(-given[1].routed["text"], kind="stable")[:8]
    titles = [f"expert {expert}" for expert in sorted(most)]
    assert [ax.get_title() for ax in figure.axes] == titles
    figure = plot("priorities", given, experts=[7, 2])
    assert [ax.get_title() for ax in figure.axes] == ["expert 7", "expert 2"]
    for experts in ([], [20]):
        with pytest.raises(ValueError, match="from 0 to 19.*Received: experts="):
            plot("priorities", given, experts=experts)


def test_trajectories():
    given = statistics((1, 3, 5))
    given[1].transitions["text"][:] = 0
    given[1].transitions["text"][2, 0] = given[1].num_tokens["text"] * 4 // 5
    (ax,) = plot("trajectories", given, least=0.03).axes
    # The widest line there is room for.
    full = 8 / (given[1].transitions["text"][2, 0] / given[1].num_tokens["text"])
    expected = set()
    for column, layer in enumerate((1, 3)):
        for name, color in (("text", BLUE), ("image", RED)):
            shares = given[layer].transitions[name] / given[layer].num_tokens[name]
            for here, there in np.argwhere(shares >= 0.03):
                width = round(full * shares[here, there], 6)
                expected.add((column, int(here), int(there), color, width))
    found = set()
    for patch in ax.patches:
        (x, y), *_, (x_end, y_end) = patch.get_path().vertices
        assert x_end == x + 1
        width = round(patch.get_linewidth(), 6)
        found.add((int(x), round(y), round(y_end), hex_color(patch), width))
    assert found == expected
    assert 0 < len(found) < 36
    experts = [(*text.get_position(), text.get_text()) for text in ax.texts]
    assert experts == [(c, e, str(e)) for c in range(3) for e in range(3)]
    assert tick_names(ax.xaxis) == ["block 1", "block 3", "block 5"]


def test_trajectories_need_steps():
    given = statistics()
    with pytest.raises(ValueError, match="two blocks or more. Received: blocks=.1."):
        plot("trajectories", given, [1])
    with pytest.raises(ValueError, match=r"in their order. Received: .* \[3, 1\]"):
        plot("trajectories", given, [3, 1])
