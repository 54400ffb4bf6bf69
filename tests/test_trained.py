"""What the presets that ship with weights are worth."""

import functools

import numpy as np
import pytest

import keras_softmoe as ksm
from experiments.icons import measures
from experiments.lib.cards import read_runs
from tests.support.close import assert_near

SOFT = "soft_moe_tiny_patch8_16e_32_icons"
LIMOE = "limoe_tiny_patch8_8e_32_icons"
DENSE = "limoe_dense_tiny_patch8_32_icons"
NAMES = ksm.presets.names()
LETTERS = [name for name in NAMES if name.endswith("letters")]
ICONS = [name for name in NAMES if name.endswith("icons")]
CLASSIFIERS = [name for name in ICONS if not name.startswith("limoe")]
sample = functools.cache(ksm.datasets.sample)


def test_four_of_letters_and_five_of_icons_are_shipped():
    assert (len(LETTERS), len(ICONS), len(CLASSIFIERS)) == (4, 5, 3)


@pytest.mark.parametrize("name", [*ICONS, *LETTERS])
def test_preset_is_small_and_has_a_card(name):
    path = ksm.presets.describe(name).path
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert size < (4e6 if name in LETTERS else 10e6)
    card = (path / "README.md").read_text(encoding="utf-8")
    beside = "chance" if name in (LIMOE, DENSE) else "raw pixels"
    for part in ("Data", "seed", "minutes", beside, "Licence"):
        assert part in card
    assert ("±" in card) == (name not in (LIMOE, DENSE))


def test_presets_know_letters():
    letters = sample("letters")
    for name in LETTERS:
        classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
        found = accuracy(classifier, letters.images, letters.labels)
        run = read_runs(name)[0]
        # Three standard errors of 512 pictures
        assert abs(found - run["letters"]["accuracy"]) < 0.036, (name, found)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_presets_know_icons(name):
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
    found = accuracy(classifier, sample("icons").images, sample("icons").labels)
    said = read_runs(name)[0]["new_styles"]
    # Those are 1,000 of the card's 6,883: three standard errors.
    error = np.sqrt(said * (1 - said) * (1 / 1000 - 1 / 6883))
    assert abs(found - said) < 3 * error


def test_few_shot_accuracy_is_that_of_the_card():
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(SOFT)
    parts = [
        (x.images, x.labels) for x in map(sample, ("new_icons", "other_new_icons"))
    ]
    # One channel of grey pixels, as on the card
    grey = [(x[..., 0].reshape(len(x), -1) / 255.0, y) for x, y in parts]
    settings = {"shots": measures.SHOTS, "seeds": 10, "batch_size": 128, "verbose": 0}
    found = {
        "model": ksm.evaluation.few_shot_probe(classifier, *parts, **settings),
        "raw pixels": ksm.evaluation.few_shot_probe(None, *grey, **settings),
    }
    card = read_runs(SOFT)[0]["new_concepts"]
    for shots in measures.SHOTS:
        model, pixels = (found[key][shots].accuracies for key in found)
        assert_near(model, card["model"][str(shots)], atol=0.005)
        assert_near(pixels, card["raw pixels"][str(shots)], atol=0.005)
        # Both are measured on the same draws.
        assert np.all(np.subtract(model, pixels) > 0.05)


def test_few_shot_accuracy_on_digits_is_that_of_the_card():
    name = "vmoe_micro_patch4_25e_20_letters"
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
    train, test = (ksm.datasets.digits(20, split) for split in ("train", "test"))
    # As many draws as the card has: they choose the penalty together.
    result = ksm.evaluation.few_shot_probe(
        classifier, train, test, shots=(5,), seeds=20, verbose=0
    )
    card = read_runs(name)[0]["few_shot"]["model"]
    assert_near(result[5].accuracies, card["5"], atol=0.005)


def test_int8_keeps_the_accuracy():
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(SOFT)
    before = accuracy(classifier, sample("icons").images, sample("icons").labels)
    classifier.quantize("int8")
    assert classifier.backbone.blocks[-1].moe.experts.output_dense.quantization_mode
    after = accuracy(classifier, sample("icons").images, sample("icons").labels)
    assert before > 0.3
    assert abs(before - after) <= 0.01


def accuracy(classifier, images, labels):
    logits = classifier.predict(images, verbose=0)
    return float(np.mean(logits.argmax(-1) == labels))


def test_twins_cost_the_same():
    limoe, dense = (ksm.evaluation.cost(name) for name in (LIMOE, DENSE))
    assert limoe.gflop_per_image == pytest.approx(dense.gflop_per_image, rel=0.1)
    assert limoe.parameters > 1.5 * dense.parameters


@pytest.mark.parametrize("name", [LIMOE, DENSE])
def test_a_word_finds_its_icons_as_the_card_says(name):
    model = ksm.models.LIMoEContrastive.from_preset(name)
    icons = sample("icons")
    concepts = np.unique(icons.labels)
    texts = model.encode_text([icons.class_names[concept] for concept in concepts])
    images = model.encode_image(icons.images, batch_size=128)
    best = np.argsort(-texts @ images.T, axis=1, kind="stable")[:, :10]
    right = icons.labels[best] == concepts[:, None]
    said = read_runs(name)[0]["found_by_word"]
    assert len(concepts) == said["queries"]
    for places in measures.PLACES:
        found = right[:, :places].any(1).mean()
        # Other roundings may move a few of 557.
        assert abs(found - said["found"][str(places)]) < 0.008
        assert found > 10 * said["chance"][str(places)]


def test_no_leakage_between_modalities():
    """Pairs together, with room for all, equal each half alone."""
    model = ksm.models.LIMoEContrastive.from_preset(
        LIMOE, eval_capacity_factor=8.0, single_modality_capacity_factor=8.0
    )
    images, captions = sample("icons").images[:32], sample("icons").captions[:32]
    together = model.predict({"images": images, "captions": captions}, verbose=0)
    for name, alone in (
        ("image_embedding", model.encode_image(images)),
        ("text_embedding", model.encode_text(captions)),
    ):
        assert_near(together[name], alone, atol=1e-6)


def test_pruning_to_four_text_experts():
    model = ksm.models.LIMoEContrastive.from_preset(LIMOE)
    captions = sample("icons").captions[:200]
    routing = ksm.analysis.analyze(model, captions=captions, verbose=0)
    usage = {block: s.routed["text"] for block, s in routing.modalities.items()}
    whole = model.encode_text(captions[:100])
    pruned = ksm.models.LIMoEContrastive(
        ksm.models.prune_experts(model, usage, 4), model.preprocessor
    )
    likeness = np.sum(whole * pruned.encode_text(captions[:100]), axis=-1)
    # The four least used ones instead: worse.
    wrong = {block: -count for block, count in usage.items()}
    spoilt = ksm.models.LIMoEContrastive(
        ksm.models.prune_experts(model, wrong, 4), model.preprocessor
    )
    unlikeness = np.sum(whole * spoilt.encode_text(captions[:100]), axis=-1)
    assert likeness.mean() > unlikeness.mean()
