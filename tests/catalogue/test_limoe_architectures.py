"""LIMoE's presets without weights: as the paper's tables and appendices have them.

Covers LIMoE's part of `catalogue/unreleased.py`.
"""

import functools
import json
import math

import pytest

from keras_softmoe import catalogue, datasets, models, ops, presets
from keras_softmoe.evaluation import cost
from tests.support import tiny

NAMES = [n for n in catalogue.names_of_kind("architecture") if n.startswith("limoe")]


@functools.cache
def all_metadata():
    return {name: catalogue.read_metadata(name) for name in NAMES}


def twins():
    found = all_metadata().items()
    return {name: m["dense_twin"] for name, m in found if m["dense_twin"]}


def arguments(name):
    return catalogue.read_config(name)[1]


def router(name):
    return arguments(name)["router"]


def test_every_row_is_there():
    sizes = {"S/32", "S/16", "B/32", "B/16", "L/32", "L/16", "H/14"}
    rows = [m["published"]["row"] for m in all_metadata().values() if "published" in m]
    expected = {f"table 4, LIMoE {size}" for size in sizes}
    expected |= {f"table 4, Dense {size}" for size in sizes - {"H/14"}}
    assert len(rows) == 13 and set(rows) == expected
    # H/14 has a twin here, though none in the paper.
    assert len(twins()) == 7 and all_metadata().keys() == twins().keys() | set(
        twins().values()
    )
    # Sparse is better than dense, throughout the table.
    for name, twin in twins().items():
        results, of_twin = (
            all_metadata()[name]["published"],
            all_metadata()[twin].get("published"),
        )
        for key in of_twin or ():
            assert key == "row" or results[key] > of_twin[key]


def test_what_all_have_in_common():
    for name in all_metadata():
        own = arguments(name)
        assert (own["vocabulary_size"], own["sequence_length"]) == (32_000, 16)
        assert (own["embedding_dim"] == 512) == ("huge" not in name)
        size = 294 if "huge" in name else 224
        assert name.endswith(f"_{size}") and own["image_shape"] == (size, size, 3)
        assert "texts of 16 tokens" in all_metadata()[name]["description"]
        assert all_metadata()[name]["tasks"] == ["ContrastiveTask"]


def test_blocks_with_experts():
    for name in twins():
        own = arguments(name)
        if "huge" in name:
            # Counted from 0; appendix G speaks of layers 6, 14 and 31.
            assert own["moe_layers"] == (2, 6, 10, 14, 17, 20, 23, 25, 27, 29, 30, 31)
            assert own["num_layers"] == 32
        else:
            assert own["moe_layers"] == tuple(range(1, own["num_layers"], 2))
        assert own["group_images"] == 32


def test_routers():
    soft_minima = {}
    for name in twins():
        found = router(name)
        assert (found.num_experts, found.num_selected_experts) == (32, 1)
        assert found.loss_weight == 0.04
        assert [loss.function for loss in found.routing_losses] == [
            ops.importance_loss,
            ops.load_loss,
            ops.z_loss,
            ops.local_entropy_loss,
            ops.global_entropy_loss,
            ops.global_entropy_loss,
        ]
        of_text, of_image = found.routing_losses[-2:]
        assert (of_text.modality, of_image.modality) == ("text", "image")
        minima = [math.exp(loss.threshold) for loss in (of_text, of_image)]
        published = all_metadata()[name]["published"]
        expected = [published["text_experts"], published["image_experts"]]
        assert minima == pytest.approx(expected)
        soft_minima[name.split("_32e")[0]] = tuple(expected)
    assert soft_minima == {
        "limoe_small_patch32": (12, 17),
        "limoe_small_patch16": (9, 20),
        "limoe_base_patch32": (12, 17),
        "limoe_base_patch16": (9, 20),
        "limoe_large_patch32": (20, 1),
        "limoe_large_patch16": (28, 8),
        "limoe_huge_patch14": (4, 25),
    }


def test_experts_cost_parameters_but_hardly_operations():
    # "K = 1 expert per token to match the cost of a dense backbone" (appendix E.1)
    for name, twin in twins().items():
        own, of_twin = cost(name), cost(twin)
        assert 1.0 < own.gflop_per_image / of_twin.gflop_per_image < 1.05
        shape = arguments(name)
        width, hidden = shape["hidden_dim"], shape["mlp_dim"]
        layers = len(shape["moe_layers"])
        of_expert = 2 * width * hidden + width + hidden
        more = layers * (31 * of_expert + 32 * width)
        assert own.parameters - of_twin.parameters == more


@pytest.fixture
def small(tmp_path):
    """Callable from the name of a preset to a copy that describes a small model."""

    def copy(name):
        file = tmp_path / name / "config.json"
        presets.write(name, file.parent)
        saved = json.loads(file.read_text(encoding="utf-8"))
        saved["config"] |= {**tiny.SIZES, "num_layers": 1, "vocabulary_size": 90}
        if name in twins():
            saved["config"]["moe_layers"] = [0]
        file.write_text(json.dumps(saved), encoding="utf-8")
        return str(file.parent)

    return copy


@pytest.mark.parametrize(
    "name", ["limoe_dense_base_patch16_224", "limoe_huge_patch14_32e_294"]
)
def test_presets_can_be_loaded(name, small):
    # As the card says, with another vocabulary
    preset = small(name)
    captions = ["a red circle", "two blue stars", "a green ring above a heart"]
    proto = datasets.train_vocabulary(captions * 5, vocabulary_size=90)
    converter = models.ViTMoEImageConverter.from_preset(name)
    assert converter.image_size == (int(name[-3:]),) * 2
    model = models.LIMoEContrastive.from_preset(
        preset,
        load_weights=False,
        preprocessor=models.LIMoEPreprocessor(models.LIMoETokenizer(proto), converter),
    )
    assert cost(preset).parameters == model.count_params()
    assert model.encode_text(captions).shape == (3, arguments(name)["embedding_dim"])
    with pytest.raises(ValueError, match="never released"):
        models.LIMoEContrastive.from_preset(name)
