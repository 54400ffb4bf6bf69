"""All benchmarks on one backend, into one file from which tables are made.

    KERAS_BACKEND=jax python benchmarks/run.py --shapes paper
    python benchmarks/tables.py

The file is written again after each section, so what was measured survives. Sections
that are not measured this time stay as they were, if machine and versions are the same.
"""

import json
import pathlib
import time

import keras
import layers
import memory
import models
import overheads
import reference
import report
import rivals
import scaling

RESULTS = pathlib.Path(__file__).parent / "results"

# Memory comes first: its processes need the accelerator for themselves.
SECTIONS = {
    "memory": memory.measure_all,
    "layers": layers.measure_all,
    "reference": reference.measure_all,
    "overheads": overheads.measure_all,
    "models": models.measure_all,
    "scaling": scaling.measure_all,
}


def measure(options, file):
    """Measure sections and write the file after each."""
    started = time.perf_counter()
    sections = {}
    of_rivals = {**rivals.described(), **reference.described()}
    for name in options.sections:
        print(f"{name}, after {time.perf_counter() - started:.0f} s", flush=True)
        sections[name] = report.shown(SECTIONS[name](options))
        # Now that the processes of `memory` are gone this one may touch the device.
        content = report.heading(options)
        content["rivals"] = of_rivals
        content["sections"] = {**kept(file, content), **sections}
        report.write_json(file, content)
    print(f"{file}, after {time.perf_counter() - started:.0f} s")


def kept(file, content):
    """Sections that an earlier run under the same conditions left in the file."""
    if not file.exists():
        return {}
    earlier = json.loads(file.read_text(encoding="utf-8"))
    sections = earlier.pop("sections")
    now = json.loads(json.dumps({k: v for k, v in content.items() if k != "sections"}))
    return sections if earlier == now else {}


def main(arguments=None):
    """Command line: see `--help`."""
    parser = report.command_line(__doc__, models.SHAPES)
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS)
    )
    options = parser.parse_args(arguments)
    keras.config.set_dtype_policy(options.dtype)
    file = options.json
    if file is None:
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"{keras.backend.backend()}.json"
    measure(options, pathlib.Path(file))


if __name__ == "__main__":
    main()
