"""Metadata of trained presets, and the record of their trainings."""

import json

import pytest

from experiments.glyph_presets import TWINS
from experiments.lib import cards
from experiments.limoe_presets import NAMES
from keras_softmoe import catalogue

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
