"""Comparisons whose tolerances grow with the numbers compared."""

import numpy as np


def assert_near(actual, expected, rtol=1e-7, atol=0.0, err_msg=""):
    """`assert_allclose` with `atol` in units of the largest number expected.

    Processors add in different orders, and so do builds of one backend. A sum of terms
    near 200 then differs by about 1e-5, whatever it comes to: an element of a gradient
    near zero has the error of its large neighbours. With `atol=1e-5` as it stands such
    a test is green on one machine and red on the next. For numbers up to 1 nothing
    changes.
    """
    np.testing.assert_allclose(
        actual, expected, rtol=rtol, atol=atol * magnitude(expected), err_msg=err_msg
    )


def assert_sum_near(terms, expected, rtol=1e-7, atol=0.0):
    """A sum is near a number, with `atol` in units of the sum of absolute terms.

    A derivative along a direction is such a sum: its terms cancel, their errors do not.
    """
    unit = max(1.0, np.abs(np.asarray(terms, "float64")).sum())
    np.testing.assert_allclose(np.sum(terms), expected, rtol=rtol, atol=atol * unit)


def difference(actual, expected):
    """The largest difference, in units of the largest number expected."""
    return float(np.abs(np.asarray(actual) - expected).max() / magnitude(expected))


def magnitude(expected):
    """The largest finite absolute value in an array, or 1 if that is more."""
    expected = np.abs(np.asarray(expected, "float64"))
    return max(1.0, expected.max(where=np.isfinite(expected), initial=0.0))
