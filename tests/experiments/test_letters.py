"""The study on letters: data, models, trainings that go on, answers, presets."""

import dataclasses

import numpy as np
import pytest

import keras_softmoe as ksm
from experiments.letters import __main__ as program, presets
from experiments.letters.bank import NEW_FONTS, SPLITS, load_bank
from experiments.letters.models import MODELS, SMOKE, STUDY, VIEWS, count
from experiments.letters.pictures import PLACEMENTS, Letters
from experiments.letters.trainings import gather, names_of, training
from experiments.lib.cards import read_metadata
from experiments.lib.runs import finish


@pytest.fixture(scope="module")
def bank(tmp_path_factory):
    directory = tmp_path_factory.mktemp("letters")
    made = load_bank(directory, SMOKE.candidates)
    read = load_bank(directory, SMOKE.candidates)
    assert all(np.array_equal(*pair) for pair in zip(made, read, strict=True))
    return made


def test_splits(bank):
    assert bank.num_classes == len(bank.characters) - bank.new.sum() == 15
    rows, labels = zip(*map(bank.rows, SPLITS), strict=True)
    assert len(np.unique(np.concatenate(rows))) == sum(map(len, rows))
    trained = rows[0]
    assert not set(bank.fonts[bank.font[trained]]) & set(NEW_FONTS)
    assert set(bank.fonts[bank.font[rows[1]]]) == set(NEW_FONTS)
    assert not bank.new[bank.label[trained]].any()
    assert bank.new[bank.label[rows[2]]].all()
    for of_split, number in zip(labels, (15, 15, 5), strict=True):
        assert list(np.unique(of_split)) == list(range(number))


def test_costs():
    costs = {name: count(STUDY, model, 2600) for name, model in MODELS.items()}
    dense = costs["dense"]["training_gflop"]
    ratios = {name: cost["training_gflop"] / dense for name, cost in costs.items()}
    assert ratios["random"] == ratios["vmoe"]
    assert ratios["soft_1"] == ratios["soft_5"] == ratios["soft"]
    assert ratios["longer"] == pytest.approx(STUDY.longer)
    sparse = ("vmoe_5", "vmoe", "expert", "position")
    assert all(1 < ratios[name] < 1.05 for name in sparse)
    # Each slot is a product with each token, twice.
    assert 1.05 < ratios["soft"] < 1.07
    wide = costs["wide"]["parameters"] / costs["vmoe"]["parameters"]
    assert wide == pytest.approx(1, abs=0.02) and ratios["wide"] > 3


@pytest.fixture(scope="module")
def finished(bank, tmp_path_factory):
    """Directory and results of trainings with a seed, one of them interrupted."""
    directory = tmp_path_factory.mktemp("trainings")
    letters = {name: Letters(bank, name) for name in PLACEMENTS}
    # At random, so that the state of its generator has to be kept.
    run = training(SMOKE, letters, "anywhere_random", 0)

    def interrupted(epoch):
        if epoch:
            raise KeyboardInterrupt
        return run.draw(epoch)

    with pytest.raises(KeyboardInterrupt):
        finish(dataclasses.replace(run, draw=interrupted), directory)
    # It was saved after the first epoch.
    assert list((directory / "backup").rglob("*.h5"))
    names = ["anywhere_random", "anywhere_vmoe", "anywhere_soft_5"]
    program.train(SMOKE, letters, names, [0], directory)
    return directory, letters, gather(SMOKE, directory, bank.num_classes)


def test_results(finished):
    _, _, results = finished
    (soft,) = results["runs"]["anywhere_soft_5"]
    (vmoe,) = results["runs"]["anywhere_vmoe"]
    assert set(soft["few_shot"]) == {"1", "5"} and "views" not in soft
    assert set(vmoe["views"]) == set(VIEWS)
    assert set(vmoe["slots"]) == {"0.25", "0.5"}
    assert all(0 <= block["dropped"] < 1 for block in vmoe["blocks"].values())
    assert all(abs(b["cosine_within"]) <= 1 for b in soft["blocks"].values())
    assert set(results["models"]) == set(names_of())


def test_program(tmp_path):
    work, output = tmp_path / "work", tmp_path / "presets"
    places = ["--work", str(work), "--output", str(output)]
    places += ["--records", str(tmp_path / "trained.json")]
    presets.main(["--scale", "smoke", "--only", "vmoe", *places])
    (name,) = (path.name for path in output.iterdir())
    directory = output / name
    accuracy = read_metadata(directory)["accuracy"]
    assert accuracy["letters, trained fonts"] <= 1
    assert "letters, few-shot, never seen, 5 of a class" in accuracy
    card = (directory / "README.md").read_text(encoding="utf-8")
    assert name in card
    assert all(f"\n| {seed} | 0." in card for seed in SMOKE.seeds)
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(str(directory))
    assert type(classifier.backbone.router) is ksm.routers.SoftmaxTokenChoiceRouter
    images, labels = Letters(load_bank(work, SMOKE.candidates), "anywhere").take(
        SMOKE.test_images, 7
    )
    predicted = classifier.predict(images, batch_size=64, verbose=0).argmax(-1)
    assert predicted.shape == labels.shape and np.ptp(labels) > 0
