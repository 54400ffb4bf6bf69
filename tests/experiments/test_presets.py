"""Trained presets: the programs that train them, cards, records, uploads."""

import json

import keras
import pytest
from huggingface_hub import ModelCard

from experiments.icons import bank as banks, models as icons, presets as program
from experiments.letters import presets as of_letters
from experiments.lib import cards
from keras_softmoe import catalogue, models, presets
from tests.experiments.test_icon_study import small_bank

KINDS = icons.kinds(icons.SIZES["small"])
TRAINED = catalogue.names_of_kind("trained")


def settings(router):
    """Its configuration but for the name."""
    return router and {**router.get_config(), "name": None}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_presets_of_icons(kind):
    _, config = catalogue.read_config(kind.name)
    saved = keras.saving.deserialize_keras_object(config["router"])
    assert settings(kind.router) == settings(saved)


@pytest.mark.parametrize(
    "kind, cls, says",
    [
        ("soft", models.ViTMoEImageClassifier, "among 27 concepts: 0."),
        ("limoe", models.LIMoEContrastive, "| 0 | 10 | "),
    ],
)
def test_a_preset_is_trained(kind, cls, says, tmp_path, monkeypatch):
    monkeypatch.setattr(icons, "VOCABULARY_SIZE", 85)
    small = icons.SIZES["small"]._replace(batch_size=16)
    monkeypatch.setitem(icons.SIZES, "small", small)
    banks.write(small_bank(), tmp_path / "bank.npz")
    places = [f"--{name}={tmp_path / name}" for name in ("work", "output")]
    places += [f"--records={tmp_path / 'trained.json'}", f"--bank={tmp_path}/bank.npz"]
    program.main(["--only", kind, "--epochs", "1", "--steps", "2", *places])
    directory = tmp_path / "output" / KINDS[kind].name
    assert cls.from_preset(str(directory)).count_params() > 1e6
    assert says in (directory / cards.CARD).read_text(encoding="utf-8")
    assert cards.read_runs(directory.name, tmp_path / "trained.json")[0]["seed"] == 0


@pytest.mark.parametrize("name", TRAINED)
def test_metadata_are_those_of_the_first_training(name):
    """The wheel carries the accuracies, the repository the whole record."""
    metadata = catalogue.read_metadata(name)
    first = cards.read_runs(name)[0]
    assert first["seed"] == metadata["training"]["seed"]
    of = of_letters if name.endswith("letters") else program
    assert of.accuracies(first).items() <= metadata.items()
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
    on_letters = name.endswith("letters")
    data = "synthetic-letters" if on_letters else "icons-of-open-sets"
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
