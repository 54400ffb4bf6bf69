"""Metadata of trained presets, and the record of their trainings."""

import json

import pytest
from huggingface_hub import ModelCard

from experiments.glyph_presets import TWINS
from experiments.lib import cards
from experiments.limoe_presets import NAMES
from keras_softmoe import catalogue, presets

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


def test_runs_are_written_one_a_line(tmp_path):
    runs = [{"seed": 0, "minutes": 3.5}, {"seed": 1, "minutes": 4.0}]
    cards.write_runs(tmp_path / "made" / "runs.json", runs)
    text = (tmp_path / "made" / "runs.json").read_text()
    assert json.loads(text) == runs
    assert len(text.splitlines()) == 4


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


def test_a_card_gets_its_head_once(tmp_path):
    name = TWINS["soft"].name
    directory = presets.describe(name).path
    for file in ("config.json", "metadata.json"):
        (tmp_path / file).write_bytes((directory / file).read_bytes())
    for _ in range(2):
        cards.write_card(tmp_path, name, "# Title\n\n---\n\nText")
        text = (tmp_path / cards.CARD).read_text(encoding="utf-8")
        again = cards.with_front_matter(tmp_path, name, text)
        assert text == again and text.endswith("\n---\n\n# Title\n\n---\n\nText\n")
