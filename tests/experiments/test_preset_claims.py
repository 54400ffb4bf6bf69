"""Claims about presets, from made-up trainings."""

import numpy as np
import pytest

from experiments import preset_claims
from experiments.glyph_presets import TWINS

SOFT, TOKEN, SOFT_OVER_TOKEN = range(3)


def training(seed, accuracy):
    return {
        "seed": seed,
        "upstream_accuracy_by_layout": {"center": accuracy, "anywhere": accuracy / 2},
        "few_shot": {"model": {"5": [accuracy - 0.1, accuracy + 0.1]}},
        "fine_tuned": [0.9, 1.0],
    }


@pytest.fixture
def trained(monkeypatch):
    """Sets the accuracies of presets, by seed."""
    found = {}

    def read(directory):
        return found.get(directory.name, {})

    def write(**twins):
        for twin, accuracies in twins.items():
            runs = [training(*entry) for entry in enumerate(accuracies)]
            found[TWINS[twin][0]] = {"runs": runs}

    monkeypatch.setattr(preset_claims, "read_metadata", read)
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
        np.testing.assert_allclose(found.mean, gain, atol=1e-9)
    assert claims[SOFT].verdict("center") == "yes"
    assert claims[SOFT].verdict("fine_tuned") == "open"
    (found,) = claims[TOKEN].differences["center"]
    assert found.seeds == 2 and claims[TOKEN].verdict("center") == "open"
    (found,) = claims[SOFT_OVER_TOKEN].differences["center"]
    np.testing.assert_allclose(found.mean, 0.1)


def test_without_a_preset_nothing_is_said(trained):
    trained(dense=(0.5, 0.6))
    for claim in preset_claims.claims():
        assert all(claim.verdict(metric) == "not run" for metric in claim.differences)
