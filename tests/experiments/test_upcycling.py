"""The experiment on upcycling: cells, what is kept, and what is read from results."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.upcycling import __main__ as program, tables
from experiments.upcycling.cells import Cell, task_of
from experiments.upcycling.plans import CONTROLS, SMALL, SMOKE, VARIANTS, variants

PLAN = dataclasses.replace(
    SMOKE, scale=dataclasses.replace(SMOKE.scale, seeds=(3, 4), more_seeds=())
)
TRAINED = ("dense", "copies", "clusters", "soft")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Directory and results of most variants with a seed, and of a rate."""
    directory = tmp_path_factory.mktemp("upcycling")
    cells = [Cell(name, 3, PLAN.learning_rate) for name in TRAINED]
    program.train(PLAN, [*cells, *program.rate_cells(PLAN, ["dense"])[:1]], directory)
    return directory, program.gather(PLAN, directory)


def test_results(finished):
    _, results = finished
    assert json.loads(json.dumps(results)) == results
    assert list(results["cells"]) == [*VARIANTS, *CONTROLS]
    for name in TRAINED:
        (cell,) = results["cells"][name].values()
        assert not cell["diverged"] and len(cell["curve"]) == PLAN.epochs
        before = cell["before"]
        assert (before["feature_difference"] == 0) == (name == "dense")
        assert (cell["accuracy_with_room"] is None) == (name in ("dense", "soft"))
        assert list(cell["few_shot"]) == ["1", "5", "10"]
    start = results["starts"]["3"]
    dense = results["cells"]["dense"]["3"]["before"]
    assert start["upstream_accuracy"] == dense["upstream_accuracy"]
    rates = results["rates"]["dense"]
    assert list(rates["0.0003"]) == ["100"] and not rates["0.001"]


def test_costs_are_equal_but_for_the_router():
    costs = {
        name: program.cost_of(SMALL, variant, 62)["training_gflop"]
        for name, variant in variants(SMALL.scale).items()
    }
    for name in VARIANTS:
        assert costs["dense"] <= costs[name] < 1.15 * costs["dense"], name
    for name in CONTROLS:
        assert costs[name] > 1.15 * costs["dense"], name


def test_what_is_finished_is_not_trained_again(finished, monkeypatch):
    directory, results = finished
    monkeypatch.setattr("experiments.lib.runs._train", None)
    program.train(PLAN, [Cell("copies", 3, PLAN.learning_rate)], directory)
    assert program.gather(PLAN, directory) == results


def test_a_directory_holds_one_plan(finished):
    directory, _ = finished
    longer = dataclasses.replace(PLAN, epochs=3, learning_rate=1.0)
    with pytest.raises(ValueError, match=r"differs in \['epochs'\]"):
        program.train(longer, [], directory)


def test_further_images_are_new(finished):
    directory, _ = finished
    task = task_of(PLAN, directory / "images")
    epochs = PLAN.scale.epochs + PLAN.epochs
    drawn = [next(task.batches(3, epoch))[0] for epoch in range(epochs)]
    pairs = [(a, b) for a in range(epochs) for b in range(a)]
    assert all(np.any(drawn[a] != drawn[b]) for a, b in pairs)


def test_report(finished):
    _, results = finished
    text = tables.report(results)
    for name, variant in results["variants"].items():
        # In the tables of results, of curves and, with one, of learning rates.
        rows = 1 + (name in TRAINED) + (name == "dense")
        assert text.count(f"| {variant['title']} |") == rows, name


def test_claims_of_made_up_results(finished):
    _, results = finished
    results = json.loads(json.dumps(results))
    for name in TRAINED:
        by_seed = results["cells"][name]
        (cell,) = by_seed.values()
        gain = {"copies": 0.1, "clusters": 0.05}.get(name, 0.0)
        for seed, spread in enumerate((0.0, 0.001, -0.001)):
            accuracy = 0.5 + gain * (1 + spread)
            by_seed[str(seed)] = {**cell, "upstream_accuracy": accuracy}
        del by_seed["3"]
    found = {c.text: c for c in tables.claims(results)}
    verdicts = [c.verdict("upstream_accuracy") for c in found.values()]
    # Of two claims one of the models was not trained.
    verdicts_of_all = ["yes", *2 * ["not run"], "no", "not run", "open"]
    assert verdicts == [*verdicts_of_all, *2 * ["not run"]]
    ahead = next(iter(found.values())).differences["upstream_accuracy"][0]
    assert ahead.mean == pytest.approx(0.1) and ahead.seeds == 3


def test_the_committed_report():
    directory = Path(program.__file__).parent / "small"
    kept = json.loads((directory / "results.json").read_text("utf-8"))
    assert tables.report(kept) == (directory / "README.md").read_text("utf-8")
