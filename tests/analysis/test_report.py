"""Reports have what applies to the model. Rows of `analysis/figures.py` are whole."""

import html
import inspect
import re

import keras
import numpy as np
import pytest

from keras_softmoe import files, layers, routers
from keras_softmoe.analysis import Routing, analyze, report
from keras_softmoe.analysis.figures import FIGURES
from tests.support import made_up, pairs, soft_blocks, tiny
from tests.support.reading import Reading

ALL = ["Load and specialization"]
SOFT, PAIRS, EXAMPLES = "Weights of tokens and slots", "Images and text", "Examples"


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Callable from a routing to the `Reading` of its report, with coarse figures."""
    monkeypatch.setattr(report, "_DPI", 20)

    def write(routing, **kwargs):
        path = routing.save(tmp_path / "report.html", **kwargs)
        text = path.read_text(encoding="utf-8")
        assert f"<pre>{html.escape(repr(routing))}</pre>" in text
        assert path.stat().st_mode & 0o777 == 0o644
        found = Reading(path)
        # An empty icon, and no other file.
        assert found.references == ["data:,"]
        assert len(found.images) == len(found.captions)
        assert all(image.startswith(b"\x89PNG") for image in found.images)
        return found

    return write


def test_soft_classifier(save):
    router = routers.SoftRouter(3, slots_per_expert=2)
    model = tiny.classifier(moe_layers=(0, 1), router=router)
    routing = analyze(model, tiny.pixels(5), tiny.labels(5), num_pictures=1, verbose=0)
    found = save(routing, class_names="abc")
    assert found.title == "How ViTMoEImageClassifier routes"
    assert found.headings == [*ALL, SOFT, EXAMPLES]
    # Load, position, class; six of weights, slots; two blocks twice.
    assert len(found.images) == 3 + 6 + 4
    with pytest.raises(ValueError, match="`class_names`.*Received: 1 names"):
        save(routing, class_names="a")


def test_sparse_backbone(save):
    backbone = tiny.backbone(router=tiny.SPARSE, group_images=2)
    routing = analyze(backbone, tiny.images(5), num_pictures=1, verbose=0)
    found = save(routing, title="My <title>")
    assert found.title == "My <title>"
    assert found.headings == [*ALL, EXAMPLES]
    # Experts of one block, and the patches that they take in place of slots.
    assert len(found.captions) == 6
    assert sum("slots" in caption for caption in found.captions) == 0
    assert sum("block 1: The patches that" in text for text in found.captions) == 1


def test_a_model_of_ones_own(save):
    x = inputs = keras.Input((4, 6))
    x = layers.SoftMoE(2, 8, name="mixed")(x)
    uniform = routers.SoftRouter(2, dispatch="uniform", combine="uniform")
    x = layers.MoE(uniform, 8, name="uniform")(x)
    choosing = routers.SoftmaxTokenChoiceRouter(2, capacity_factor=0.5)
    x = layers.MoE(choosing, 8, name="choosing")(x)
    model = keras.Model(inputs, x, name="my_model")
    data = np.random.default_rng(0).normal(size=(3, 4, 6)).astype("float32")
    found = save(analyze(model, data, verbose=0))
    assert found.title == "How my_model routes"
    assert found.headings == [*ALL, SOFT]
    unnamed = keras.Model(inputs, model.get_layer("uniform")(inputs))
    assert save(analyze(unnamed, data, verbose=0)).title == "How this model routes"


def test_limoe(save):
    captions = pairs.token_ids()
    routing = analyze(
        *(pairs.limoe(), pairs.images()), captions=captions, num_pictures=2, verbose=0
    )
    found = save(routing)
    assert found.headings == [*ALL, PAIRS, EXAMPLES]
    # Load, five by modality; of two blocks experts, examples, and each pair.
    assert len(found.images) == 1 + 5 + 4 + 4


def test_an_older_file_is_replaced_when_the_page_is_complete(monkeypatch, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("before")
    routing = made_up.routing(soft=soft_blocks.statistics())

    def broken(*arguments):
        assert path.read_text() == "before"
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", broken)
        with pytest.raises(OSError, match="no space"):
            routing.save(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


# === The table of figures ===


# What the papers draw of the routing of one model.
OF_PAPERS = {
    "V-MoE": {4, 7, 29, 30, 31, 32},
    "Soft MoE": {24, 25, 26, 27, 28, 29, 30},
    "LIMoE": {10, 13, *range(17, 33), *range(32, 41)},
}


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_is_described(name):
    row = FIGURES[name]
    assert row.part in Routing._fields[:4]
    assert row.caption.endswith(".") and row.source
    first, *options = inspect.signature(row.draw).parameters.values()
    assert first.name == ("maps" if row.is_of_one_block else "blocks")
    # They can be left out.
    assert all(option.default is not option.empty for option in options)
    assert row.options == tuple(option.name for option in options)


def test_the_figures_of_the_papers():
    found = {paper: set() for paper in OF_PAPERS}
    for row in FIGURES.values():
        for part in row.source.split("; "):
            (paper,) = (name for name in found if re.search(rf"\b{name},", part))
            for low, high in re.findall(r"(\d+)(?: to (\d+))?", part):
                found[paper] |= set(range(int(low), int(high or low) + 1))
    found["V-MoE"].discard(5)
    assert found == OF_PAPERS
