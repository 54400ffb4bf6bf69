"""What the presets that ship with weights are worth."""

import keras
import numpy as np
import pytest

import keras_softmoe as ksm
from experiments import synthetic
from experiments.lib.cards import read_runs
from tests.support.close import assert_near

SOFT = "soft_moe_tiny_patch8_16e_32_icons"
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


LIMOE = "limoe_tiny_patch8_8e_32_icons"
DENSE = "limoe_dense_tiny_patch8_32_icons"
NAMES = synthetic.SHAPE_COLOR_CLASSES
TEMPLATES = ("a {}", "a picture of a {}", "there is a {}")
# As in the script that trained and measured them, but fewer scenes.
NUM_SCENES, TEST_SEED, HELD_OUT_SEED = 500, 101, 102


@pytest.fixture(scope="module")
def model():
    return ksm.models.LIMoEContrastive.from_preset(LIMOE)


@pytest.fixture(scope="module")
def scenes():
    return synthetic.captioned_shapes(NUM_SCENES, seed=TEST_SEED, verbose=0)


@pytest.mark.parametrize("name", [LIMOE, DENSE])
def test_limoe_preset_is_small_and_has_a_card(name):
    path = ksm.presets.describe(name).path
    assert sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) < 10e6
    card = (path / "README.md").read_text(encoding="utf-8")
    for part in ("synthetic", "seeds 0, 1, 2", "minutes", "±", "chance", "Licence"):
        assert part in card
    assert [run["seed"] for run in read_runs(name)] == [0, 1, 2]
    # Three runs, beside the twin's on another core.
    assert sum(run["minutes"] for run in read_runs(name)) < 60


def test_twins_cost_the_same():
    limoe, dense = (ksm.evaluation.cost(name) for name in (LIMOE, DENSE))
    assert limoe.gflop_per_image == pytest.approx(dense.gflop_per_image, rel=0.1)
    assert limoe.parameters > 1.5 * dense.parameters


@pytest.mark.parametrize("name", [LIMOE, DENSE])
def test_results_are_well_above_chance(name):
    for run in read_runs(name):
        assert run["zero_shot_new_of_64"] > 10 / 64
        for direction in ("image_to_text", "text_to_image"):
            assert run[f"{direction}_recall_at_1"] > 10 / 500


def test_zero_shot_is_that_of_the_card(model):
    new = synthetic.captioned_shapes(
        NUM_SCENES, seed=HELD_OUT_SEED, combinations="held_out", verbose=0
    )
    held_out = [NAMES.index(name) for name in synthetic.HELD_OUT_COMBINATIONS]
    assert set(new.labels) <= set(held_out)
    found = ksm.evaluation.zero_shot(model, new.images, NAMES, TEMPLATES, new.labels)
    said = read_runs(LIMOE)[0]["zero_shot_new_of_64"]
    # Those are the first 500 of the card's 2,000: three standard errors.
    error = np.sqrt(said * (1 - said) * (1 / NUM_SCENES - 1 / 2000))
    assert abs(found.accuracy - said) < 3 * error
    assert found.accuracy > 10 / 64


def test_retrieval_is_that_of_the_card(model, scenes):
    recall = ksm.evaluation.retrieval(
        model.encode_image(scenes.images), model.encode_text(scenes.captions)
    )
    run = read_runs(LIMOE)[0]
    # The same scenes, so only rounding may move a pair.
    for direction, values in recall._asdict().items():
        for k in (1, 10):
            assert values[k] == pytest.approx(
                run[f"{direction}_recall_at_{k}"], abs=0.01
            )


def test_no_leakage_between_modalities(model, scenes):
    """Pairs together, with room for all, equal each half alone."""
    model = ksm.models.LIMoEContrastive.from_preset(
        LIMOE, eval_capacity_factor=8.0, single_modality_capacity_factor=8.0
    )
    pairs = model.preprocessor(scenes.images[:32], scenes.captions[:32])
    together = model.predict(
        {"images": scenes.images[:32], "captions": scenes.captions[:32]}, verbose=0
    )
    for name, alone in (
        ("image_embedding", model.encode_image(scenes.images[:32])),
        ("text_embedding", model.encode_text(scenes.captions[:32])),
    ):
        assert_near(together[name], alone, atol=1e-6)
    assert pairs["token_ids"].shape == (32, 16)


def test_pruning_to_four_text_experts(model, scenes):
    routing = ksm.analysis.analyze(model, captions=scenes.captions, verbose=0)
    usage = {block: s.routed["text"] for block, s in routing.modalities.items()}
    whole = model.encode_text(scenes.captions[:100])
    pruned = ksm.models.LIMoEContrastive(
        ksm.models.prune_experts(model, usage, 4), model.preprocessor
    )
    likeness = np.sum(whole * pruned.encode_text(scenes.captions[:100]), axis=-1)
    # The four least used ones instead: worse.
    wrong = {block: -count for block, count in usage.items()}
    spoilt = ksm.models.LIMoEContrastive(
        ksm.models.prune_experts(model, wrong, 4), model.preprocessor
    )
    unlikeness = np.sum(whole * spoilt.encode_text(scenes.captions[:100]), axis=-1)
    assert likeness.mean() > unlikeness.mean()
