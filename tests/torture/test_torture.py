"""The short form of the campaign, and that it can fail."""

import json
import time

import pytest

from tests.support import tiny
from tests.torture import __main__ as program, arguments, campaign, long_runs, parts
from tests.torture.campaign import Tally

pytestmark = [tiny.LOADING, tiny.LOADING_WRONG_WEIGHTS]
SHORT = [part for part in parts.PARTS if parts.cases_of(part, is_short=True)]


@pytest.mark.parametrize("part", SHORT)
def test_short_form(part):
    tally = Tally(part)
    cases = parts.cases_of(part, is_short=True)
    parts.PARTS[part][0](tally, cases, parts.SEED)
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
    long_runs.flat_memory(tally, 5)
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


def test_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "DIRECTORY", tmp_path)
    monkeypatch.setattr(program, "PAGE", tmp_path / "RESULTS.md")

    def part(tally, cases, seed):
        for number in range(cases):
            with tally.case(str(number)):
                if number:
                    raise ValueError("Pass another.")
                raise KeyError(number)

    monkeypatch.setitem(parts.PARTS, "two threads", (part, {"torch": 3}, 0))
    assert program.run(["two threads"]) == 1
    found = json.loads((tmp_path / "torch.json").read_text())["two threads"]
    assert found["cases"] == 3 and found["refusals"] == {"ValueError": 2}
    assert len(found["failures"]) == 1
    program.write_tables()
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| two threads | torch | 3 | 2 ValueError | 1 |" in page
    assert "| all | | 3 | 2 | 1 |" in page
    # Fewer cases leave what is there as it is.
    assert program.run(["two threads"], fraction=0.4) == 1
    program.write_tables(fraction=0.4)
    reduced = (tmp_path / "reduced" / "RESULTS.md").read_text()
    assert "| two threads | torch | 2 | 1 ValueError | 1 |" in reduced
    assert (tmp_path / "RESULTS.md").read_text() == page


def test_numbers_of_cases():
    """The campaign is as large as it is said to be."""
    cases = {name: sum(long.values()) for name, (_, long, _) in parts.PARTS.items()}
    assert cases["routings"] >= 10_000 and cases["kills"] >= 200
    assert cases["calls with a bad argument"] >= 500
    assert cases["damaged presets"] + cases["damaged checkpoints"] >= 1000
    long = parts.PARTS["routings"][1]
    assert all(long[backend] >= 3000 for backend in parts.BACKENDS)
