"""Figures of patches and words, and of one pair."""

import numpy as np
import pytest

from keras_softmoe.analysis import RoutingMaps, analyze
from keras_softmoe.analysis.maps import ExpertExamples, ExpertPatches
from tests.support import pairs
from tests.support.close import assert_near
from tests.support.reading import png
from tests.support.references import to_numpy


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


def shown_patches(ax):
    """Pictures and the numbers below them, from left to right."""
    return [
        (corner.get_images()[0].get_array(), corner.get_xlabel())
        for corner in ax.child_axes
    ]


def words_of(ax):
    return [text.get_text() for text in ax.texts]


def test_expert_examples():
    maps = examples()
    given, figure = maps.examples, maps.plot("examples")
    axes = np.reshape(figure.axes, (3, 2))
    assert [row[0].get_ylabel() for row in axes] == [
        "expert 0\n25% of patches\n50% of text",
        "expert 1\n75% of patches\n0% of text",
        "expert 2\n0% of patches\n50% of text",
    ]
    for expert, (patches, _) in enumerate(axes):
        shown = shown_patches(patches)
        probabilities = given.patch_probabilities[expert]
        assert [label for _, label in shown] == [
            f"{100 * p:.0f}%" for p in probabilities
        ]
        for (picture, _), patch in zip(shown, given.patches[expert], strict=True):
            np.testing.assert_allclose(picture, (patch + 1) / 2)
    assert words_of(axes[0, 1]) == ["red 90%", "-s 80%", "▁ 70%", "<pad> 60%", ", 50%"]
    assert words_of(axes[1, 1]) == []
    # Dollar signs are no formula.
    assert words_of(axes[2, 1]) == ["a$b$ 40%"]
    assert "block 3" in figure.get_suptitle()
    assert png(figure).startswith(b"\x89PNG")


def test_examples_of_some_experts():
    figure = examples().plot("examples", experts=(2, 0))
    labels = [ax.get_ylabel().splitlines()[0] for ax in figure.axes[::2]]
    assert labels == ["expert 2", "expert 0"]
    for experts in ((), (3,)):
        with pytest.raises(ValueError, match="from 0 to 2.*Received: experts="):
            examples().plot("examples", experts=experts)


def test_examples_of_one_modality():
    share = examples().examples.share
    given = examples(
        share={"text": share["text"]}, patches=None, patch_probabilities=None
    )
    figure = given.plot("examples")
    assert len(figure.axes) == 3
    assert figure.axes[0].get_ylabel() == "expert 0\n50% of text"
    assert words_of(figure.axes[0])[0] == "red 90%"
    given = examples(
        share={"image": share["image"]}, words=None, word_probabilities=None
    )
    figure = given.plot("examples")
    assert [len(shown_patches(ax)) for ax in figure.axes] == [2, 4, 0]


def test_ids_stay_as_they_are():
    given = examples(words=[["17", "4", "0", "8", "1"], [], ["3"]])
    figure = given.plot("examples")
    assert words_of(figure.axes[1])[:2] == ["17 90%", "4 80%"]


# === One pair ===


def maps_of(patch_experts, word_experts, words=("▁a", "▁red", "s", "<pad>", "<pad>")):
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
    given = maps_of([[4, -1, 4], [4, 4, 2]], [0, 4, 4, 0, 0])
    figure = given.plot("pair", index=1)
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == [
        "image and caption",
        *(f"expert {e}" for e in (0, 2, 4)),
        "dropped",
    ]
    below = [ax.get_xlabel() for ax in figure.axes]
    assert below == [
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


def test_many_experts_take_several_rows():
    given = maps_of([[0, 1, 2], [3, 4, 5]], [0, 1, 2, 3, 8])
    figure = given.plot("pair", index=1)
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == [
        "image and caption",
        *(f"expert {e}" for e in (0, 1, 2, 3, 4, 5, 8)),
    ]
    rows = {round(ax.get_subplotspec().rowspan.start) for ax in figure.axes}
    assert rows == {0, 1}


def test_a_pair_of_a_model():
    backbone = pairs.limoe()
    images, ids = pairs.images()[:1], pairs.token_ids()[:1]
    routing = analyze(backbone, images, captions=ids, num_pictures=1, verbose=0)
    figure = routing.plot("pair", [1])
    shown = {ax.get_title() for ax in figure.axes[1:]}
    _, summary = backbone.route(pairs.images()[:1], pairs.token_ids()[:1])[1]
    expected = {f"expert {e}" for e in np.flatnonzero(to_numpy(summary["load"])[0])}
    if to_numpy(summary["dropped"]).any():
        expected.add("dropped")
    assert shown == expected


# === Patches of images ===


def patches():
    """Of three experts, the last of which takes nothing."""
    rng = np.random.default_rng(0)
    pictures = [rng.uniform(-1, 1, (count, 12, 12, 3)) for count in (2, 4)]
    for picture in pictures:
        # Above the image
        picture[:, :4] = np.nan
    pictures.append(np.array([]))
    weights = [-np.sort(-rng.uniform(size=len(found))) for found in pictures]
    found = ExpertPatches(np.array([0.25, 0.75, 0.0]), pictures, weights)
    return RoutingMaps(0, 8, 3, False, patches=found)


def test_patches_of_some_experts():
    maps = patches()
    found = maps.patches
    figure = maps.plot("patches", experts=[1, 0])
    axes = np.reshape(figure.axes, (2, 10))
    for row, expert in zip(axes, (1, 0), strict=True):
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
            assert_near(drawn[~outside], expected, atol=1e-6)
            (frame,) = ax.patches
            assert frame.get_bbox().bounds == (4, 4, 4, 4)
    assert "block 0" in figure.get_suptitle() and "33.3%" in figure.get_suptitle()
    assert png(figure).startswith(b"\x89PNG")


def test_patches_of_the_busiest_experts():
    labels = [ax.get_ylabel() for ax in patches().plot("patches").axes]
    labels = [label.split("\n")[0] for label in labels if label]
    assert labels == ["expert 1", "expert 0", "expert 2"]
    figure = patches().plot("patches", experts=[2])
    assert figure.axes[0].get_ylabel() == "expert 2\n0.0%"
    assert all(not ax.get_images() for ax in figure.axes)
    with pytest.raises(ValueError, match=r"from 0 to 2.*experts=\[3\]"):
        patches().plot("patches", experts=[3])
