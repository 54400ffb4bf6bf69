"""Figures of queues and paths show the numbers that they are given."""

import numpy as np
import pytest

from tests.analysis.test_panels_modalities import BLUE, RED, hex_color
from tests.support.made_up import plot
from tests.support.modality_blocks import make_block, statistics
from tests.support.reading import legend_names, tick_names

# === Queues ===


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


def test_short_queues_are_shown_large():
    block = make_block(capacity=1000)
    for counts in block.queue.values():
        counts[:, 5:] = 0
        counts[0, 4] = 1
    figure = plot("priorities", {1: block})
    assert figure.axes[0].get_xlim()[1] == pytest.approx(1.05 * 20)
    assert not figure.axes[0].lines
    assert legend_names(figure.legends[0]) == ["text", "image"]
    # The line is there as long as it is near.
    figure = plot("priorities", {1: block._replace(capacity=40)})
    assert figure.axes[0].get_xlim()[1] == pytest.approx(1.05 * 40)


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


# === Trajectories ===


def test_trajectories():
    given = statistics((1, 3, 5))
    given[1].transitions["text"][:] = 0
    given[1].transitions["text"][2, 0] = given[1].num_tokens["text"] * 4 // 5
    figure = plot("trajectories", given, least=0.03)
    (ax,) = figure.axes
    # The widest line there is room for.
    widest = 8
    full = widest / (given[1].transitions["text"][2, 0] / given[1].num_tokens["text"])
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


def test_an_expert_without_ways_is_grey():
    given = statistics((1, 3))
    for counts in given[1].transitions.values():
        counts[:] = 0
        counts[2, 1] = 100
    figure = plot("trajectories", given)
    colors = [text.get_color() for text in figure.axes[0].texts]
    assert colors == ["0.7", "0.7", "black", "0.7", "black", "0.7"]


def test_trajectories_need_steps():
    given = statistics()
    with pytest.raises(ValueError, match="two blocks or more. Received: blocks=.1."):
        plot("trajectories", given, [1])
    with pytest.raises(ValueError, match=r"in their order. Received: .* \[3, 1\]"):
        plot("trajectories", given, [3, 1])
