"""What routers drop on small data: the program and its results."""

import pytest

from experiments import small_data
from experiments.lib.runs import read_json


def test_program(tmp_path, monkeypatch):
    monkeypatch.setattr(small_data, "WORK", tmp_path / "work")
    monkeypatch.setattr(small_data, "EPOCHS", 1)
    monkeypatch.setattr(small_data, "NUM_EXPERTS", (4,))
    monkeypatch.setattr(small_data, "SIZES", small_data.SIZES | {"patch_size": 16})
    small_data.main(["--seeds", "3", "--output", f"{tmp_path}/found"])
    results = read_json(tmp_path / "found", ["results"])["results"]
    assert set(results.pop("dense_0_3")) == {"accuracy"}
    drops = {
        name: [max(found[kind]) > 0 for kind in ("training", "batch", "alone")]
        for name, found in results.items()
    }
    assert drops == {
        "groups_of_one_image_4_3": [True, True, True],
        "groups_of_the_batch_4_3": [True, False, False],
        "without_capacity_4_3": [False, False, False],
    }
    found = results["without_capacity_4_3"]
    assert found["dropless"] == pytest.approx(found["accuracy"])


def test_results_are_whole():
    assert len(read_json(small_data.OUTPUT, ["results"])["results"]) == 35
