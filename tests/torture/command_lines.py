"""Bad arguments and damaged directories for the command lines of the experiments.

Nothing may be trained before it is refused: hours of work would be lost.
"""

import contextlib
import io
import json
import pathlib
import shutil
import tempfile

import numpy as np

from experiments.router_study import __main__ as study, runner
from experiments.upcycling import __main__ as upcycling
from tests.torture.damage import flip_bits, overwrite, truncate

# Program -> callable, the options that name a choice, and two files of its directory:
# the settings that it is kept to, and a finished run.
PROGRAMS = {
    "router_study": (
        study.main,
        ("--scale", "--studies"),
        ("scale.json", "cells/dense_seed0.json"),
    ),
    "upcycling": (
        upcycling.main,
        ("--plan", "--variants"),
        ("plan.json", "cells/start_seed0.json"),
    ),
}
_CHOICES = ("x", "", "smal", "small smoke", "-1", "None", "a" * 10**5, "../small")
_SEEDS = ("a", "1.5", "-1", "99", "0 99", "9" * 50, "nan", "", "1e3", "0,1")
_NAMES = ("--wrk", "--seed=0 --x", "positional", "--work", "--output", "-w")
_JSON = ("", "{", "[]", "null", "3", "{}", '{"results": 1}', "NaN", "[" * 10**5)


class Trained(AssertionError):
    """Something was trained."""


def bad_command_lines(tally, num_calls, seed):
    """Call the experiments with something wrong; a case is a call."""
    calls = [
        (program, kind, value)
        for program, (_, choices, _) in PROGRAMS.items()
        for kind, values in {
            **dict.fromkeys(choices, _CHOICES),
            "--seeds": _SEEDS,
            "": _NAMES,
            "--work": ("file", "file/below", "a" * 300),
            "--output": ("file", "file/below", "a" * 300),
            "damage": _JSON,
            "bits": range(len(_JSON)),
        }.items()
        for value in values
    ]
    order = np.random.default_rng(seed).permutation(len(calls))
    with tempfile.TemporaryDirectory() as folder, _no_training():
        folder = pathlib.Path(folder)
        (folder / "file").touch()
        for number in range(num_calls):
            program, kind, value = calls[order[number % len(calls)]]
            rng = np.random.default_rng((seed, number))
            _call(tally, folder, program, kind, value, rng)


def _call(tally, folder, program, kind, value, rng):
    main, _, files = PROGRAMS[program]
    work = folder / "work"
    if kind in ("damage", "bits"):
        file = _begun(main, work, files)[rng.integers(2)]
        if kind == "damage":
            file.write_text(value)
        else:
            (flip_bits, truncate, overwrite)[value % 3](file, rng, None)
        arguments, mentions = ["--work", str(work)], [str(work)]
    else:
        arguments = ["--work", str(work), *([kind] if kind else [])]
        arguments += value.split(" ")
        mentions = [kind.strip("-") or value.split(" ")[-1]]
        if kind in ("--work", "--output"):
            arguments[-1] = str(folder / value)
            mentions = [value[:50]]
    name = f"{program} {kind} {str(value)[:20]!r}"
    with tally.case(name, mentions=mentions, seconds=30):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                main(arguments)
        except SystemExit as ended:
            # That of `argparse`, which shows what is accepted.
            assert ended.code == 2 and "usage: python -m" in said.getvalue()
            assert "error: " in said.getvalue()
            tally.refusals["SystemExit"] += 1
        except Trained:
            # A damaged file may still be one: then the next cell is begun.
            assert kind == "bits", "was accepted"
        else:
            raise AssertionError("was accepted")
    shutil.rmtree(work, ignore_errors=True)


def _begun(main, work, files):
    """Begin an experiment, and give it a finished run; returns paths of its files."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Trained):
        main(["--work", str(work)])
    kept_to, cell = (work / file for file in files)
    assert kept_to.is_file()
    cell.parent.mkdir(exist_ok=True)
    cell.write_text(json.dumps({"results": {}, "times": {}}))
    return kept_to, cell


@contextlib.contextmanager
def _no_training():
    """Scope in which nothing can be trained."""

    def trained(*arguments, **kwargs):
        raise Trained(arguments[0].name)

    before = runner.finish, upcycling.finish
    runner.finish = upcycling.finish = trained
    try:
        yield
    finally:
        runner.finish, upcycling.finish = before
