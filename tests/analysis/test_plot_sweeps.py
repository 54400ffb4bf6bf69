"""Figures of a model at several capacities show its dropped patches."""

import numpy as np
import pytest

from keras_softmoe import analysis, routers
from keras_softmoe.analysis import plot_discarded_patches
from tests.analysis.reading import png
from tests.models import tiny

# === Discarded patches ===

# It would seat everything, were it not for `eval_capacity_factor`.
ROUTER = routers.SoftmaxTokenChoiceRouter(
    4, capacity_factor=4.0, eval_capacity_factor=1.0
)
CAPACITIES = (1.0, 0.25)


@pytest.fixture(scope="module")
def classifier():
    return tiny.classifier(moe_layers=(0, 1), router=ROUTER, group_images=2)


def discarded(classifier, images, priority):
    """`(capacities, images, rows, columns)` in block 1, setting by setting."""
    found = []
    for factor in CAPACITIES:
        settings = {"eval_capacity_factor": factor, "priority": priority}
        classifier.set_routing(**settings)
        maps = analysis.routing_maps(classifier, images, layer=1)
        found.append(maps.dispatch.sum((-2, -1)) == 0)
    classifier.set_routing(eval_capacity_factor=1.0, priority="position")
    return np.array(found)


@pytest.mark.parametrize("priority", [None, "max"])
def test_discarded_patches_are_covered(classifier, priority):
    images = tiny.pixels(2)
    expected = discarded(classifier, images, priority or "position")
    before = classifier.backbone.get_config()
    figure = plot_discarded_patches(
        classifier, images, CAPACITIES, layer=1, priority=priority
    )
    assert classifier.backbone.get_config() == before
    axes = np.reshape(figure.axes, (2, 3))
    assert [ax.get_title() for ax in axes[0]] == ["image", "C = 1", "C = 0.25"]
    assert 0 < expected[0].mean() < expected[1].mean()
    for row in range(2):
        (picture,) = axes[row, 0].get_images()
        np.testing.assert_allclose(picture.get_array(), images[row] / 255, atol=1e-6)
        assert not axes[row, 0].collections
        for ax, patches in zip(axes[row, 1:], expected[:, row], strict=True):
            (cover,) = ax.collections
            _, grey = ax.get_images()
            for layer in (cover, grey):
                shown = ~np.ma.getmaskarray(layer.get_array())
                np.testing.assert_array_equal(shown, patches)
            # The patches lie where they do in the picture, upside down for matplotlib.
            assert cover.get_coordinates()[0, 0].tolist() == [0, 0]
            assert cover.get_coordinates()[-1, -1].tolist() == [8, 8]
            assert ax.get_ylim() == (8, 0)
            assert ax.get_xlabel() == f"{patches.mean():.0%} discarded"
    title = figure.get_suptitle()
    assert "block 1" in title
    assert "vanilla" in title if priority is None else "batch prioritized" in title
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"capacity_factors": ()}, r"Received: capacity_factors=\(\)"),
        ({"capacity_factors": (0.5, -1.0)}, "eval_capacity_factor=-1.0"),
        ({"capacity_factors": (0.5,), "layer": 7}, "layer=7"),
        ({"priority": "vanilla"}, "priority='vanilla'"),
    ],
)
def test_settings_are_put_back_after_an_error(classifier, arguments, message):
    before = classifier.backbone.get_config()
    with pytest.raises(ValueError, match=message):
        plot_discarded_patches(classifier, tiny.pixels(2), **arguments)
    assert classifier.backbone.get_config() == before


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"router": tiny.SOFT}, "Received: block 1 with SoftRouter"),
        ({"router": routers.IdentityRouter(5)}, "block 1 with IdentityRouter"),
        (tiny.DENSE, "dense model"),
    ],
)
def test_routers_without_capacity_discard_nothing(overrides, message):
    with pytest.raises(ValueError, match=message):
        plot_discarded_patches(tiny.backbone(**overrides), tiny.images(2))
