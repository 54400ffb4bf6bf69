"""Smaller grids: of several parameters each value once, not each combination."""

import itertools


def parameters(item):
    """Set of pairs of a collected test: names of its parameters and their values."""
    callspec = getattr(item, "callspec", None)
    return {(k, repr(v)) for k, v in callspec.params.items()} if callspec else set()


def covering(items):
    """Tests that together have each value of each parameter of their function.

    Args:
        items: list of collected tests, those of one function next to each other.

    Returns:
        Set of the items that are kept. Greedy: of the tests of one function the next is
        the one with the most values that no test before it had.
    """
    kept = set()
    for _, tests in itertools.groupby(items, key=lambda i: (i.path, i.originalname)):
        tests = list(tests)
        open_values = set().union(*map(parameters, tests))
        if not open_values:
            kept.update(tests)
        while open_values:
            best = max(tests, key=lambda test: len(parameters(test) & open_values))
            open_values -= parameters(best)
            kept.add(best)
    return kept
