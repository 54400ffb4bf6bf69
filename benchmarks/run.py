"""All benchmarks on one backend, into one file from which tables are made.

    KERAS_BACKEND=jax python benchmarks/run.py --shapes paper
    KERAS_BACKEND=jax python benchmarks/run.py --sections layers --layers soft_128x1
    python -m experiments.pages

The file has a part for each backend, and is written again after each section, so what
was measured survives. Sections that are not measured this time stay as they were, if
machine and versions are the same.
"""

import argparse
import json
import pathlib
import time

import keras
import layers
import memory
import models
import reference
import report
import rivals

RESULTS = pathlib.Path(__file__).parent / "results" / "cpu.json"

# Memory comes first: its processes need the accelerator for themselves.
SECTIONS = {
    "memory": memory.measure_all,
    "layers": layers.measure_all,
    "reference": reference.measure_all,
    "models": models.measure_all,
    "scaling": layers.measure_scaling,
}


def measure(options):
    """Measure sections and write the file after each."""
    started = time.perf_counter()
    sections = {}
    of_rivals = {**rivals.described(), **reference.described()}
    name = options.key or keras.backend.backend()
    for section in options.sections:
        print(f"{section}, after {time.perf_counter() - started:.0f} s", flush=True)
        sections[section] = report.shown(SECTIONS[section](options))
        # Now that the processes of `memory` are gone this one may touch the device.
        content = {**report.heading(options), "rivals": of_rivals}
        found = {}
        if options.json.exists():
            found = json.loads(options.json.read_text(encoding="utf-8"))
        earlier = found.get(name, {"sections": {}})
        kept = earlier.pop("sections")
        if earlier != json.loads(json.dumps(content)):
            kept = {}
        found[name] = {**content, "sections": {**kept, **sections}}
        report.write_json(options.json, found)
    print(f"{options.json}, after {time.perf_counter() - started:.0f} s")


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS)
    )
    parser.add_argument("--shapes", choices=models.SHAPES, default="small")
    parser.add_argument(
        "--layers", nargs="+", choices=layers.ROUTERS, default=list(layers.ROUTERS)
    )
    parser.add_argument(
        "--rounds",
        type=report.at_least_one,
        default=20,
        help="how often each contestant runs at most",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="time after which no contest starts a fourth round",
    )
    parser.add_argument(
        "--dtype", default="float32", help="dtype policy, such as bfloat16"
    )
    parser.add_argument(
        "--jit-compile", action="store_true", help="compile with XLA on TensorFlow"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, default=RESULTS, help="file of the results"
    )
    parser.add_argument("--key", help="their name in the file [the backend]")
    options = parser.parse_args(arguments)
    keras.config.set_dtype_policy(options.dtype)
    measure(options)


if __name__ == "__main__":
    main()
