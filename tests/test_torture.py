"""The short form of the campaign, and that it can fail."""

import time

import pytest

from benchmarks.torture import __main__ as program, arguments, campaign, long_runs
from benchmarks.torture.campaign import Tally
from tests.support import tiny

pytestmark = [tiny.LOADING, tiny.LOADING_WRONG_WEIGHTS]
SHORT = [part for part in program.PARTS if program.cases_of(part, is_short=True)]


@pytest.mark.parametrize("part", SHORT)
def test_short_form(part):
    tally = Tally(part)
    cases = program.cases_of(part, is_short=True)
    program.PARTS[part][0](tally, cases, program.SEED)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.cases >= cases


def test_targets_take_good_arguments():
    tally = Tally("calls")
    arguments.good_calls(tally)
    assert not tally.failures


def test_a_killed_training_ends_like_another():
    tally = Tally("training")
    long_runs.killed_training(tally, 100, 60)
    assert not tally.failures and tally.cases == 4


def test_memory_stays():
    tally = Tally("memory")
    long_runs.flat_memory(tally, 5, 0)
    assert not tally.failures


def test_what_counts_as_a_failure(monkeypatch):
    monkeypatch.setattr(campaign, "MEGABYTES", 100)
    tally = Tally("made up")
    with tally.case("good"):
        pass
    with tally.case("refused", mentions=["size"]):
        raise ValueError("`size` must be positive. Received: size=0. Pass such an int.")
    assert not tally.failures
    with tally.case("no name", mentions=["size"]):
        raise ValueError("Pass another.")
    with tally.case("no remedy"):
        raise ValueError("No.")
    with tally.case("endless"):
        raise ValueError("Pass another than " + "x" * 10**4)
    with tally.case("another error"):
        raise KeyError("size")
    with tally.case("wrong"):
        assert not tally.cases
    with tally.case("for ever", seconds=0.05):
        while True:
            time.sleep(0.01)
    kept = []
    with tally.case("too large"):
        kept.append(bytearray(200 << 20))
    kept.clear()
    assert [line.split(": ")[1] for line in tally.failures] == [
        *("no name", "no remedy", "endless", "another error", "wrong", "for ever"),
        "too large",
    ]
    assert tally.cases == 9 and tally.refusals == {"ValueError": 4}


def test_numbers_of_cases():
    """The campaign is as large as it is said to be."""
    cases = {name: sum(long.values()) for name, (_, long, _) in program.PARTS.items()}
    assert cases["routings"] >= 10_000 and cases["kills"] >= 200
    assert cases["calls with a bad argument"] >= 500
    assert cases["damaged presets"] + cases["damaged checkpoints"] >= 1000
    long = program.PARTS["routings"][1]
    assert all(long[backend] >= 3000 for backend in program.BACKENDS)
