"""Figures show the numbers that they claim to show."""

import inspect
import sys

import numpy as np
import pytest

from keras_softmoe import analysis
from keras_softmoe.analysis import plot_experts, plot_slots, routing_maps
from keras_softmoe.analysis._maps import main_experts
from keras_softmoe.analysis._plot_images import _most_different_slots
from keras_softmoe.models import ViTMoEBackbone
from keras_softmoe.routers import (
    IdentityRouter,
    SoftmaxExpertChoiceRouter,
    SoftmaxTokenChoiceRouter,
    SoftRouter,
)
from tests.analysis.reading import png, tick_names

ROUTERS = {
    "soft": lambda: SoftRouter(4, slots_per_expert=2),
    "uniform": lambda: SoftRouter(4, dispatch="uniform", combine="uniform"),
    "token choice": lambda: SoftmaxTokenChoiceRouter(4, capacity_factor=0.5),
    "expert choice": lambda: SoftmaxExpertChoiceRouter(4),
    "identity": lambda: IdentityRouter(4),
}


def make_backbone(router, channels=3, **kwargs):
    arguments = {"moe_layers": (0,), "router": router, "pooling": "gap", **kwargs}
    return ViTMoEBackbone((8, 16, channels), 4, 1, 2, 8, 16, **arguments)


def make_images(count=2, channels=3):
    rng = np.random.default_rng(0)
    return rng.uniform(-1, 1, (count, 8, 16, channels)).astype("float32")


@pytest.mark.parametrize("plot", [plot_slots, plot_experts])
@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_can_be_drawn(plot, name):
    figure = plot(make_backbone(ROUTERS[name]()), make_images())
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("channels", [1, 4])
def test_pictures_that_are_not_in_colour_are_grey(channels):
    backbone = make_backbone(ROUTERS["soft"](), channels)
    images = make_images(1, channels)
    picture = plot_slots(backbone, images).axes[0].get_images()[0].get_array()
    grey = np.repeat(images[0].mean(-1, keepdims=True) / 2 + 0.5, 3, axis=-1)
    np.testing.assert_allclose(picture, grey, atol=1e-6)


def test_slots_are_drawn_where_they_take():
    backbone, images = make_backbone(ROUTERS["soft"]()), make_images()
    chosen = [(3, 1), (0, 0)]
    figure = plot_slots(backbone, images, slots=chosen)
    maps = routing_maps(backbone, images)
    axes = np.reshape(figure.axes[:6], (2, 3))
    titles = [ax.get_title() for ax in axes[0]]
    assert titles == ["image", "expert 3, slot 1", "expert 0, slot 0"]
    for row in range(2):
        for ax, (expert, slot) in zip(axes[row, 1:], chosen, strict=True):
            drawn = ax.get_images()[-1]
            # In even shares of the 8 patches.
            weights = 8 * maps.dispatch[row, :, :, expert, slot]
            np.testing.assert_allclose(drawn.get_array(), weights, rtol=1e-5)
            assert weights.min() < 1 < weights.max()
            assert drawn.get_extent() == [0, 16, 8, 0]
            assert drawn.norm is axes[0, 1].get_images()[-1].norm
    # An even share is in the middle of a scale of ratios.
    np.testing.assert_allclose(drawn.norm([0.25, 0.5, 1, 2, 4]), np.linspace(0, 1, 5))
    scale = figure.axes[-1]
    assert tick_names(scale.yaxis) == ["0.25", "0.5", "1 (even)", "2", "4"]
    assert "block 0" in figure.get_suptitle()


def test_slots_that_route_show_it():
    images = make_images()
    backbone = make_backbone(ROUTERS["soft"]())

    def strength():
        """How far colours are from that of an even share, on average."""
        drawn = [
            ax.get_images()[-1]
            for ax in plot_slots(backbone, images, slots=2).axes
            if len(ax.get_images()) > 1
        ]
        return np.mean([d.cmap(d.norm(d.get_array()))[..., 3].mean() for d in drawn])

    faint = strength()
    backbone.routers[0].scale.assign(30.0)
    # With random weights about 0.9 and 0.2.
    assert strength() > 0.6 > 0.4 > faint
    backbone = make_backbone(ROUTERS["uniform"]())
    assert strength() < 0.01


def test_nothing_is_at_the_end_of_the_scale():
    backbone = make_backbone(ROUTERS["expert choice"]())
    (ax,) = plot_slots(backbone, make_images(1), slots=[(0, 0)]).axes[1:2]
    drawn = ax.get_images()[-1]
    assert sorted(drawn.norm(drawn.get_array()).ravel() >= 1) == [False] * 7 + [True]
    assert not np.ma.getmaskarray(drawn.get_array()).any()
    assert (drawn.norm(drawn.get_array()).ravel() < 0).sum() == 7


def test_an_even_share_is_one_of_the_group():
    backbone = make_backbone(ROUTERS["uniform"](), group_images=2)
    figure = plot_slots(backbone, make_images(), slots=[(0, 0)])
    np.testing.assert_allclose(figure.axes[1].get_images()[-1].get_array(), 1, 1e-5)
    assert "(1/16)" in figure.axes[-1].get_ylabel()


def test_slots_that_do_not_exist():
    backbone, images = make_backbone(ROUTERS["soft"]()), make_images()
    for slots in (0, -1, [], [(4, 0)], [(0, 2)], [(-1, 0)]):
        with pytest.raises(ValueError, match="4 experts with 2 slots.*slots="):
            plot_slots(backbone, images, slots=slots)
    assert len(plot_slots(backbone, images, slots=99).axes) == 2 * (1 + 8) + 1


def test_the_slots_shown_differ():
    # One row of three patches, three experts of two slots, (slots, patches):
    taken = np.array(
        [
            [0.8, 0.1, 0.1],  # expert 0
            [0.1, 0.1, 0.8],
            [0.9, 0.1, 0.0],  # expert 1, the most selective, and much like (0, 0)
            [0.3, 0.3, 0.4],
            [0.7, 0.2, 0.1],  # expert 2, like (0, 0) as well
            [0.0, 0.0, 0.0],  # and empty
        ]
    )
    dispatch = taken.T.reshape(1, 1, 3, 3, 2)
    assert _most_different_slots(dispatch, 1) == [(1, 0)]
    assert _most_different_slots(dispatch, 2) == [(0, 1), (1, 0)]
    # The third is of the third expert, though (1, 1) is less like the others.
    assert _most_different_slots(dispatch, 3) == [(0, 1), (1, 0), (2, 0)]
    # The empty one comes last.
    assert (2, 1) not in _most_different_slots(dispatch, 5)
    assert len(set(_most_different_slots(dispatch, 6))) == 6
    assert _most_different_slots(np.zeros((1, 1, 3, 2, 1)), 2) == [(0, 0), (1, 0)]


def test_experts_are_drawn_where_they_work():
    backbone, images = make_backbone(ROUTERS["token choice"]()), make_images()
    figure = plot_experts(backbone, images)
    maps = routing_maps(backbone, images)
    experts = main_experts(maps)
    weights = maps.combine.sum(-1).max(-1)
    clear = weights >= 2 / 4
    assert clear.any() and not clear.all()
    dropped = int((experts < 0).sum())
    assert dropped > 0
    for index in range(2):
        ax = figure.axes[2 * index + 1]
        pixels, cover = (image.get_array() for image in ax.get_images())
        # Equal colours are equal experts.
        taken = experts[index] >= 0
        _, seen = np.unique(pixels[taken][:, :3], axis=0, return_inverse=True)
        _, wanted = np.unique(experts[index][taken], return_inverse=True)
        assert (np.equal.outer(seen, seen) == np.equal.outer(wanted, wanted)).all()
        # None at an even share of one in four, full from two of them on.
        opacity = np.where(taken, np.clip(4 * weights[index] - 1, 0, 1), 0)
        np.testing.assert_allclose(pixels[..., 3], opacity, atol=1e-6)
        found = [text.get_alpha() for text in ax.texts]
        np.testing.assert_allclose(found, opacity[taken], atol=1e-6)
        numbers = [int(text.get_text()) for text in ax.texts]
        assert numbers == experts[index][experts[index] >= 0].tolist()
        dropped_here = experts[index] < 0
        np.testing.assert_array_equal(~np.ma.getmaskarray(cover), dropped_here)
        (hatched,) = ax.collections
        covered = ~np.ma.getmaskarray(hatched.get_array())
        np.testing.assert_array_equal(covered, dropped_here)
    bars = [bar.get_width() for bar in figure.axes[-1].patches]
    assert bars == [
        *((experts == expert).sum() for expert in range(4)),
        *((experts == expert)[clear].sum() for expert in range(4)),
        dropped,
    ]
    (even,) = figure.axes[-1].lines
    assert even.get_xdata() == pytest.approx([(16 - dropped) / 4] * 2)


def test_patches_that_listen_to_all_experts_are_white():
    figure = plot_experts(make_backbone(ROUTERS["uniform"]()), make_images(1))
    pixels = figure.axes[1].get_images()[0].get_array()
    np.testing.assert_allclose(pixels[..., 3], 0, atol=1e-5)


def test_many_experts_have_many_colours():
    backbone = make_backbone(SoftRouter(40))
    bars = plot_experts(backbone, make_images()).axes[-1].containers[1]
    assert len({bar.get_facecolor() for bar in bars}) == 40


def test_without_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    names = vars(analysis).items()
    plots = [x for name, x in names if name.startswith("plot_") and callable(x)]
    assert len(plots) >= 10
    for plot in plots:
        arguments = [
            None
            for parameter in inspect.signature(plot).parameters.values()
            if parameter.default is parameter.empty
        ]
        with pytest.raises(ImportError, match="extra `viz`"):
            plot(*arguments)
