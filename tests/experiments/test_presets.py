"""Trained presets: the programs that train them, cards, records, uploads."""

import json
import types
from pathlib import Path

import huggingface_hub
import keras
import pytest
from huggingface_hub import ModelCard

from experiments import glyph_presets, limoe_presets, upload_presets
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


def test_measured():
    run = {
        "upstream_accuracy": 0.5,
        "upstream_accuracy_by_layout": {"center": 0.6, "anywhere": 0.4},
        "few_shot": {"model": {"5": [0.7, 0.9]}, "raw pixels": {"5": [0.1]}},
        "fine_tuned": [1.0, 0.9],
        "fine_tuning_seconds": [3.0],
    }
    found = cards.measured(run)
    assert found["accuracy"] == pytest.approx(
        {
            "glyphs, both layouts": 0.5,
            "glyphs, center": 0.6,
            "glyphs, anywhere": 0.4,
            "digits, few-shot, 5 of a class": 0.8,
            "digits, fine-tuned": 0.95,
        }
    )
    assert found["accuracy_std"] == pytest.approx(
        {
            "digits, few-shot, 5 of a class": 0.1 * 2**0.5,
            "digits, fine-tuned": 0.05 * 2**0.5,
        }
    )
    del run["upstream_accuracy_by_layout"]
    assert cards.measured(run)["accuracy"]["glyphs, center"] == 0.5
    run = {"zero_shot_new_of_64": 0.2, "image_to_text_recall_at_1": 0.3}
    assert cards.measured(run) == {
        "accuracy": {"scenes, new combinations, of 64 names": 0.2},
        "accuracy_std": {},
    }


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


NAME = "vit_tiny_patch4_32_glyphs"


@pytest.fixture
def sent(monkeypatch):
    """Dict from each address to the card there, on a hub that stands in for one.

    KerasHub uploads as it is, up to the calls of the hub's own client.
    """
    sent = {}

    def create(repo_id, exist_ok):
        return types.SimpleNamespace(repo_id=repo_id)

    def file_exists(repo_id, filename):
        return (repo_id, filename) in sent

    def upload_file(path_or_fileobj, path_in_repo, repo_id):
        sent[repo_id, path_in_repo] = path_or_fileobj.read_text(encoding="utf-8")

    def upload_folder(repo_id, folder_path):
        for file in Path(folder_path).glob("*.[mj][ds]*"):
            upload_file(file, file.name, repo_id)

    monkeypatch.setattr(huggingface_hub, "create_repo", create)
    for function in (file_exists, upload_file, upload_folder):
        monkeypatch.setattr(huggingface_hub, function.__name__, function)
    return sent


def test_nothing_is_sent_by_default(sent, capsys):
    upload_presets.main(["hf://someone"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(catalogue.names_of_kind("trained")) + 1
    assert lines[-1].startswith("Nothing was sent") and not sent


def test_what_is_sent_has_the_card_of_the_preset(sent):
    path = presets.describe(NAME).path
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    upload_presets.main(["hf://someone/", "--presets", NAME, "--yes"])
    card = before["README.md"].decode("utf-8")
    assert sent[f"someone/{NAME}", "README.md"] == card
    assert (f"someone/{NAME}", "config.json") in sent
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("hub", ["someone", "hf://", "ftp://someone"])
def test_unknown_hub(hub):
    with pytest.raises(ValueError, match="Give the hub and the user"):
        upload_presets.upload(NAME, hub)
