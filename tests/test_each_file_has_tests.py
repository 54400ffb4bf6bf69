"""Each file of the library has a test file where a reader looks for it.

It is `tests/ROOM/test_NAME.py`, or another file of tests whose docstring names the file
between backticks, as in "ROOM/NAME.py".
"""

import ast
import pathlib
import re

import pytest

from tests import skips

TESTS = pathlib.Path(__file__).parent
PACKAGE = TESTS.parent / "keras_softmoe"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def named_files():
    """Files of the library that docstrings of test files name."""
    for path in TESTS.rglob("test_*.py"):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield from re.findall(r"`(?!tests/|docs/)((?:\w+/)+\w+\.py)`", text)


NAMED = set(named_files())


def without_a_test(room):
    for path in sorted((PACKAGE / room).rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        own = TESTS / room / f"test_{path.stem}.py"
        if not path.name.startswith("__") and file not in NAMED and not own.exists():
            yield file


@pytest.mark.parametrize("room", ROOMS)
def test_each_file_has_a_test_file(room):
    assert list(without_a_test(room)) == []


def test_named_files_exist():
    assert [file for file in sorted(NAMED) if not (PACKAGE / file).exists()] == []


def test_tests_that_are_selected_by_name_exist():
    assert [file for file in skips.RUNS_ON if not list(TESTS.glob(file))] == []
    for file, names in [*skips.ON_ALL.items(), *skips.LONG.items()]:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        names = {re.split(r"[\[@]", name)[0] for name in names} - {"*"}
        assert names <= functions, file
