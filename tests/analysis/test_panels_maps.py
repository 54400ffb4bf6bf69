"""Figures over the images show the numbers that they claim to show.

They also test the images of `drawing.py` below them.
"""

import numpy as np
import pytest

from keras_softmoe.analysis import RoutingMaps, analyze
from keras_softmoe.analysis.maps import ExpertExamples
from keras_softmoe.analysis.panels_maps import _most_different_slots
from keras_softmoe.models import ViTMoEBackbone
from keras_softmoe.routers import IdentityRouter, SoftmaxTokenChoiceRouter, SoftRouter
from tests.support import tiny
from tests.support.close import assert_near
from tests.support.reading import png, tick_names

ROUTERS = {
    "soft": lambda: SoftRouter(4, slots_per_expert=2),
    "uniform": lambda: SoftRouter(4, dispatch="uniform", combine="uniform"),
    "token choice": lambda: SoftmaxTokenChoiceRouter(4, capacity_factor=0.5),
}


def make_backbone(router, channels=3, **kwargs):
    arguments = {"moe_layers": (0,), "router": router, "pooling": "gap", **kwargs}
    return ViTMoEBackbone((8, 16, channels), 4, 1, 2, 8, 16, **arguments)


def make_images(count=2, channels=3):
    rng = np.random.default_rng(0)
    return rng.uniform(-1, 1, (count, 8, 16, channels)).astype("float32")


def maps_of(backbone, images):
    return analyze(backbone, images, num_pictures=len(images), verbose=0).maps[0]


@pytest.mark.parametrize("channels", [1, 4])
def test_pictures_that_are_not_in_colour_are_grey(channels):
    backbone = make_backbone(ROUTERS["soft"](), channels)
    images = make_images(1, channels)
    figure = maps_of(backbone, images).plot("slots")
    picture = figure.axes[0].get_images()[0].get_array()
    grey = np.repeat(images[0].mean(-1, keepdims=True) / 2 + 0.5, 3, axis=-1)
    assert_near(picture, grey, atol=1e-6)


def test_slots_are_drawn_where_they_take():
    backbone, images = make_backbone(ROUTERS["soft"]()), make_images()
    chosen = [(3, 1), (0, 0)]
    maps = maps_of(backbone, images)
    figure = maps.plot("slots", slots=chosen)
    assert png(figure).startswith(b"\x89PNG")
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
    assert tick_names(figure.axes[-1].yaxis) == ["0.25", "0.5", "1 (even)", "2", "4"]
    assert "block 0" in figure.get_suptitle()


def test_slots_that_do_not_exist():
    backbone, images = make_backbone(ROUTERS["soft"]()), make_images()
    for slots in (0, -1, [], [(4, 0)], [(0, 2)], [(-1, 0)]):
        with pytest.raises(ValueError, match="4 experts with 2 slots.*slots="):
            maps_of(backbone, images).plot("slots", slots=slots)
    figure = maps_of(backbone, images).plot("slots", slots=99)
    assert len(figure.axes) == 2 * (1 + 8) + 1


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
    maps = maps_of(backbone, images)
    # The slot of a sparse router holds one token at most.
    with pytest.raises(ValueError, match="Received: figure='slots'"):
        maps.plot("slots")
    figure = maps.plot("experts")
    assert png(figure).startswith(b"\x89PNG")
    experts = maps.main_experts
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
        assert_near(pixels[..., 3], opacity, atol=1e-6)
        found = [text.get_alpha() for text in ax.texts]
        assert_near(found, opacity[taken], atol=1e-6)
        numbers = [int(text.get_text()) for text in ax.texts]
        assert numbers == experts[index][experts[index] >= 0].tolist()
        dropped_here = experts[index] < 0
        np.testing.assert_array_equal(~np.ma.getmaskarray(cover), dropped_here)
        (hatched,) = ax.collections
        covered = ~np.ma.getmaskarray(hatched.get_array())
        np.testing.assert_array_equal(covered, dropped_here)
    assert [bar.get_width() for bar in figure.axes[-1].patches] == [
        *((experts == expert).sum() for expert in range(4)),
        *((experts == expert)[clear].sum() for expert in range(4)),
        dropped,
    ]
    (even,) = figure.axes[-1].lines
    assert even.get_xdata() == pytest.approx([(16 - dropped) / 4] * 2)


# It has slots for all tokens, but for `eval_capacity_factor`.
SCARCE = SoftmaxTokenChoiceRouter(4, capacity_factor=4.0, eval_capacity_factor=1.0)


@pytest.mark.parametrize(
    "router, num_pictures, message",
    [
        (tiny.SOFT, 1, "Received: block 1 with SoftRouter"),
        (IdentityRouter(5), 1, "Received: block 1 with IdentityRouter"),
        (SCARCE, 0, "needs `num_pictures`.*Received: num_pictures=0"),
    ],
)
def test_where_no_patch_is_discarded(router, num_pictures, message):
    with pytest.raises(ValueError, match=message):
        analyze(
            *(tiny.backbone(router=router), tiny.images(2)),
            num_pictures=num_pictures,
            capacity_factors=(1.0,),
            verbose=0,
        )


def examples(**overrides):
    """Of three experts, the last of which takes no images."""
    rng = np.random.default_rng(0)
    counts = (2, 4, 0)
    fields = {
        "share": {
            "image": np.array([0.25, 0.75, 0.0]),
            "text": np.array([0.5, 0.0, 0.5]),
        },
        "patches": [rng.uniform(-1, 1, (n, 4, 2, 3)) for n in counts],
        "patch_probabilities": [-np.sort(-rng.uniform(size=n)) for n in counts],
        "words": [["▁red", "s", "▁", "<pad>", ","], [], ["▁a$b$"]],
        "word_probabilities": [np.array([0.9, 0.8, 0.7, 0.6, 0.5]), [], [0.4]],
        **overrides,
    }
    return RoutingMaps(3, 12, 3, False, examples=ExpertExamples(**fields))


def test_examples_of_some_experts():
    figure = examples().plot("examples", experts=(2, 0))
    labels = [ax.get_ylabel().splitlines()[0] for ax in figure.axes[::2]]
    assert labels == ["expert 2", "expert 0"]
    for experts in ((), (3,)):
        with pytest.raises(ValueError, match="from 0 to 2.*Received: experts="):
            examples().plot("examples", experts=experts)


def maps_of_pair(
    patch_experts, word_experts, words=("▁a", "▁red", "s", "<pad>", "<pad>")
):
    """Maps of one pair, which is the second of two."""
    image = np.random.default_rng(0).uniform(-1, 1, (4, 6, 3)).astype("float32")
    # (rows, columns, E, 1)
    dispatch = (np.array(patch_experts)[..., None] == np.arange(9))[..., None]
    dispatch = np.stack([0 * dispatch, dispatch]).astype("float32")
    return RoutingMaps(
        5,
        11,
        9,
        False,
        images=np.stack([0 * image, image]),
        dispatch=dispatch,
        combine=dispatch / 2,
        words=[[], list(words)],
        word_experts=[[], np.array(word_experts)],
    )


def test_pair():
    given = maps_of_pair([[4, -1, 4], [4, 4, 2]], [0, 4, 4, 0, 0])
    figure = given.plot("pair", index=1)
    assert [ax.get_title() for ax in figure.axes] == [
        "image and caption",
        "expert 0",
        "expert 2",
        "expert 4",
        "dropped",
    ]
    assert [ax.get_xlabel() for ax in figure.axes] == [
        "a · red · -s ·\n<pad>\u00a0×2",
        "a · <pad>\u00a0×2",
        "no text",
        "red · -s",
        "no text",
    ]
    pixels = (given.images[1] + 1) / 2
    for ax, expert in zip(figure.axes[1:], (0, 2, 4, -1), strict=True):
        shown = ax.get_images()[0].get_array()
        taken = np.kron(given.main_experts[1] == expert, np.ones((2, 2))).astype(bool)
        assert_near(shown[taken], pixels[taken], atol=1e-6)
        faded = 1 - 0.12 * (1 - pixels)
        assert_near(shown[~taken], faded[~taken], atol=1e-6)
    assert "block 5" in figure.get_suptitle()
    assert png(figure).startswith(b"\x89PNG")
