"""Run the campaign on the backend of this process, or gather what it found.

python -m benchmarks.torture            all parts; writes build/torture/BACKEND.json
python -m benchmarks.torture PART ...   some of them, beside what is there of others
python -m benchmarks.torture --tables   benchmarks/torture/RESULTS.md, from all backends

With `--fraction F` there are as many cases as a fraction of those of the long form, at
least one of each part, and all is written to build/torture/reduced.
"""

import argparse
import collections
import json
import math
import pathlib
import sys
import time

import keras

from benchmarks.torture.campaign import Tally
from benchmarks.torture.parts import BACKENDS, PARTS, SEED, cases_of
from keras_softmoe.files import atomic_file

ROOT = pathlib.Path(__file__).parents[2]
DIRECTORY = ROOT / "build" / "torture"
PAGE = pathlib.Path(__file__).with_name("RESULTS.md")


def run(parts=(), fraction=1.0):
    """Run parts, or all of them, on this backend; returns the number of failures."""
    file = _directory(fraction) / f"{keras.backend.backend()}.json"
    found = json.loads(file.read_text()) if parts and file.is_file() else {}
    failures = 0
    for part in parts or PARTS:
        cases = cases_of(part, is_short=False)
        if not cases:
            continue
        cases = math.ceil(cases * fraction)
        tally, start = Tally(part), time.monotonic()
        PARTS[part][0](tally, cases, SEED)
        found[part] = tally.as_dict()
        with atomic_file(file) as new:
            new.write_text(json.dumps(found, indent=1))
        failures += len(tally.failures)
        print(
            f"{keras.backend.backend()}: {part}: {tally.cases} cases, "
            f"{sum(tally.refusals.values())} refused, {len(tally.failures)} failures, "
            f"{time.monotonic() - start:.0f} s",
            *tally.failures,
            sep="\n    ",
            flush=True,
        )
    return failures


def write_tables(fraction=1.0):
    """Write a page with what the runs on all backends have found."""
    directory = _directory(fraction)
    page = PAGE if fraction == 1 else directory / PAGE.name
    found = {
        backend: json.loads((directory / f"{backend}.json").read_text())
        for backend in BACKENDS
        if (directory / f"{backend}.json").is_file()
    }
    lines = [
        "# What the hostile campaign found",
        "",
        "Written by `python -m benchmarks.torture`, which `make torture` runs on each "
        f"backend (seed {SEED}). A case ends well, or in a refusal "
        "that names file or argument, value and remedy; anything else is a failure. "
        "Errors of `.keras` files are Keras' own, `SystemExit` is that of `argparse` "
        "with its usage. Times are those of the clock, beside other work.",
        "",
        "| part | backends | cases | refused, by kind of error | failures | longest "
        "case | most memory of a case | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    totals = collections.Counter()
    for part in PARTS:
        ran = [backend for backend, of_parts in found.items() if part in of_parts]
        rows = [found[backend][part] for backend in ran]
        if not rows:
            continue
        refusals = collections.Counter()
        for row in rows:
            refusals.update(row["refusals"])
        cases = sum(row["cases"] for row in rows)
        failures = sum(len(row["failures"]) for row in rows)
        minutes = sum(row["seconds"] for row in rows) / 60
        totals.update(cases=cases, refused=refusals.total(), failures=failures)
        totals["minutes"] += minutes
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in refusals.most_common())
        seconds = max(row["longest_case_seconds"] for row in rows)
        megabytes = max(row["largest_case_megabytes"] for row in rows)
        lines.append(
            f"| {part} | {', '.join(ran)} | {cases:,} | {kinds or '0'} | {failures} | "
            f"{seconds:.1f} s | {megabytes:,} MB | {minutes:.1f} min |"
        )
    lines.append(
        f"| all | | {totals['cases']:,} | {totals['refused']:,} | "
        f"{totals['failures']} | | | {totals['minutes']:.0f} min |"
    )
    with atomic_file(page) as new:
        new.write_text("\n".join(lines) + "\n")


def _directory(fraction):
    return DIRECTORY if fraction == 1 else DIRECTORY / "reduced"


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--fraction", type=float, default=1.0)
    arguments = parser.parse_args()
    if not 0 < arguments.fraction <= 1 or not set(arguments.parts) <= set(PARTS):
        parser.error(f"The parts are {', '.join(PARTS)}; a fraction is at most 1.")
    if arguments.tables:
        write_tables(arguments.fraction)
    else:
        sys.exit(run(arguments.parts, arguments.fraction) > 0)


if __name__ == "__main__":
    main()
