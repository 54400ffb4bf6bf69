"""The study on icons: trainings, gathered results, and their answers."""

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from experiments.icons import answers, characters, study
from experiments.icons.bank import Bank, load, write


def small_bank():
    """30 concepts of 12 icons by two authors, a few of them held out."""
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(30), 12).astype("int32")
    count, held_out = len(label), np.arange(30) >= 27
    split = np.where(held_out[label], 2, np.arange(count) % 12 > 9).astype("int8")
    zeros = np.zeros(count, "int32")
    return Bank(
        pictures=(rng.integers(0, 16, (count, 32, 32)) * 17).astype("uint8"),
        label=label,
        set=zeros,
        family=np.arange(count, dtype="int32") % 2,
        split=split,
        caption_start=np.arange(count + 1, dtype="int32"),
        caption=label,
        concepts=np.array([f"concept {i}" for i in range(30)]),
        held_out=held_out,
        captions=np.array([f"name {i}" for i in range(30)]),
        sets=np.array([["key", "name", "author", "MIT", ""]]),
    )


def test_fewer_concepts():
    bank = study.most_drawn(small_bank(), 20)
    assert bank.num_concepts == 20
    for split in ("train", "held_out_styles"):
        rows, labels = bank.rows(split)
        assert len(np.unique(bank.label[rows])) == len(np.unique(labels)) == 20
        assert labels.max() == 19
    assert len(bank.rows("held_out_concepts")[0]) == 36


def test_program(tmp_path, capsys):
    write(small_bank(), tmp_path / "bank.npz")
    places = [f"--{name}={tmp_path / name}" for name in ("work", "output")]
    common = ["--scale", "smoke", f"--bank={tmp_path / 'bank.npz'}", *places]
    study.main([*common, "--only", "dense", "vmoe", "random", "position"])
    file = tmp_path / "output" / "study_smoke.json"
    found = json.loads(file.read_text())["models"]
    assert {key: len(rows) for key, rows in found.items()} == dict.fromkeys(
        ("dense", "vmoe", "random", "position"), 2
    )
    row = found["vmoe"][0]
    assert row["seed"] == 0 and len(row["curve"]) == 2 and len(row["dropped"]) == 1
    before = file.stat().st_mtime_ns
    study.main([*common, "--only", "dense"])
    assert file.stat().st_mtime_ns >= before
    capsys.readouterr()
    study.main([*common, "--answers"])
    assert "| **(a)** |" in capsys.readouterr().out
    assert (tmp_path / "work" / "curves.png").stat().st_size > 5000


def test_answers():
    def rows(*values):
        return [{"seed": seed, "accuracy": value} for seed, value in enumerate(values)]

    found = answers.differences(
        {"vmoe": rows(0.5, 0.52, 0.54), "random": rows(0.4, 0.42, 0.4401), "dense": []}
    )
    assert list(found) == [("vmoe", "random")]
    assert abs(found["vmoe", "random"].mean - 10) < 0.01
    table = answers.questions_table({"vmoe": rows(0.5, 0.52), "random": rows(0.6, 0.7)})
    assert "open" in table and table.count("not measured") == 9


def test_lengths():
    def results(gain):
        rows = {
            key: [
                {"seed": seed, "accuracy": value + seed / 100, "parameters": 1234}
                for seed in range(3)
            ]
            for key, value in (("dense", 0.5), ("wide", 0.5 + gain), ("vmoe", 0.4))
        }
        return {k: [r | {"seconds": 60.0} for r in found] for k, found in rows.items()}

    table = answers.lengths_table({"8 steps": results(0.2), "16": results(-0.1)})
    head, *rows = table.splitlines()
    assert head.count("p, corrected") == 2 and len(rows) == 4 + 6
    wide = next(row for row in rows if row.startswith('| "Dense, MLPs four'))
    assert "+20.0 ± 0.0" in wide and "-10.0 ± 0.0" in wide
    assert "| Dense | 1,234 | 51.0 ± 1.0 | 60 | 51.0 ± 1.0 | 60 |" in rows


def test_characters(tmp_path, monkeypatch):
    """A bank of letters in two faces of matplotlib, of which one is held out."""
    faces = [("dejavu", f"DejaVu{name}.ttf", 0, "free") for name in ("Sans", "Serif")]
    monkeypatch.setattr(characters, "FACES", faces)
    monkeypatch.setattr(characters, "HELD_OUT", "DejaVuSerif.ttf")
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    bank = characters.make_bank(folder, "aBé\ue000")
    assert bank.concepts.tolist() == ["a", "B", "é"] and bank.num_concepts == 3
    for split in ("train", "held_out_styles"):
        assert bank.rows(split)[1].tolist() == [0, 1, 2]
    assert bank.rows("held_out_styles")[0].tolist() == [3, 4, 5]
    # Ink in the middle, of 16 greys
    ink = bank.pictures > 0
    assert ink.any((1, 2)).all() and not (bank.pictures % 17).any()
    rows, columns = np.nonzero(ink[1])
    assert abs(rows.min() + rows.max() - 31) <= 1
    assert abs(columns.min() + columns.max() - 31) <= 1
    monkeypatch.setattr(characters, "common_characters", lambda: "abc")
    characters.main([f"--fonts={folder}", f"--bank={tmp_path / 'bank.npz'}"])
    assert load(tmp_path / "bank.npz").concepts.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="apt-get install fonts-dejavu"):
        characters.make_bank(tmp_path, "a")


def test_common_characters():
    found = characters.common_characters()
    assert len(found) == len(set(found)) == 3755 and "的" in found
