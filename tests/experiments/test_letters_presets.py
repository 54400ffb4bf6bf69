"""Presets of letters: the program at a size of seconds, and what it writes."""

import numpy as np

import keras_softmoe as ksm
from experiments.letters import presets
from experiments.letters.bank import load_bank
from experiments.letters.models import SMOKE
from experiments.letters.pictures import Letters
from experiments.lib.cards import read_metadata


def test_program(tmp_path):
    work, output = tmp_path / "work", tmp_path / "presets"
    places = ["--work", str(work), "--output", str(output)]
    places += ["--records", str(tmp_path / "trained")]
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
    router = classifier.backbone.router
    assert type(router) is ksm.routers.SoftmaxTokenChoiceRouter
    images, labels = Letters(load_bank(work, SMOKE.candidates), "anywhere").take(
        SMOKE.test_images, 7
    )
    predicted = classifier.predict(images, batch_size=64, verbose=0).argmax(-1)
    assert predicted.shape == labels.shape and np.ptp(labels) > 0
