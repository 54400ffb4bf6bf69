"""Patches of experts are those that they take with the largest weights."""

import numpy as np
import pytest

from keras_softmoe import analysis, routers
from keras_softmoe.analysis import plot_expert_patches
from keras_softmoe.analysis._maps import routing_maps
from keras_softmoe.analysis._plot_expert_patches import PatchReducer
from keras_softmoe.models import ViTMoEBackbone
from tests.analysis.reading import png

ROUTERS = {
    "token choice": lambda: routers.SoftmaxTokenChoiceRouter(
        3, num_selected_experts=2, capacity_factor=0.5
    ),
    "expert choice": lambda: routers.SoftmaxExpertChoiceRouter(3),
    "soft": lambda: routers.SoftRouter(3),
}


def make_backbone(router, **kwargs):
    arguments = {"moe_layers": (0,), "router": router, "pooling": "gap", **kwargs}
    return ViTMoEBackbone((8, 16, 3), 4, 1, 2, 8, 16, **arguments)


def make_images(count):
    rng = np.random.default_rng(0)
    return rng.uniform(-1, 1, (count, 8, 16, 3)).astype("float32")


@pytest.mark.parametrize("pooling", ["gap", "token"])
@pytest.mark.parametrize("name", ROUTERS)
def test_patches_against_maps(name, pooling):
    # Groups of two, of which the last one is partly empty.
    backbone = make_backbone(ROUTERS[name](), group_images=2, pooling=pooling)
    images = make_images(13)
    reducers = [PatchReducer(backbone)]
    (found,) = analysis.observe(backbone, images, reducers, batch_size=4, verbose=0)
    batches = [images[start : start + 4] for start in range(0, 13, 4)]
    maps = [routing_maps(backbone, batch) for batch in batches]
    taken = np.concatenate([(m.dispatch > 0).any(-1) for m in maps])
    weights = np.concatenate([m.combine.sum(-1) for m in maps])
    share = taken.sum((0, 1, 2)) / taken.sum()
    np.testing.assert_allclose(found.share, share)
    for expert in range(3):
        # (images, rows, columns), the best place of each image
        own = np.where(taken[..., expert], weights[..., expert], -1)
        best = own.reshape(13, -1).max(1)
        order = np.argsort(-best, kind="stable")[:10]
        order = order[best[order] >= 0]
        np.testing.assert_allclose(found.weights[expert], best[order], rtol=1e-5)
        for picture, image in zip(found.pictures[expert], order, strict=True):
            row, column = np.unravel_index(own[image].argmax(), (2, 4))
            patch = images[image, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            np.testing.assert_array_equal(picture[4:8, 4:8], patch)
            # Nothing above the first row, nothing below the second.
            outside = picture[:4] if row == 0 else picture[8:]
            assert np.isnan(outside).all()
            beside = picture[4:8, 8:]
            if column < 3:
                start = 4 * column + 4
                neighbour = images[image, 4 * row : 4 * row + 4, start : start + 4]
                np.testing.assert_array_equal(beside, neighbour)
            else:
                assert np.isnan(beside).all()


def test_what_is_drawn():
    backbone, images = make_backbone(ROUTERS["token choice"]()), make_images(12)
    reducers = [PatchReducer(backbone)]
    (found,) = analysis.observe(backbone, images, reducers, verbose=0)
    figure = plot_expert_patches(backbone, images, experts=[2, 0], verbose=0)
    axes = np.reshape(figure.axes, (2, 10))
    for row, expert in zip(axes, (2, 0), strict=True):
        share = f"{100 * found.share[expert]:.1f}%"
        assert row[0].get_ylabel() == f"expert {expert}\n{share}"
        weights = found.weights[expert]
        names = [f"{weight:.2f}" for weight in weights]
        assert [ax.get_xlabel() for ax in row] == names + [""] * (10 - len(names))
        for ax, picture in zip(row, found.pictures[expert], strict=False):
            drawn, cover = (image.get_array() for image in ax.get_images())
            outside = np.isnan(picture).any(-1)
            np.testing.assert_array_equal(~np.ma.getmaskarray(cover), outside)
            expected = picture[~outside] / 2 + 0.5
            np.testing.assert_allclose(drawn[~outside], expected, atol=1e-6)
            (frame,) = ax.patches
            assert frame.get_bbox().bounds == (4, 4, 4, 4)
    assert "block 0" in figure.get_suptitle() and "33.3%" in figure.get_suptitle()
    assert png(figure).startswith(b"\x89PNG")
    # The busiest first.
    labels = [ax.get_ylabel() for ax in plot_expert_patches(backbone, images).axes]
    order = np.argsort(-found.share, kind="stable")
    assert [f"expert {e}" for e in order] == [x.split("\n")[0] for x in labels if x]


def test_experts_that_take_nothing_have_no_patches():
    backbone = make_backbone(routers.SoftmaxTokenChoiceRouter(16))
    images = make_images(1)
    (found,) = analysis.observe(backbone, images, [PatchReducer(backbone)], verbose=0)
    idle = int(found.share.argmin())
    assert found.share[idle] == 0
    figure = plot_expert_patches(backbone, images, experts=[idle], verbose=0)
    assert figure.axes[0].get_ylabel() == f"expert {idle}\n0.0%"
    assert all(not ax.get_images() for ax in figure.axes)
    with pytest.raises(ValueError, match="from 0 to 15.*experts=\\[16\\]"):
        plot_expert_patches(backbone, images, experts=[16], verbose=0)
    with pytest.raises(ValueError, match="layer=1"):
        plot_expert_patches(backbone, images, layer=1)
