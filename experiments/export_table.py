"""The table of `experiments/EXPORTS.md`: which router runs in which format.

The tests measure it, one backend after the other:

    for backend in jax tensorflow torch; do
        KERAS_BACKEND=$backend python -m pytest tests/exporting --all-exports
    done
"""

import json
from pathlib import Path

from keras_softmoe.files import atomic_file

DIRECTORY = Path(__file__).with_name("exports")
PAGE = Path(__file__).with_name("EXPORTS.md")
BACKENDS = ("jax", "tensorflow", "torch")

HEAD = """\
# Exports

`model.export(filepath, format)`, see `ksm.exporting.export_model`. The largest
difference between the outputs of a file, run by its own runtime in a process without
this library, and those of the model on the backend it was exported from, for batches of
1, 3 and 16 images that are routed in groups of four. Measured by `tests/exporting`
(`--all-exports`), which accepts 1e-4.

A format is written by one backend: SavedModel, ONNX, LiteRT and OpenVINO by TensorFlow,
`.pt2` by PyTorch. From another one the model goes there through a process of its own.

What is refused, with the reason and the way that works: routing at random; groups of
the whole batch without a fixed `input_signature`; half precision in ONNX, LiteRT and
OpenVINO; quantized models in LiteRT (its converter fails) and OpenVINO (its results are
wrong), int4 in ONNX (it would be stored as float32); images of another size than the
model's in a `.pt2` file with preprocessing.

An int8 model rounds its inputs, too, where a difference in the last bit may be one of a
whole step: a file differs from the model as two backends do.
"""


def write(backend, found):
    """Keep what was measured on a backend, and write the page anew.

    Args:
        backend: str.
        found: dict from pairs of router and format to the largest difference.
    """
    DIRECTORY.mkdir(exist_ok=True)
    rows = [
        {"router": router, "format": format, "difference": float(f"{error:.1e}")}
        for (router, format), error in found.items()
    ]
    with atomic_file(DIRECTORY / f"{backend}.json") as file:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    with atomic_file(PAGE) as file:
        file.write_text(page(), encoding="utf-8")


def page():
    """The text of the page, from what is kept of each backend."""
    parts = [HEAD]
    for backend in BACKENDS:
        file = DIRECTORY / f"{backend}.json"
        if not file.exists():
            continue
        cells = {
            (row["router"], row["format"]): row["difference"]
            for row in json.loads(file.read_text(encoding="utf-8"))
        }
        formats = list(dict.fromkeys(format for _, format in cells))
        rows = [
            f"| from {backend} | {' | '.join(formats)} |",
            "|---" * (1 + len(formats)) + "|",
        ]
        for router in dict.fromkeys(router for router, _ in cells):
            found = (f"{cells[router, format]:.0e}" for format in formats)
            rows.append(f"| {router} | {' | '.join(found)} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)
