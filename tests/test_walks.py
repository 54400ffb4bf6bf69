"""The walks of `docs/concepts/walks.md` lead through files and functions that exist."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "docs/concepts/walks.md").read_text(encoding="utf-8")
WALKS = {
    title: re.findall(r"^\| `([\w/]+\.py)` \| (.*?) \|", rows, re.M)
    for title, rows in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
}


def names_in(body, prefix=""):
    """Functions and classes of a file, and the methods of its classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from names_in(node.body, f"{node.name}.")


@pytest.mark.parametrize("title", WALKS)
def test_a_walk(title):
    files = [file for file, _ in WALKS[title]]
    assert len(files) > 7 and len(set(files)) == len(files)
    for file, functions in WALKS[title]:
        source = (ROOT / "keras_softmoe" / file).read_text(encoding="utf-8")
        found = set(names_in(ast.parse(source).body))
        assert set(re.findall(r"`(.*?)`", functions)) <= found, file


def test_all_walks_are_read():
    assert len(WALKS) == 4
