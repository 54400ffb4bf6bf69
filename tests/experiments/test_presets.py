"""Trained presets: the programs that train them, cards, records, uploads."""

import json

import keras
import pytest
from huggingface_hub import ModelCard

from experiments import glyph_presets, limoe_presets
from experiments.glyph_presets import TWINS
from experiments.lib import cards
from experiments.limoe_presets import NAMES
from keras_softmoe import catalogue, models, presets

# Those that an earlier form of the script trained saw fewer images.
IMAGES = glyph_presets.EPOCHS * glyph_presets.EPOCH_IMAGES
ROUTERS = {
    twin.name: twin.router
    for twin in glyph_presets.TWINS.values()
    if twin.router
    and catalogue.read_metadata(twin.name)["training"]["images"] == IMAGES
}


def settings(router):
    """Its configuration but for the name."""
    return {**router.get_config(), "name": None}


def saved_router(preset):
    _, config = catalogue.read_config(preset)
    return keras.saving.deserialize_keras_object(config["router"])


@pytest.mark.parametrize("preset", ROUTERS)
def test_glyph_presets(preset):
    assert settings(ROUTERS[preset]) == settings(saved_router(preset))


def test_limoe_preset():
    router = limoe_presets.build("limoe").backbone.router
    assert settings(router) == settings(saved_router(limoe_presets.NAMES["limoe"]))


def test_a_glyph_preset_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(glyph_presets, "WORK", tmp_path)
    monkeypatch.setattr(glyph_presets, "EPOCH_IMAGES", 128)
    monkeypatch.setattr(glyph_presets, "VALIDATION_IMAGES", 64)
    glyph_presets.main(["--only", "soft", "--epochs", "1", "--output", str(tmp_path)])
    directory = tmp_path / glyph_presets.TWINS["soft"].name
    assert models.ViTMoEImageClassifier.from_preset(str(directory)).count_params() > 1e6
    assert "Accuracy:\n\n- glyphs, center: 0." in (directory / "README.md").read_text()


TRAINED = [*(twin.name for twin in TWINS.values()), *NAMES.values()]


@pytest.mark.parametrize("name", TRAINED)
def test_metadata_are_those_of_the_first_training(name):
    """The wheel carries the accuracies, the repository the whole record."""
    metadata = catalogue.read_metadata(name)
    first = cards.read_runs(name)[0]
    assert first["seed"] == metadata["training"]["seed"]
    assert cards.measured(first).items() <= metadata.items()
    assert "runs" not in metadata
    assert len(json.dumps(metadata)) < 3_000


@pytest.mark.parametrize("name", TRAINED)
def test_hubs_read_the_card(name):
    directory, metadata = presets.describe(name).path, catalogue.read_metadata(name)
    card = ModelCard.load(directory / cards.CARD)
    assert card.text.lstrip().startswith(f"# {name}\n")
    head = card.data
    is_limoe = name.startswith("limoe")
    assert (head.library_name, head.license) == ("keras-hub", "apache-2.0")
    prefix = "zero-shot-" if is_limoe else ""
    assert head.pipeline_tag == f"{prefix}image-classification"
    is_dense = name.startswith(("vit_", "limoe_dense"))
    assert ("mixture-of-experts" in head.tags) != is_dense
    data = "synthetic-captioned-shapes" if is_limoe else "synthetic-glyphs"
    assert head.datasets == [data]
    # All that was measured, and nothing else.
    assert head.model_name == name
    assert len(head.eval_results) == len(metadata["accuracy"])
    for measure, value in metadata["accuracy"].items():
        on, _, how = measure.partition(", ")
        deviation = metadata["accuracy_std"].get(measure)
        spread = f", mean, standard deviation {deviation:.4f}" if deviation else ""
        (result,) = (
            result
            for result in head.eval_results
            if on in result.dataset_name
            and result.metric_name == f"accuracy, {how}{spread}"
        )
        assert result.metric_value == pytest.approx(value, abs=5e-5)
        assert result.task_type == head.pipeline_tag
        assert result.metric_type == "accuracy"
