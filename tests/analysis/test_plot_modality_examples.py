"""Figures of patches and words, and of one pair."""

import numpy as np
import pytest

from keras_softmoe.analysis import (
    _plot_modality_examples as plot_modality_examples,
)
from keras_softmoe.analysis import plot_expert_examples, plot_pair
from keras_softmoe.analysis._modality_examples import ExpertExamples, PairRouting
from tests.analysis import pairs
from tests.analysis.reading import png
from tests.references import to_numpy


def examples(**overrides):
    """Of three experts, the last of which takes no images."""
    rng = np.random.default_rng(0)
    counts = (2, 4, 0)
    fields = {
        "layer": 3,
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
    return ExpertExamples(**fields)


def shown_patches(ax):
    """Pictures and the numbers below them, from left to right."""
    return [
        (corner.get_images()[0].get_array(), corner.get_xlabel())
        for corner in ax.child_axes
    ]


def words_of(ax):
    return [text.get_text() for text in ax.texts]


def test_expert_examples():
    given = examples()
    figure = plot_expert_examples(given)
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
    figure = plot_expert_examples(examples(), experts=(2, 0))
    labels = [ax.get_ylabel().splitlines()[0] for ax in figure.axes[::2]]
    assert labels == ["expert 2", "expert 0"]
    for experts in ((), (3,)):
        with pytest.raises(ValueError, match="from 0 to 2.*Received: experts="):
            plot_expert_examples(examples(), experts)


def test_examples_of_one_modality():
    share = examples().share
    given = examples(
        share={"text": share["text"]}, patches=None, patch_probabilities=None
    )
    figure = plot_expert_examples(given)
    assert len(figure.axes) == 3
    assert figure.axes[0].get_ylabel() == "expert 0\n50% of text"
    assert words_of(figure.axes[0])[0] == "red 90%"
    given = examples(
        share={"image": share["image"]}, words=None, word_probabilities=None
    )
    figure = plot_expert_examples(given)
    assert [len(shown_patches(ax)) for ax in figure.axes] == [2, 4, 0]


def test_ids_stay_as_they_are():
    figure = plot_expert_examples(
        examples(words=[["17", "4", "0", "8", "1"], [], ["3"]])
    )
    assert words_of(figure.axes[1])[:2] == ["17 90%", "4 80%"]


def test_other_things_than_examples():
    with pytest.raises(ValueError, match="Received: examples of type dict"):
        plot_expert_examples({})


# === One pair ===


def plot_of(monkeypatch, routing, caption="a red circle"):
    monkeypatch.setattr(plot_modality_examples, "pair_routing", lambda *_: routing)
    return plot_pair(None, None, caption)


def routing(patch_experts, word_experts, words=("▁a", "▁red", "s", "<pad>", "<pad>")):
    image = np.random.default_rng(0).uniform(-1, 1, (4, 6, 3)).astype("float32")
    return PairRouting(
        5, 9, image, np.array(patch_experts), list(words), np.array(word_experts)
    )


def test_pair(monkeypatch):
    given = routing([[4, -1, 4], [4, 4, 2]], [0, 4, 4, 0, 0])
    figure = plot_of(monkeypatch, given)
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == [
        "image and caption",
        *(f"expert {e}" for e in (0, 2, 4)),
        "dropped",
    ]
    below = [ax.get_xlabel() for ax in figure.axes]
    assert below == [
        "a red circle",
        "a · <pad>\u00a0×2",
        "no text",
        "red · -s",
        "no text",
    ]
    pixels = (given.image + 1) / 2
    for ax, expert in zip(figure.axes[1:], (0, 2, 4, -1), strict=True):
        shown = ax.get_images()[0].get_array()
        taken = np.kron(given.patch_experts == expert, np.ones((2, 2))).astype(bool)
        np.testing.assert_allclose(shown[taken], pixels[taken], atol=1e-6)
        faded = 1 - 0.12 * (1 - pixels)
        np.testing.assert_allclose(shown[~taken], faded[~taken], atol=1e-6)
    assert "block 5" in figure.get_suptitle()
    assert png(figure).startswith(b"\x89PNG")


def test_many_experts_take_several_rows(monkeypatch):
    given = routing([[0, 1, 2], [3, 4, 5]], [0, 1, 2, 3, 8])
    figure = plot_of(monkeypatch, given, caption=np.array([1, 2, 3, 0, 0]))
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == [
        "image and caption",
        *(f"expert {e}" for e in (0, 1, 2, 3, 4, 5, 8)),
    ]
    rows = {round(ax.get_subplotspec().rowspan.start) for ax in figure.axes}
    assert rows == {0, 1}
    # The pieces stand for a caption that came as ids.
    assert figure.axes[0].get_xlabel() == "a · red · -s ·\n<pad>\u00a0×2"


def test_a_pair_of_a_model():
    backbone = pairs.limoe()
    figure = plot_pair(backbone, pairs.images()[0], pairs.token_ids()[0], layer=1)
    shown = {ax.get_title() for ax in figure.axes[1:]}
    _, summary = backbone.route(pairs.images()[:1], pairs.token_ids()[:1])[1]
    expected = {f"expert {e}" for e in np.flatnonzero(to_numpy(summary["load"])[0])}
    if to_numpy(summary["dropped"]).any():
        expected.add("dropped")
    assert shown == expected
