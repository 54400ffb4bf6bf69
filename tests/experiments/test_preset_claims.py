"""Claims about presets, from made-up trainings."""

import numpy as np
import pytest

from experiments import preset_claims
from experiments.glyph_presets import TWINS
from tests.support.close import assert_near

SOFT, TOKEN, SOFT_OVER_TOKEN, FEW_SLOTS, LEARNED, LAST, CONTROL = range(7)


def training(seed, accuracy):
    return {
        "seed": seed,
        "upstream_accuracy": accuracy,
        "upstream_accuracy_by_layout": {"center": accuracy, "anywhere": accuracy / 2},
        "few_shot": {"model": {"5": [accuracy - 0.1, accuracy + 0.1]}},
        "fine_tuned": [0.9, 1.0],
    }


@pytest.fixture
def trained(monkeypatch):
    """Sets the accuracies of presets, by seed."""
    found = {}

    def read(name):
        return found.get(name, [])

    def write(**twins):
        for twin, accuracies in twins.items():
            runs = [training(*entry) for entry in enumerate(accuracies)]
            found[TWINS[twin].name] = runs

    monkeypatch.setattr(preset_claims, "read_runs", read)
    return write


def test_presets_are_compared_seed_by_seed(trained):
    trained(dense=(0.5, 0.6, 0.7), soft=(0.6, 0.7, 0.8), token_choice=(0.4, 0.7))
    claims = preset_claims.claims()
    for metric, gain in (
        ("center", 0.1),
        ("anywhere", 0.05),
        ("few_shot", 0.1),
        ("fine_tuned", 0),
    ):
        (found,) = claims[SOFT].differences[metric]
        assert found.seeds == 3
        assert_near(found.mean, gain, atol=1e-9)
    assert claims[SOFT].verdict("center") == "yes"
    assert claims[SOFT].verdict("fine_tuned") == "open"
    (found,) = claims[TOKEN].differences["center"]
    assert found.seeds == 2 and claims[TOKEN].verdict("center") == "open"
    (found,) = claims[SOFT_OVER_TOKEN].differences["center"]
    np.testing.assert_allclose(found.mean, 0.1)


def test_what_routing_is_worth_within_a_model(trained, monkeypatch):
    trained(token_choice=(0.5, 0.6, 0.7))
    runs = preset_claims.trainings()["token choice with batch priority"]
    for run in runs[:2]:
        run["fewer_slots"] = [
            {"capacity_factor": factor, "priority": priority, "accuracy": accuracy}
            for factor, priority, accuracy in (
                (0.5, "max", 0.6),
                (0.5, "position", 0.5),
                (0.25, "max", 0.4),
                (0.25, "position", 0.5 + 0.1 * run["seed"]),
            )
        ]
        run["random_routers"] = {"none": 0.7, "all": 0.4, "one": [0.6, 0.5, 0.65]}
    monkeypatch.setattr(
        preset_claims, "trainings", lambda: dict.fromkeys(preset_claims._VARIANTS, runs)
    )
    claims = preset_claims.claims()
    half, quarter = claims[FEW_SLOTS].differences["upstream"]
    assert (half.name, quarter.name) == ("C = 0.5", "C = 0.25")
    # The third training has no such results.
    assert half.seeds == quarter.seeds == 2
    np.testing.assert_allclose((half.mean, quarter.mean), (0.1, -0.15))
    (learned,) = claims[LEARNED].differences["upstream"]
    (last,) = claims[LAST].differences["upstream"]
    np.testing.assert_allclose((learned.mean, last.mean), (0.3, -0.05))
    # The same trainings stand for the dense ones.
    (control,) = claims[CONTROL].differences["upstream"]
    np.testing.assert_allclose(control.mean, (0.5 + 0.6) / 2 - 0.4)
    assert preset_claims.random_and_dense() == {0: (0.7, 0.4, 0.5), 1: (0.7, 0.4, 0.6)}


def test_without_a_preset_nothing_is_said(trained):
    trained(dense=(0.5, 0.6))
    for claim in preset_claims.claims():
        assert all(claim.verdict(metric) == "not run" for metric in claim.differences)
