"""What the LIMoE presets that ship with weights are worth, on scenes never seen."""

import numpy as np
import pytest

import keras_softmoe as ksm
from experiments import synthetic
from experiments.lib.cards import read_runs
from tests.support.close import assert_near

LIMOE = "limoe_tiny_patch4_8e_32_shapes"
DENSE = "limoe_dense_tiny_patch4_32_shapes"
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
def test_preset_is_small_and_has_a_card(name):
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
