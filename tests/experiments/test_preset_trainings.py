"""The commands that train presets and LIMoE's sweeps, without the trainings."""

import json
import sys

import pytest

from experiments import glyph_presets, glyph_trials, limoe_presets, limoe_sweeps
from experiments.lib import runs


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Names of the runs that were "trained", in order; results are made up."""
    names = []

    def finish(run, directory, on_step=None, verbose=0):
        file = runs.result_file(directory, run.name)
        if not file.exists():
            names.append(run.name)
            results = {"text_experts": [2, 4], "image_experts": [6, 6]}
            results["curve"] = [{"accuracy": 0.1}, {"accuracy": 0.2}]
            results["upstream_accuracy_by_layout"] = {"center": len(names) / 10}
            times = {"training_seconds": 60.0, "seconds": 70.0}
            runs.write_json(file, {"results": results, "times": times})
        return runs.read_json(file, runs.RESULTS)

    for module in (glyph_presets, glyph_trials, limoe_presets, limoe_sweeps):
        monkeypatch.setattr(module, "WORK", tmp_path / "work")
        monkeypatch.setattr(module, "finish", finish)
    monkeypatch.setattr(glyph_trials, "RESULTS", tmp_path)
    return names


def call(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    module.main()


def test_trials_are_trained_once(trained, tmp_path, monkeypatch):
    call(monkeypatch, glyph_trials, "--only", "routers")
    assert len(trained) == 23
    for _ in range(2):
        call(monkeypatch, glyph_trials)
    assert len(trained) == len(set(trained)) == 29

    found = json.loads((tmp_path / "rates.json").read_text())
    assert found["images"] == 131072
    assert list(found["rates"]) == ["dense", "soft", "token_choice"]
    rates = [f"{rate:g}" for rate in glyph_trials.LEARNING_RATES]
    assert list(found["rates"]["soft"]) == rates
    found = json.loads((tmp_path / "routers.json").read_text())["routers"]
    first, *_, last = found.values()
    assert first[0]["upstream_accuracy_by_layout"] == {"center": 0.1}
    assert first[0]["curve"] == [{"accuracy": 0.2}]
    assert list(map(len, (first, last))) == [3, 3]


def test_trials_differ_in_nothing_else():
    soft = glyph_presets.TWINS["soft"]
    one, other = (
        glyph_trials.trial_run(soft._replace(learning_rate=rate), 100).settings
        for rate in (soft.learning_rate, 2)
    )
    assert one | {"learning_rate": 2} == other
    for twin in glyph_trials.OTHERS:
        other = glyph_trials.trial_run(twin, 100).settings
        assert other["router"] != one["router"]
        assert other | {"router": None} == one | {"router": None}


def test_sweeps_are_kept_by_their_epochs(trained, tmp_path, monkeypatch):
    arguments = ("--sweep", "choices", "--output", tmp_path)
    call(monkeypatch, limoe_sweeps, *arguments)
    assert len(trained) == 6
    file = tmp_path / "choices.json"
    kept = file.read_text()
    assert [run["variant"] for run in json.loads(kept)] == [
        f"num_selected_experts={k}" for k in (1, 2) for _ in limoe_sweeps.SEEDS
    ]
    call(monkeypatch, limoe_sweeps, *arguments)
    with pytest.raises(SystemExit):
        call(monkeypatch, limoe_sweeps, *arguments, "--epochs", 2)
    assert len(trained) == 6 and file.read_text() == kept


def test_only_the_sweep_of_the_repository_is_drawn(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(limoe_sweeps, "FIGURE", tmp_path / "figure.png")
    arguments = ("--sweep", "losses", "--only", "classic", "entropy")
    call(monkeypatch, limoe_sweeps, *arguments, "--output", tmp_path)
    assert not (tmp_path / "figure.png").exists()
    monkeypatch.setattr(limoe_sweeps, "RESULTS", tmp_path)
    call(monkeypatch, limoe_sweeps, *arguments, "--output", tmp_path)
    assert (tmp_path / "figure.png").exists()


def test_settings_tell_variants_apart():
    """No two trainings of the sweeps have the same name and other settings."""
    known = {}
    for sweep, variants in limoe_sweeps.SWEEPS.items():
        for name, settings in variants():
            run = limoe_presets.training_run(
                f"{sweep}_{name}" if settings else "unchanged",
                "limoe",
                0,
                1,
                None,
                **settings,
            )
            found = json.dumps(run.settings)
            assert known.setdefault(run.name, found) == found
    assert len(set(known.values())) == len(known)


@pytest.mark.parametrize("module", [glyph_presets, limoe_presets])
def test_without_the_first_seed_nothing_is_written(
    module, trained, tmp_path, monkeypatch, capsys
):
    twin = "dense"
    call(
        monkeypatch, module, "--only", twin, "--seeds", 1, "--output", tmp_path / "out"
    )
    assert len(trained) == 1 and not (tmp_path / "out").exists()
    assert "the first seed is missing" in capsys.readouterr().out
