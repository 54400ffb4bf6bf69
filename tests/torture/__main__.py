"""Run the campaign on the backend of this process, or gather what it found.

python -m tests.torture            all parts; writes build/torture/BACKEND.json
python -m tests.torture PART ...   some of them
python -m tests.torture --tables   tests/torture/RESULTS.md, from all backends
"""

import collections
import json
import pathlib
import sys
import time

import keras

from keras_softmoe.files import replaced_file
from tests.torture.campaign import Tally
from tests.torture.parts import BACKENDS, PARTS, SEED, cases_of

ROOT = pathlib.Path(__file__).parents[2]
DIRECTORY = ROOT / "build" / "torture"
PAGE = pathlib.Path(__file__).with_name("RESULTS.md")


def run(parts):
    """Run parts on this backend; returns the number of failures."""
    file = DIRECTORY / f"{keras.backend.backend()}.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    failures = 0
    for part in parts:
        cases = cases_of(part, is_short=False)
        if not cases:
            continue
        tally, start = Tally(part), time.monotonic()
        PARTS[part][0](tally, cases, SEED)
        found[part] = tally.as_dict()
        with replaced_file(file) as new:
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


def write_tables():
    """Write a page with what the runs on all backends have found."""
    found = {
        backend: json.loads((DIRECTORY / f"{backend}.json").read_text())
        for backend in BACKENDS
        if (DIRECTORY / f"{backend}.json").is_file()
    }
    lines = [
        "# What the hostile campaign found",
        "",
        "Written by `python -m tests.torture`, which `make torture` runs on each "
        f"backend (seed {SEED}). A case ends well, or in a refusal "
        "that names file or argument, value and remedy; anything else is a failure. "
        "Errors of `.keras` files are Keras' own.",
        "",
        "| part | backends | cases | refused, by kind of error | failures | longest "
        "case | most memory of a case |",
        "|---|---|---|---|---|---|---|",
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
        totals.update(cases=cases, refused=refusals.total(), failures=failures)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in refusals.most_common())
        seconds = max(row["longest_case_seconds"] for row in rows)
        megabytes = max(row["largest_case_megabytes"] for row in rows)
        lines.append(
            f"| {part} | {', '.join(ran)} | {cases:,} | {kinds or '0'} | {failures} | "
            f"{seconds:.1f} s | {megabytes:,} MB |"
        )
    lines.append(
        f"| all | | {totals['cases']:,} | {totals['refused']:,} | "
        f"{totals['failures']} | | |"
    )
    with replaced_file(PAGE) as new:
        new.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if "--tables" in sys.argv:
        write_tables()
    else:
        sys.exit(run(sys.argv[1:] or list(PARTS)) > 0)
