"""A study that is interrupted anywhere gives what an uninterrupted one gives."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from experiments import router_study as study
from experiments.lib.runs import finish
from experiments.router_study import cells, runner
from keras_softmoe import evaluation

SCALE = dataclasses.replace(study.SMOKE, seeds=(3, 4), more_seeds=(), timed_rounds=1)
# Its noise, and that of the order of images, has to be taken up again.
NAMES = ("dense", "softmax_token_choice_k2", "soft_4s")


@pytest.fixture(autouse=True)
def few_models(monkeypatch):
    every = runner.configurations

    def few(scale, studies):
        models = every(scale, ("routers",))["routers"]
        found = {"routers": {name: models[name] for name in NAMES}}
        return found | {"headline": {"dense": models["dense"]}}

    monkeypatch.setattr(runner, "configurations", few)


def run(directory, **kwargs):
    return study.run_study(SCALE, directory, ("routers",), verbose=0, **kwargs)


def without_times(results):
    return json.dumps({key: results[key] for key in results if key != "times"})


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture
def uninterrupted(kept, tmp_path_factory):
    """Directory and results of a run from the beginning to the end, made once."""
    if "directory" not in kept:
        kept["directory"] = tmp_path_factory.mktemp("whole")
        kept["results"] = run(kept["directory"])
    return kept["directory"], kept["results"]


@pytest.fixture
def one_cell(kept, tmp_path_factory):
    """Directory of a run that has finished one cell, made once."""
    if "one cell" not in kept:
        kept["one cell"] = tmp_path_factory.mktemp("one")
        run(kept["one cell"], seeds=(4,), models=["dense"])
    return kept["one cell"]


def test_results(uninterrupted):
    directory, results = uninterrupted
    assert results["scale"] == json.loads(json.dumps(SCALE.settings))
    assert list(results["cells"]) == list(results["configurations"]) == list(NAMES)
    for name, by_seed in results["cells"].items():
        assert list(by_seed) == ["3", "4"]
        for cell in by_seed.values():
            assert not cell["diverged"]
            for metric in ("upstream_accuracy", "fine_tuned_accuracy"):
                assert 0 <= cell[metric] <= 1
            assert list(cell["few_shot"]) == ["1", "5", "10"]
            # Ridge regression on features tells digits apart, trained or not.
            assert cell["few_shot"]["10"] > cell["few_shot"]["1"] > 0.15
        assert by_seed["3"] != by_seed["4"]
        times = results["times"]["cells"][name]["3"]
        assert 0 < times["training_seconds"] < times["seconds"]
    soft, dense = (results["cells"][name]["3"] for name in ("soft_4s", "dense"))
    assert soft["dropped"] == [0.0] and soft["imbalance"][0] >= 1
    assert 0 <= soft["position_share"][0] <= 1
    for cell in (soft, dense):
        assert len(cell["curve"]) == SCALE.epochs
        assert all(
            0 <= point["accuracy"] <= 1 < point["loss"] for point in cell["curve"]
        )
    # Of 16 tokens and 16 slots
    for point in (*soft["curve"], soft):
        ((dispatch, combine),) = point["sharpness"]
        assert 1 <= dispatch <= 16 and 1 <= combine <= 16
    for part in ("dropped", "imbalance", "position_share", "label_share", "sharpness"):
        assert dense[part] is None
    assert all(t["ratio"] > 0 for t in results["times"]["steps"].values())
    left = {path.name for path in directory.iterdir()}
    folders = {"images", "cells", "configurations", "backup"}
    assert left == {"scale.json", "backend.json", *folders}
    assert not list((directory / "backup").iterdir())


def test_what_is_finished_is_kept(uninterrupted, monkeypatch):
    directory, results = uninterrupted
    monkeypatch.setattr(runner, "finish", None)
    assert run(directory) == results
    assert study.gather(SCALE, directory, ("routers",)) == results


def test_some_models(uninterrupted, tmp_path):
    """What others train into the same directory is taken up."""
    directory, results = uninterrupted
    with pytest.raises(ValueError, match="name one at least.*'vit'"):
        run(tmp_path, models=["dense", "vit"])
    with pytest.raises(ValueError, match="name one at least"):
        run(tmp_path, models=[])
    for name in NAMES:
        found = run(tmp_path, seeds=(4,), models=[name])
    assert found["cells"] == {n: {"4": results["cells"][n]["4"]} for n in NAMES}
    assert list(found["times"]["steps"]) == list(NAMES)


def test_an_interrupted_study(uninterrupted, tmp_path, monkeypatch):
    _, results = uninterrupted
    # Of 24 steps in cells of four: before the first backup, after it, in the last
    # step, and in cells of both seeds.
    stops = {1, 7, 12, 14, 21}
    interruptions = []
    step = runner._Progress.step

    def interrupted_step(self):
        interrupted_step.count += 1
        if interrupted_step.count in stops:
            interruptions.append("step")
            raise KeyboardInterrupt
        step(self)

    interrupted_step.count = 0
    probe = evaluation.few_shot_probe

    def interrupted_probe(*args, **kwargs):
        if interruptions.count("probe") < 1 and "step" in interruptions:
            interruptions.append("probe")
            raise KeyboardInterrupt
        return probe(*args, **kwargs)

    monkeypatch.setattr(runner._Progress, "step", interrupted_step)
    monkeypatch.setattr(evaluation, "few_shot_probe", interrupted_probe)
    # The second seed first: cells do not depend on what was trained before them.
    for seeds in ((4,), None):
        for _ in range(10):
            try:
                again = run(tmp_path, seeds=seeds)
                break
            except KeyboardInterrupt:
                continue
        finished = {seed for cells in again["cells"].values() for seed in cells}
        assert finished == ({"4"} if seeds else {"3", "4"})
    assert sorted(interruptions) == ["probe"] + ["step"] * 5
    assert without_times(again) == without_times(results)


def test_models_that_diverge(tmp_path, monkeypatch):
    rates = {"dense": float("inf"), "token": 1.0, "expert": 1.0, "soft": 1.0}
    diverges = dataclasses.replace(SCALE, seeds=(0,), rates=rates)
    models = runner.configurations(diverges, ("routers",))["routers"]
    task = runner.upstream_task(diverges, tmp_path / "images")
    found = finish(cells.cell(diverges, models["dense"], 0, task), tmp_path)
    assert found["results"] == {"diverged": True, "curve": []}
    assert found["times"]["seconds"] > 0


@pytest.mark.parametrize(
    "part", ["cells/dense_seed4.json", "configurations/dense.json", "scale.json"]
)
def test_damaged_files_are_found_before_anything_is_trained(
    part, one_cell, tmp_path, monkeypatch
):
    directory = copied(one_cell, tmp_path)
    (directory / part).write_text("")
    monkeypatch.setattr(runner, "finish", None)
    with pytest.raises(ValueError, match=f"{part}' is damaged.*Delete it"):
        run(directory)


def test_a_directory_of_another_backend(uninterrupted, tmp_path):
    directory = copied(uninterrupted[0], tmp_path)
    (directory / "backend.json").write_text('"another"')
    with pytest.raises(ValueError, match="one backend.*KERAS_BACKEND=another"):
        run(directory)


def test_backups_of_finished_cells_go(uninterrupted, tmp_path):
    directory = copied(uninterrupted[0], tmp_path)
    left = directory / "backup" / "dense_seed4"
    left.mkdir(parents=True)
    (left / "training.h5").write_bytes(b"1")
    run(directory)
    assert not left.exists()


def copied(directory, tmp_path):
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def test_a_directory_of_another_scale(tmp_path):
    study.gather(SCALE, tmp_path, ("routers",))
    other = dataclasses.replace(SCALE, epochs=3)
    with pytest.raises(ValueError, match=r"differs in \['epochs'\]"):
        study.gather(other, tmp_path, ("routers",))


def test_more_seeds_in_a_directory(uninterrupted, tmp_path):
    _, results = uninterrupted
    more = dataclasses.replace(SCALE, seeds=(*SCALE.seeds, 5), rate_seeds=(100,))
    copy = copied(uninterrupted[0], tmp_path)
    assert study.gather(more, copy, ("routers",))["cells"] == results["cells"]
    more = dataclasses.replace(more, weight_decay=0.5)
    with pytest.raises(ValueError, match=r"differs in \['weight_decay'\]"):
        study.gather(more, copy, ("routers",))


def test_seeds_that_the_scale_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"\(100, 101, 3, 4\).*Received: seeds=\(5,\)"):
        run(tmp_path, seeds=(5,))
