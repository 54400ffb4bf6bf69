"""What the presets that ship with weights are worth, measured on real digits."""

import keras
import numpy as np
import pytest

import keras_softmoe as ksm
from experiments.lib.cards import read_runs
from tests.support.close import assert_near

SOFT = "soft_moe_tiny_patch4_16e_32_glyphs"
TRAINED = [name for name in ksm.presets.names() if name.endswith("glyphs")]
LETTERS = [name for name in ksm.presets.names() if name.endswith("letters")]


@pytest.fixture(scope="module")
def digits():
    return ksm.datasets.digits(split="train"), ksm.datasets.digits(split="test")


def test_four_twins_and_one_with_two_choices_are_shipped():
    assert len(TRAINED) == 5
    assert SOFT in TRAINED


@pytest.mark.parametrize("name", [*TRAINED, *LETTERS])
def test_preset_is_small_and_has_a_card(name):
    path = ksm.presets.describe(name).path
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size < (4e6 if name in LETTERS else 10e6)
    card = (path / "README.md").read_text(encoding="utf-8")
    for part in ("Data", "seed", "minutes", "±", "raw pixels", "Licence"):
        assert part in card


def test_soft_features_beat_raw_pixels(digits):
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(SOFT)
    settings = {"shots": (1, 5, 10), "seeds": 10, "verbose": 0}
    model = ksm.evaluation.few_shot_probe(classifier, *digits, **settings)
    pixels = ksm.evaluation.few_shot_probe(None, *digits, **settings)
    for shots in settings["shots"]:
        # Both are measured on the same draws.
        difference = np.subtract(model[shots].accuracies, pixels[shots].accuracies)
        error = difference.std(ddof=1) / np.sqrt(len(difference))
        assert difference.mean() > 2 * error, (shots, difference.mean(), error)


def test_presets_know_letters():
    assert len(LETTERS) == 4
    letters = ksm.datasets.sample("letters")
    for name in LETTERS:
        classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
        found = accuracy(classifier, letters.images, letters.labels)
        run = read_runs(name)[0]
        # Three standard errors of 512 pictures
        assert abs(found - run["letters"]["accuracy"]) < 0.036, (name, found)


@pytest.mark.parametrize("name", [SOFT, "vmoe_micro_patch4_25e_20_letters"])
def test_few_shot_accuracy_is_that_of_the_card(name):
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)
    size = classifier.backbone.image_shape[0]
    train, test = (ksm.datasets.digits(size, split) for split in ("train", "test"))
    # As many draws as the card has: they choose the penalty together.
    result = ksm.evaluation.few_shot_probe(
        classifier, train, test, shots=(5,), seeds=20, verbose=0
    )
    card = read_runs(name)[0]["few_shot"]["model"]
    assert_near(result[5].accuracies, card["5"], atol=0.005)


def test_int8_keeps_the_accuracy_on_digits(digits):
    # A quarter of each: enough to see one point.
    (images, labels), (test_images, test_labels) = ((x[::4], y[::4]) for x, y in digits)
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(SOFT, num_classes=10)
    with_probe_as_head(classifier, images, labels)
    before = accuracy(classifier, test_images, test_labels)
    classifier.quantize("int8")
    assert classifier.backbone.blocks[-1].moe.experts.output_dense.quantization_mode
    after = accuracy(classifier, test_images, test_labels)
    assert before > 0.85
    assert abs(before - after) <= 0.01


@pytest.mark.parametrize("name", [SOFT, "vmoe_tiny_patch4_16e_32_glyphs"])
def test_int4_keeps_the_accuracy_on_digits(name, digits):
    (images, labels), (test_images, test_labels) = digits
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(name, num_classes=10)
    with_probe_as_head(classifier, images[::4], labels[::4])
    before = accuracy(classifier, test_images, test_labels)
    # Not the head: a ridge regression sets large weights off against each other.
    classifier.quantize("int4")
    assert not classifier.output_dense.quantization_mode
    assert classifier.backbone.blocks[-1].moe.experts.output_dense.quantization_mode
    after = accuracy(classifier, test_images, test_labels)
    assert before > 0.95
    assert abs(before - after) <= 0.02


def with_probe_as_head(classifier, images, labels):
    """Set the classifier's last layer to a ridge regression on its features."""
    inputs = keras.ops.convert_to_numpy(classifier.preprocessor(images))
    features = classifier.backbone.predict(inputs, verbose=0)["pooled_output"]
    centre = features.mean(0)
    x, y = features - centre, 2.0 * np.eye(10)[labels] - 1.0
    kernel = np.linalg.solve(x.T @ x + 0.1 * np.eye(x.shape[1]), x.T @ y)
    classifier.output_dense.set_weights([kernel, -centre @ kernel])


def accuracy(classifier, images, labels):
    logits = classifier.predict(images, verbose=0)
    return float(np.mean(logits.argmax(-1) == labels))
