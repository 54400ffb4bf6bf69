"""Tolerances of tests grow with the numbers compared (`tests/support/close.py`)."""

import ast
import pathlib

import numpy as np
import pytest

from tests.support.close import assert_near, difference

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("scale", [0.01, 1.0, 200.0])
def test_an_error_is_measured_by_the_largest_number(scale):
    expected = scale * np.array([1.0, 0.0, np.nan, -np.inf])
    unit = max(1.0, scale)
    for error, accepted in ((0.9, True), (1.1, False)):
        actual = expected + 1e-5 * error * np.array([0.0, unit, 0.0, 0.0])
        assert (difference(actual[:2], expected[:2]) < 1e-5) == accepted
        if accepted:
            assert_near(actual, expected, atol=1e-5)
        else:
            with pytest.raises(AssertionError):
                assert_near(actual, expected, atol=1e-5)


def test_a_difference_that_is_no_number_is_not_small():
    with pytest.raises(AssertionError):
        assert_near([1.0, np.nan], [1.0, 2.0], atol=1.0)
    assert not difference([1.0, np.nan], [1.0, 2.0]) < 1.0
    assert difference([0.0, 1e-3], [200.0, 0.0]) == 1.0


def absolute(path):
    """The calls of a file that compare with an absolute tolerance."""
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("allclose", "isclose"))
    ]
    return [
        f"{path.relative_to(TESTS)}:{call.lineno}"
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "atol" and ast.unparse(keyword.value) != "0"
    ]


def test_every_tolerance_grows_with_the_numbers():
    files = set(TESTS.rglob("*.py")) - {TESTS / "support" / "close.py"}
    assert [call for path in sorted(files) for call in absolute(path)] == []
