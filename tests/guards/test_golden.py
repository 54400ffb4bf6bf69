"""What is computed today is what was recorded before the structure changed."""

import json
import re

import pytest

from keras_softmoe import catalogue
from tests.guards import golden
from tests.models.test_backends import ONE_OF_EACH, TRAINED
from tests.support.close import assert_near


def test_decisions_of_all_routers():
    expected, found = golden.read("decisions.npz"), golden.decisions()
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert_near(found[key], values, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("names", [ONE_OF_EACH, TRAINED], ids=["some", "all"])
def test_predictions_of_the_trained_presets(names):
    expected = golden.read("predictions.npz")
    assert set(expected) == set(TRAINED)
    for name, values in golden.predictions(names).items():
        assert_near(values, expected[name], atol=1e-6, err_msg=name)


def smallest_of_each_family(costs):
    """The smallest of the presets whose names differ in sizes and numbers only."""
    sizes = r"tiny|small|base|large|huge|[a-z]*\d+[a-z]*"
    families = {}
    for name in sorted(costs, key=lambda name: costs[name][0]):
        families.setdefault(re.sub(sizes, "", name), name)
    return list(families.values())


@pytest.mark.parametrize("which", [smallest_of_each_family, list])
def test_costs(which):
    expected = golden.read("costs.json")
    names = which(expected)
    assert len(names) >= 28
    for name, (parameters, gflop) in golden.costs(names).items():
        assert parameters == expected[name][0], name
        assert gflop == pytest.approx(expected[name][1], rel=1e-9), name


def test_plans():
    assert golden.plans() == golden.read("plans.json")


def test_configurations_of_all_presets():
    recorded = golden.read("configurations.json.gz")
    expected = {
        name: [kind, golden.as_now(config)] for name, (kind, config) in recorded.items()
    }
    assert golden.configurations() == expected


def test_configurations_of_the_trained_presets_saved_again():
    recorded = golden.without_modules(golden.read("saved_again.json"))
    expected = golden.with_new_settings(recorded)
    assert golden.saved_again() == expected


def test_recipes():
    expected, found = golden.read("recipes.json"), golden.recipes()
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        rates, recorded = (x.pop("learning_rates") for x in (found[key], values))
        assert_near(rates, recorded, rtol=2e-6, atol=1e-12, err_msg=key)
        assert found[key] == values, key


def test_every_preset_was_recorded():
    assert set(golden.read("costs.json")) == set(catalogue.names())


def test_recorded_values_are_json():
    assert json.dumps(golden.read("plans.json"))
