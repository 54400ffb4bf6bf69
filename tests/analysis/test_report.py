"""Reports have what applies to the model, with its numbers."""

import keras
import numpy as np
import pytest

from keras_softmoe import evaluation, layers, routers
from keras_softmoe.analysis import analyze, page
from tests.support import pairs, tiny
from tests.support.reading import Reading

ALL = ["Model", "Routers", "Load and specialization"]
SOFT, PAIRS, PICTURES = "Weights of tokens and slots", "Images and text", "Pictures"


@pytest.fixture(autouse=True)
def coarse_figures(monkeypatch):
    """What they show is tested elsewhere."""
    monkeypatch.setattr(page, "_RESOLUTIONS", (20,))


@pytest.fixture
def report(tmp_path):
    """Callable from a routing to the `Reading` of its report."""

    def write(routing, **kwargs):
        path = routing.save(tmp_path / "report.html", **kwargs)
        found = Reading(path)
        assert all(
            reference[:5] in ("data:", "#sect") for reference in found.references
        )
        assert len(found.images) == len(found.captions)
        return found

    return write


def test_soft_classifier(report):
    router = routers.SoftRouter(3, slots_per_expert=2)
    model = tiny.classifier(moe_layers=(0, 1), router=router)
    routing = analyze(model, tiny.pixels(5), tiny.labels(5), num_pictures=1, verbose=0)
    found = report(routing)
    assert found.title == "How ViTMoEImageClassifier routes"
    assert found.headings == [*ALL, SOFT, PICTURES]
    model_table, router_table, load_table, information_table, soft_table = found.tables
    assert model_table[1] == ["model", "ViTMoEImageClassifier"]
    assert ["parameters", f"{model.count_params():,}"] in model_table
    gflop = evaluation.cost(model).gflop_per_image
    assert ["GFLOP for an image (or a pair)", f"{gflop:.3g}"] in model_table
    settings = (
        "slots_per_expert=2, dispatch=soft, combine=soft, normalize=True, "
        "initial_scale=1"
    )
    assert router_table[1:] == [["block 0, block 1", "SoftRouter", "3", settings]]
    for block in (0, 1):
        load, soft = routing.blocks[block], routing.soft[block]
        information = load.information
        assert information_table[1 + block] == [
            f"block {block}",
            f"{information.entropy:.2f} bits (even 1.58)",
            f"{100 * information.position_share:.1f}%",
            f"{100 * information.label_share:.1f}%",
        ]
        # A soft router has no demand beside the load.
        row = [f"block {block}", "25", "0%", f"{load.imbalance:.2f}×", "", "3 of 3"]
        assert load_table[1 + block] == row
        contribution = soft.expert_contribution
        assert soft_table[1 + block] == [
            f"block {block}",
            f"{100 * soft.dispatch_peak:.3g}% (even 20%)",
            f"{soft.dispatch_sharpness:.2f}×",
            f"{soft.dispatch.needed(0.9)} of 5 (even 5)",
            f"{100 * soft.combine_peak:.3g}% (even 16.7%)",
            f"{soft.combine_sharpness:.2f}×",
            f"{soft.combine.needed(0.9)} of 6 (even 6)",
            f"{contribution.argmax()} and {contribution.argmin()}, "
            f"{contribution.max() / contribution.min():.3g}× apart",
        ]
    # Load, position, class; six of weights, slots; two blocks twice.
    assert len(found.images) == 3 + 6 + 4


def test_sparse_backbone(report):
    backbone = tiny.backbone(router=tiny.SPARSE, group_images=2)
    routing = analyze(backbone, tiny.images(5), verbose=0)
    found = report(routing, title="My <title>")
    assert found.title == "My <title>"
    assert found.headings == ALL
    (block,) = routing.blocks.values()
    assert block.dropped > 0
    dropped = f"{100 * block.dropped:.3g}%"
    assert found.tables[2][1][:3] == ["block 1", "25", dropped]
    assert len(found.images) == 4
    # Without labels nothing about classes.
    assert found.tables[3][0][-1] == "explained by position"
    share = f"{100 * block.information.position_share:.1f}%"
    assert found.tables[3][1][-1] == share
    # Experts of one block, and the patches that they take in place of slots.
    routing = analyze(backbone, tiny.images(5), num_pictures=1, verbose=0)
    captions = report(routing).captions
    assert len(captions) == 6
    assert sum("slots" in caption for caption in captions) == 0
    assert sum("block 1: The patches that" in caption for caption in captions) == 1


def test_names_of_classes(report):
    routing = analyze(tiny.classifier(), tiny.pixels(4), tiny.labels(4), verbose=0)
    report(routing, class_names="abc")
    with pytest.raises(ValueError, match="`class_names`.*Received: 1 names"):
        report(routing, class_names="a")


def test_a_model_of_ones_own(report):
    x = inputs = keras.Input((4, 6))
    x = layers.SoftMoE(2, 8, name="mixed")(x)
    uniform = routers.SoftRouter(2, dispatch="uniform", combine="uniform")
    x = layers.MoE(uniform, 8, name="uniform")(x)
    choosing = routers.SoftmaxTokenChoiceRouter(2, capacity_factor=0.5)
    x = layers.MoE(choosing, 8, name="choosing")(x)
    model = keras.Model(inputs, x, name="my_model")
    data = np.random.default_rng(0).normal(size=(3, 4, 6)).astype("float32")
    found = report(analyze(model, data, verbose=0))
    assert found.title == "How my_model routes"
    assert found.tables[0][1] == ["model", "Functional my_model"]
    assert found.headings == [*ALL, SOFT]
    assert [row[0] for row in found.tables[2][1:]] == ["mixed", "uniform", "choosing"]
    assert float(found.tables[2][3][2].rstrip("%")) > 0
    assert [row[0] for row in found.tables[3][1:]] == ["mixed", "uniform"]
    unnamed = keras.Model(inputs, model.get_layer("uniform")(inputs))
    found = report(analyze(unnamed, data, verbose=0))
    assert found.title == "How this model routes"
    assert found.headings == [*ALL, SOFT]


@pytest.mark.parametrize("captions", [None, "given"])
def test_limoe(report, captions):
    captions = None if captions is None else pairs.token_ids()
    routing = analyze(
        *(pairs.limoe(), pairs.images()),
        captions=captions,
        num_pictures=2,
        verbose=0,
    )
    found = report(routing)
    assert found.headings == [*ALL, PAIRS, PICTURES]
    rows = [
        [
            f"block {block}",
            name,
            f"{s.num_tokens[name]:,}",
            f"{100 * s.dropped[name]:.3g}%",
            f"{s.experts_needed(0.9)[name]} of 4 (even 4)",
        ]
        for block, s in routing.modalities.items()
        for name in s.num_tokens
    ]
    assert found.tables[3][1:] == rows
    assert len(rows) == (2 if captions is None else 4)
    assert "losses=ImportanceLoss() + " in found.tables[1][1][3]
    assert "registered_name" not in found.tables[1][1][3]
    # Load, five by modality; of two blocks experts, examples, and each pair.
    assert len(found.images) == 1 + 5 + 4 + (0 if captions is None else 4)
