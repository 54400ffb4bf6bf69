"""Reports have what applies to the model, with its numbers."""

import keras
import numpy as np
import pytest

from keras_softmoe import analysis, evaluation, layers, routers
from keras_softmoe.analysis import _page as page
from keras_softmoe.analysis import routing_report
from tests.analysis import pairs
from tests.analysis.reading import Reading
from tests.models import tiny

ALL = ["Model", "Routers", "Load"]
PATCHES = ["Images", "Specialization"]
SOFT = ["What tokens give and slots take", "How alike slots are"]
MODALITIES = [
    "Load by modality",
    "Confidence and priority",
    "Paths through the model",
    "Examples",
]


@pytest.fixture(autouse=True)
def coarse_figures(monkeypatch):
    """What they show is tested elsewhere."""
    monkeypatch.setattr(page, "_RESOLUTIONS", (20,))


@pytest.fixture
def report(tmp_path):
    """Callable from a model and data to the `Reading` of its report."""

    def write(model, images, **kwargs):
        path = routing_report(
            model, images, tmp_path / "report.html", verbose=0, **kwargs
        )
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
    images = tiny.pixels(5)
    found = report(model, images, labels=tiny.labels(5), num_pictures=1)
    assert found.title == "How ViTMoEImageClassifier routes"
    assert found.headings == [*ALL, *PATCHES, *SOFT]
    model_table, router_table, load_table, told_table, soft_table = found.tables
    assert model_table[1] == ["model", "ViTMoEImageClassifier"]
    assert ["parameters", f"{model.count_params():,}"] in model_table
    gflop = evaluation.cost(model).gflop_per_image
    assert ["GFLOP for an image (or a pair)", f"{gflop:.3g}"] in model_table
    settings = (
        "slots_per_expert=2, dispatch=soft, combine=soft, normalize=True, "
        "initial_scale=1"
    )
    assert router_table[1:] == [["block 0, block 1", "SoftRouter", "3", settings]]
    statistics = analysis.soft_statistics(model, images, verbose=0)
    load = analysis.expert_load(model, images, verbose=0)
    told = analysis.expert_information(model, images, tiny.labels(5), verbose=0)
    for block in (0, 1):
        assert told_table[1 + block] == [
            f"block {block}",
            f"{told[block].entropy:.2f} bits (even 1.58)",
            f"{100 * told[block].position_share:.1f}%",
            f"{100 * told[block].label_share:.1f}%",
        ]
        row = [f"block {block}", "25", "0%", f"{load[block].imbalance:.2f}×"]
        assert load_table[1 + block] == row
        contribution = statistics[block].expert_contribution
        assert soft_table[1 + block] == [
            f"block {block}",
            f"{100 * statistics[block].dispatch_peak:.3g}% (even 20%)",
            f"{statistics[block].dispatch_sharpness:.2f}×",
            f"{statistics[block].dispatch.needed(0.9)} of 5 (even 5)",
            f"{100 * statistics[block].combine_peak:.3g}% (even 16.7%)",
            f"{statistics[block].combine_sharpness:.2f}×",
            f"{statistics[block].combine.needed(0.9)} of 6 (even 6)",
            f"{contribution.argmax()} and {contribution.argmin()}, "
            f"{contribution.max() / contribution.min():.3g}× apart",
        ]
    # Load, two blocks twice, position, class, five of weights, slots.
    assert len(found.images) == 1 + 4 + 2 + 5 + 1


def test_sparse_backbone(report):
    backbone = tiny.backbone(router=tiny.SPARSE, group_images=2)
    images = tiny.images(5)
    found = report(backbone, images, title="My <title>", num_pictures=0)
    assert found.title == "My <title>"
    assert found.headings == [*ALL, "Choices", "Specialization"]
    (statistics,) = analysis.routing_statistics(backbone, images, verbose=0).values()
    assert statistics.dropped > 0
    assert found.tables[2][1][:3] == [
        "block 1",
        "25",
        f"{100 * statistics.dropped:.3g}%",
    ]
    assert len(found.images) == 4
    # Without labels nothing about classes.
    (told,) = analysis.expert_information(backbone, images, verbose=0).values()
    assert found.tables[3][0][-1] == "explained by position"
    assert found.tables[3][1][-1] == f"{100 * told.position_share:.1f}%"
    # Experts of one block, and the patches that they take in place of slots.
    captions = report(backbone, images, num_pictures=1).captions
    assert len(captions) == 6
    assert sum("slots" in caption for caption in captions) == 0
    assert sum("busiest experts of block 1" in caption for caption in captions) == 1


def test_identity_chooses_nothing(report):
    router = routers.IdentityRouter(4)
    backbone = tiny.backbone(router=router, pooling="gap")
    found = report(backbone, tiny.images(2), num_pictures=1)
    assert found.headings == [*ALL, *PATCHES]


def test_dense(report):
    found = report(tiny.classifier(**tiny.DENSE), tiny.pixels(2))
    assert found.headings == ["Model", "Routing"]
    assert found.images == []


def test_a_model_of_ones_own(report):
    x = inputs = keras.Input((4, 6))
    x = layers.SoftMoE(2, 8, name="mixed")(x)
    uniform = routers.SoftRouter(2, dispatch="uniform", combine="uniform")
    x = layers.MoE(uniform, 8, name="uniform")(x)
    choosing = routers.SoftmaxTokenChoiceRouter(2, capacity_factor=0.5)
    x = layers.MoE(choosing, 8, name="choosing")(x)
    model = keras.Model(inputs, x, name="my_model")
    data = np.random.default_rng(0).normal(size=(3, 4, 6)).astype("float32")
    found = report(model, data, batch_size=3)
    assert found.title == "How my_model routes"
    assert found.tables[0][1] == ["model", "Functional my_model"]
    assert found.headings == [*ALL, *SOFT]
    assert [row[0] for row in found.tables[2][1:]] == ["mixed", "uniform", "choosing"]
    assert float(found.tables[2][3][2].rstrip("%")) > 0
    assert [row[0] for row in found.tables[3][1:]] == ["mixed", "uniform"]
    found = report(keras.Model(inputs, model.get_layer("uniform")(inputs)), data)
    assert found.title == "How this model routes"
    assert found.headings == [*ALL, SOFT[0]]


@pytest.mark.parametrize("captions", [None, "given"])
def test_limoe(report, captions):
    backbone = pairs.limoe()
    captions = None if captions is None else pairs.token_ids()
    images = pairs.images()
    found = report(backbone, images, captions=captions, num_pictures=2)
    assert found.headings == [*ALL[:2], *MODALITIES]
    statistics = analysis.modality_statistics(backbone, images, captions, verbose=0)
    rows = [
        [
            f"block {block}",
            name,
            f"{s.num_tokens[name]:,}",
            f"{100 * s.dropped[name]:.3g}%",
            f"{s.experts_needed(0.9)[name]} of 4 (even 4)",
        ]
        for block, s in statistics.items()
        for name in s.num_tokens
    ]
    assert found.tables[2][1:] == rows
    assert len(rows) == (2 if captions is None else 4)
    assert "losses=ImportanceLoss() + " in found.tables[1][1][3]
    assert "registered_name" not in found.tables[1][1][3]
    # Pairs only where there are captions.
    assert len(found.images) == (6 if captions is None else 8)


def test_limoe_whose_tokens_are_mixed(report):
    backbone = pairs.limoe(routers.SoftRouter(3), moe_layers=(1,))
    arguments = {"captions": pairs.token_ids(), "batch_size": 2}
    found = report(backbone, pairs.images(), **arguments)
    assert found.headings == [*ALL, *SOFT]
    # Three pairs of seven tokens.
    assert found.tables[2][1][:2] == ["block 1", "21"]
    with pytest.raises(ValueError, match="Received: captions=None"):
        report(backbone, pairs.images())
