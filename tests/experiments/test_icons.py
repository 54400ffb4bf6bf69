"""The bank of icons: open sets only, copies on one side, concepts from names."""

import json
import sys

import numpy as np
import pytest

from experiments.icons import __main__ as program, bank as banks, copies, sources
from experiments.icons.concepts import concept_of, style_of, words_of

WORDS = [f"{a}{b}" for a in ("kettle", "parrot", "anchor", "violin") for b in "abcde"]
# Sets 12 and 13 are by one author; another one copies set 0 under other names.
NUM_SETS = 15


def draw(icon):
    """A picture that follows from the body, in a box of its own; blank for "none"."""
    if icon[0] == "none":
        return None
    picture = np.zeros((32, 32), "uint8")
    noise = np.random.default_rng(int(icon[0])).integers(0, 2, (5, 5)) * 255
    picture[4:24, 4:24] = np.kron(noise, np.ones((4, 4)))
    return picture


def write_set(folder, collections, key, bodies, licence="MIT", **info):
    icons = {name: {"body": str(body)} for name, body in bodies.items()}
    parent = next(iter(bodies))
    aliases = {"boiling-water-outline": {"parent": parent}}
    data = {"icons": icons, "suffixes": {"outline": ""}, "aliases": aliases}
    (folder / "json" / f"{key}.json").write_text(json.dumps(data))
    collections[key] = {
        "name": f"Set {key}",
        "author": {"name": f"author of {key}", "url": f"https://example.org/{key}"},
        "license": {"title": licence, "spdx": licence},
        **info,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collection")
    (folder / "json").mkdir()
    found = {}
    for number in range(NUM_SETS - 1):
        bodies = {f"{w}-outline": 1000 * number + i for i, w in enumerate(WORDS)}
        author = {"name": "Twin"} if number in (12, 13) else {"name": f"A {number}"}
        licence = sorted(sources.OPEN_LICENCES)[number % 11]
        write_set(folder, found, f"s{number}", bodies, licence, author=author)
    renamed = {word: index for index, word in enumerate(WORDS)}
    write_set(folder, found, "copy", renamed | {"blank": "none"})
    closed = {word: 77_000 + index for index, word in enumerate(WORDS)}
    for licence in ("CC-BY-SA-4.0", "GPL-3.0", "CC-BY-NC-4.0", "", None):
        write_set(folder, found, f"closed{licence}", closed, licence)
    write_set(folder, found, "colours", closed, palette=True)
    write_set(folder, found, "logos", closed | {"acme": 1}, category="Logos")
    (folder / "collections.json").write_text(json.dumps(found))
    return folder


@pytest.fixture(scope="module")
def bank(folder):
    return banks.make_bank(folder, draw)


def test_only_open_sets_enter(bank, folder):
    licences = json.loads((folder / "collections.json").read_text())
    for key, _, _, licence, _ in bank.sets:
        assert licence == licences[key]["license"]["spdx"]
        assert licence in sources.OPEN_LICENCES
        assert not key.startswith(("closed", "colours", "logos"))
    drawn = {picture.tobytes() for picture in bank.pictures}
    assert not drawn & {draw((77_000 + i,)).tobytes() for i in range(len(WORDS))}
    # The one that copies another has nothing of its own.
    assert set(bank.sets[:, 0]) == {f"s{n}" for n in range(NUM_SETS - 1)}


def test_attributions_have_every_set(bank, tmp_path):
    program.write_page(bank, tmp_path / "page.md")
    rows = (tmp_path / "page.md").read_text().splitlines()
    for number, (_, name, author, licence, _) in enumerate(bank.sets):
        (row,) = (row for row in rows if row.startswith((f"| {name} |", f"| [{name}]")))
        used = (bank.set == number).sum()
        assert row.endswith(f"| {author} | {licence} | {used:,} |") and used


def test_splits(bank):
    rows, labels = zip(*map(bank.rows, banks.SPLITS), strict=True)
    assert sorted(np.concatenate(rows)) == list(range(len(bank.label)))
    assert all(len(of_split) for of_split in rows)
    train, styles, held = rows
    assert not set(bank.family[train]) & set(bank.family[styles])
    assert not bank.held_out[bank.label[np.concatenate([train, styles])]].any()
    assert bank.held_out[bank.label[held]].all()
    assert set(labels[0]) == set(range(bank.num_concepts)) >= set(labels[1])
    assert set(labels[2]) == set(range(bank.held_out.sum()))
    summary = bank.summary()
    assert [summary[split]["icons"] for split in banks.SPLITS] == [*map(len, rows)]
    keys = bank.sets[bank.set][:, 0]
    assert len(set(bank.family[np.isin(keys, ("s12", "s13"))])) == 1


def test_captions_are_all_names_of_a_picture(bank):
    for row in range(len(bank.label)):
        name = bank.concepts[bank.label[row]]
        others = ["boiling water"] if name == WORDS[0] else []
        assert bank.captions_of(row) == [name, *others]


def test_copies_stay_on_one_side(bank):
    first, second, _ = copies.pairs(copies.drawings(bank.pictures))
    assert not len(first) and not len(second)
    # Icons 0, 1 and 2 are copies, and so are 3 and 4, and 5 and 6.
    split = np.array([0, 1, 2, 1, 1, 0, 0])
    label = np.array([0, 0, 5, 1, 1, 2, 3])
    pairs = np.array([[0, 1], [0, 2], [1, 2], [3, 4], [5, 6]]).T
    kept = banks.keep(split, label, *pairs)
    assert kept.tolist() == [True, False, False, True, False, True, True]


def test_copies_are_found_moved_and_scaled():
    picture = draw(("5",))
    smaller = np.zeros((32, 32), "uint8")
    smaller[8:18, 20:30] = picture[4:24:2, 4:24:2]
    pictures = np.stack([picture, draw(("6",)), smaller, np.zeros_like(picture)])
    first, second, similarity = copies.pairs(copies.drawings(pictures))
    assert (first.tolist(), second.tolist()) == ([0], [2]) and similarity > 0.95


def test_a_bank_is_read_as_written(bank, folder, tmp_path):
    banks.write(bank, tmp_path / "bank.npz")
    for other in (banks.load(tmp_path / "bank.npz"), banks.make_bank(folder, draw)):
        assert all(np.array_equal(*pair) for pair in zip(bank, other, strict=True))
    with pytest.raises(ValueError, match="python -m experiments.icons"):
        banks.load(tmp_path / "none.npz")


def test_names_become_concepts():
    style = style_of([f"{word}-light" for word in WORDS], ("", "outline-bold"))
    assert style == {"light", "outline", "bold"}
    assert words_of("traffic-light-2-outline", style) == ("traffic",)
    assert words_of("traffic-light-outline", {"outline"}) == ("traffic", "light")
    assert words_of("user-plus-circle") == ("user", "plus")
    for name in ("letter-a", "123", "a", "brand-acme", "flag-fr", "café"):
        assert not concept_of(words_of(name))
    assert concept_of(("add", "person")) == concept_of(("user", "plus"))
    assert concept_of(("left", "arrow")) == concept_of(("arrow", "left")) != ""


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="collections.json.*Received: folder="):
        sources.read_sets(tmp_path)
    monkeypatch.setattr(sources.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="npm.*--folder FOLDER"):
        sources.fetch(tmp_path)
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(RuntimeError, match="pip install resvg-py"):
        sources.check_renderer()
