"""Segmenters of digits on photographs: the program and its results."""

from experiments import segmentation
from experiments.lib.runs import read_json


def test_program(tmp_path, monkeypatch):
    monkeypatch.setattr(segmentation, "WORK", tmp_path / "work")
    monkeypatch.setattr(segmentation, "EPOCHS", 1)
    monkeypatch.setattr(segmentation, "SCENES", 64)
    segmentation.main(["--seeds", "1", "--output", f"{tmp_path}/found"])
    results = read_json(tmp_path / "found", ["results"])["results"]
    assert list(results) == ["per_pixel", "dense_1", "V-MoE_1", "Soft_MoE_1"]
    figures = [value for found in results.values() for value in found.values()]
    assert len(figures) == 8 and all(0 <= value < 1 for value in figures)
    assert segmentation.table(results).count("\n") == 5


def test_results_are_whole():
    assert len(read_json(segmentation.OUTPUT, ["results"])["results"]) == 10
