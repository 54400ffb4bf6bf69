"""Upcycling by the published protocol: state that goes on, cost, a whole program."""

import keras
import numpy as np
import pytest
from keras.ops import convert_to_numpy

import keras_softmoe as ksm
from experiments.letters import upcycling
from experiments.letters.bank import load_bank
from experiments.letters.models import SMOKE, STUDY
from experiments.letters.pictures import Letters
from experiments.lib.runs import finish

SEED = upcycling.SEEDS[0]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Directory with a trained dense start, the letters, and the file of the start."""
    directory = tmp_path_factory.mktemp("letters")
    letters = Letters(load_bank(directory, SMOKE.candidates), "anywhere")
    file = upcycling.start_file(directory, SEED)
    finish(upcycling.start_run(SMOKE, letters, SEED, file), directory)
    return directory, letters, file


def moments(classifier, kind):
    """Moments by the path of the weight."""
    found = upcycling.moments_of(classifier.optimizer, kind)
    weights = classifier.trainable_variables
    return {w.path: convert_to_numpy(m) for w, m in zip(weights, found, strict=True)}


@pytest.mark.parametrize("name", ["dense", "expert_choice"])
def test_experts_have_the_dense_state(started, name):
    dense = keras.saving.load_model(started[2])
    variant = upcycling.VARIANTS[name]
    model = upcycling.continued(dense, variant, SMOKE)
    assert int(model.optimizer.iterations) == int(dense.optimizer.iterations) == 4
    for kind in ("momentum", "velocity"):
        given, found = moments(dense, kind), moments(model, kind)
        assert any(np.any(x) for x in given.values())
        for path, moment in found.items():
            if "router" in path:
                assert not moment.any()
            elif "experts" in path:
                assert len(moment) == upcycling.NUM_EXPERTS
                assert moment.any() and (moment == moment[:1]).all()
            else:
                np.testing.assert_array_equal(moment, given[path])


def test_without_moments_the_rate_goes_on(started):
    dense = keras.saving.load_model(started[2])
    with_past, without = (
        upcycling.continued(dense, upcycling.VARIANTS[name], SMOKE)
        for name in ("expert_choice", "no_moments")
    )
    assert int(without.optimizer.iterations) == 0
    assert not any(np.any(x) for x in moments(without, "velocity").values())
    rates = [float(m.optimizer.learning_rate) for m in (with_past, without)]
    assert rates[0] == pytest.approx(rates[1]) and rates[0] > 0


def test_gates_of_a_token_sum_to_one():
    router = upcycling.NormalizedExpertChoiceRouter(4, 2.0)
    tokens = np.random.default_rng(0).normal(size=(2, 12, 8)).astype("float32")
    routing = router(tokens).routing
    total = convert_to_numpy(ksm.ops.to_dense(routing, 12).combine).sum((2, 3))
    chosen = convert_to_numpy(ksm.ops.to_dense(routing, 12).dispatch).sum((2, 3)) > 0
    np.testing.assert_allclose(total, chosen, rtol=1e-5)
    assert chosen.any()


def test_all_cost_the_same():
    found = {
        name: upcycling.cost(STUDY, variant, 2600)["training_gflop"]
        for name, variant in upcycling.VARIANTS.items()
    }
    for name, gflop in found.items():
        assert gflop == pytest.approx(found["dense"], rel=0.03), name


def test_program(started, capsys):
    directory, *_ = started
    arguments = ["--scale", "smoke", "--seeds", str(SEED), "--work", str(directory)]
    upcycling.main(arguments)
    results = upcycling.read_json(directory / "upcycling.json")
    for name in upcycling.VARIANTS:
        (row,) = results["runs"][name].values()
        assert 0 <= row["accuracy"] <= 1 and "accuracy" in row["before"]
    (start,) = results["starts"].values()
    (dense,) = results["runs"]["dense"].values()
    assert dense["before"]["accuracy"] == start["accuracy"]
