"""The table of releases says what the logs of their runs say."""

import json

import pytest

from experiments import versions

LOG = """\
============ test session starts ============
releases: backend {backend}, python {python}, keras 3.15.1, numpy 2.5.5, {backend} 1.2
testpaths: tests
tests/a.py 4 passed.

{end}
"""
CLOSING = "=== 1 failed, 440 passed, 9 deselected, 2 errors in 12.30s (0:00:12) ==="


def log(backend="jax", python="3.13.0", end=CLOSING):
    return LOG.format(backend=backend, python=python, end=end)


def test_a_log():
    row = versions.read(log())
    assert row["passed"] == 440 and row["failed"] == 3
    assert row["python"] == "3.13.0" and row["backend"] == "jax" and row["jax"] == "1.2"


@pytest.mark.parametrize("text", ["", log(end=""), log().replace("releases", "r")])
def test_a_run_that_did_not_end(text):
    with pytest.raises(ValueError, match="a closing line. Received: text="):
        versions.read(text)


def test_a_table(tmp_path):
    file = tmp_path / "versions.json"
    file.write_text("[]")
    some = log(python="3.11.7", end="== 5 passed in 1.0s ==").replace("testpaths", "")
    versions.keep("oldest", [some], file)
    versions.keep("newest", [log(), log("torch", "3.11.7")], file)
    # A later run of the same target and minor version takes its place.
    again = log(python="3.13.1", end="== 443 passed in 1.00s ==")
    versions.keep("newest", [again], file)
    assert len(json.loads(file.read_text())) == 3
    rows = [line.strip("| ").split(" | ") for line in versions.table(file).splitlines()]
    assert [row[1] for row in rows[2:]] == ["3.13.1", "3.11.7", "3.11.7"]
    found = [row[5:] for row in rows[2:]]
    assert found[0] == ["1.2: 443 passed", "not run", "not run"]
    assert found[1] == ["not run", "not run", "1.2: 440 passed, **3 failed**"]
    assert found[2] == ["1.2: 5 passed (core)", "not run", "not run"]


def test_the_table_is_put_into_its_page(tmp_path):
    page = tmp_path / "versions.md"
    page.write_text("a\n<!-- versions: begin -->\nold\n<!-- versions: end -->\nb\n")
    versions.write_page(page)
    before, after = "a\n<!-- versions: begin -->\n\n", "\n<!-- versions: end -->\nb\n"
    assert page.read_text() == before + versions.table() + after
