"""Docstrings and messages are in plain English of the field."""

import ast
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "keras_softmoe"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
# A noun of the field says more.
VAGUE = re.compile(r"\bwhat\b", re.IGNORECASE)
WORDS = re.compile(
    r"\b(seat(s|ed)?|told|whoever|of then|asked for|last words)\b", re.IGNORECASE
)


def docstrings(tree):
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in map(ast.get_docstring, nodes) if text]


@pytest.mark.parametrize("file", FILES)
def test_docstrings_and_messages(file):
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    heads = [text.partition("\n")[0] for text in docstrings(tree)]
    assert [head for head in heads if VAGUE.search(head)] == []
    # Docstrings and all other texts, messages of errors among them.
    texts = [
        " ".join(node.value.split())
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [text for text in texts if WORDS.search(text)] == []
