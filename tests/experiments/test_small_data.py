"""What routers drop on small data: the program and its results."""

import pytest

from experiments import small_data
from experiments.lib.runs import read_json


def test_program(tmp_path, monkeypatch):
    monkeypatch.setattr(small_data, "WORK", tmp_path / "work")
    monkeypatch.setattr(small_data, "EPOCHS", 1)
    monkeypatch.setattr(small_data, "NUM_EXPERTS", (4,))
    monkeypatch.setattr(small_data, "SIZES", small_data.SIZES | {"patch_size": 16})
    where = f"{tmp_path}/found"
    small_data.main(["--seeds", "3", "--data", "digits", "--output", where])
    results = read_json(where, ["results"])["results"]
    assert set(results.pop("digits_dense_0_3")) == {"accuracy"}
    drops = {
        name: [max(found[kind]) > 0 for kind in ("training", "batch", "alone")]
        for name, found in results.items()
    }
    assert drops == {
        "digits_groups_of_one_image_4_3": [True, True, True],
        "digits_defaults_4_3": [True, False, False],
        "digits_capacity_of_2_4_3": [True, False, False],
        "digits_without_capacity_4_3": [False, False, False],
    }
    found = results["digits_without_capacity_4_3"]
    assert found["dropless"] == pytest.approx(found["accuracy"])


def test_results_are_whole():
    found = read_json(small_data.OUTPUT, ["results"])["results"]
    assert len(found) == 45 + 2 * 2 * 2 * 5
    for name, result in found.items():
        # What the defaults promise, in all tasks and with few and many experts
        if "_defaults_" in name:
            assert max(*result["batch"], *result["alone"]) < 0.1, name
