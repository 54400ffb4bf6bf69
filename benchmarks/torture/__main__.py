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

from benchmarks.torture import (
    arguments,
    checkpoints,
    faults,
    foreign,
    long_runs,
    numerics,
    presets,
    routings,
    targets,
)
from benchmarks.torture.campaign import Tally
from keras_softmoe.files import atomic_file

ROOT = pathlib.Path(__file__).parents[2]
DIRECTORY = ROOT / "build" / "torture"
PAGE = pathlib.Path(__file__).with_name("RESULTS.md")
BACKENDS = ("torch", "jax", "tensorflow")
SEED = 1


def _each(on_torch, on_others=None):
    """Numbers of cases by backend; PyTorch, the quickest, has most."""
    on_others = on_torch if on_others is None else on_others
    return {"torch": on_torch, "jax": on_others, "tensorflow": on_others}


# Name -> callable `(tally, cases, seed)`, how many cases there are on each backend in
# the long form, and how many in the short one, which the tests run on one backend.
PARTS = {
    "routings": (routings.routings, _each(3400), 140),
    "numbers in padding": (numerics.masked_tokens, _each(1026, 342), 57),
    "small dtypes": (numerics.small_dtypes, _each(1026, 171), 57),
    "large logits": (numerics.large_logits, _each(1026, 342), 57),
    # PyTorch's compiler wants a C compiler, and takes a minute for each.
    "compiled steps": (numerics.compiled, {"jax": 171, "tensorflow": 171}, 0),
    "calls with a bad argument": (arguments.bad_calls, _each(1200, 300), 200),
    "damaged presets": (presets.damaged_presets, _each(500, 200), 30),
    "damaged routers": (presets.damaged_routers, _each(400, 60), 10),
    "damaged preprocessing": (presets.damaged_preprocessors, _each(100, 20), 10),
    "damaged .keras files": (presets.damaged_keras_files, _each(150, 30), 12),
    "damaged checkpoints": (checkpoints.damaged_own_checkpoints, {"torch": 2000}, 0),
    "kills": (faults.kills, _each(120, 40), 2),
    "full disks": (faults.full_disks, _each(36, 9), 9),
    "places that cannot be written": (faults.unwritable_places, _each(10), 10),
    "targets that are something else": (
        targets.odd_targets,
        {"torch": 128, "jax": 112, "tensorflow": 128},
        0,
    ),
    "three processes at once": (faults.three_at_once, _each(9, 3), 0),
    "graphs over models": (foreign.graphs, _each(176, 44), 8),
    "modules of PyTorch": (foreign.torch_modules, {"torch": 44}, 6),
    "killed trainings": (long_runs.killed_trainings, _each(8), 0),
    "memory of 1,000 calls": (long_runs.flat_memory, _each(1000), 0),
    "two threads": (long_runs.two_threads, _each(50, 10), 2),
}


def cases_of(part, is_short):
    """How many cases of a part there are on this backend; 0 for none."""
    _, long, short = PARTS[part]
    return short if is_short else long.get(keras.backend.backend(), 0)


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
