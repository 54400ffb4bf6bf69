"""Tables of what tests measure: exports by router, and experts in other families.

The tests keep what they measure in `measured.json`, one backend after the other; the
site shows it on its page on fidelity.

    for backend in jax tensorflow torch; do
        export KERAS_BACKEND=$backend
        python -m pytest tests/exporting --all-exports
        python -m pytest tests/converters/test_add_experts.py --all-families
        python -m pytest tests/converters/test_tasks_with_experts.py --all-families
    done
"""

import json
from pathlib import Path

from keras_softmoe.files import atomic_file

KEPT = Path(__file__).with_name("measured.json")

EXPORTS = """\
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
FAMILIES = """\
`ksm.converters.add_experts` in a tiny model of each family, with four experts in the
second of two MLPs, of which each token chooses two, with room for all; then in tasks of
KerasHub, named with the Transformer inside. Measured by
`tests/converters/test_add_experts.py` and `test_tasks_with_experts.py`
(`--all-families`).

- MLPs: how many were found.
- experts: a bank (fast; LoRA and int8), or copies of a template, where the MLP has
  another activation than those of Keras, or computes a token from others, too (MiT:
  whole images are routed).
- from dense: the largest difference between the outputs of the new model and those of
  the dense one. The tests accept 1e-5.
- a step: the largest change of an expert's weight in one step of `fit`.
- from file: the largest difference between the outputs of the model after that step and
  those of the one that is read from its `.keras` file. The tests accept 1e-6.

Refused, with the reason: blocks that compute a gated MLP in their own code, but for the
decoders named in the cookbook, and causal decoders under routers that look at later
tokens.
"""
COLUMNS = ("MLPs", "experts", "from dense", "a step", "from file")


def write_exports(backend, found):
    """Keep what was measured on a backend.

    Args:
        backend: str.
        found: dict from pairs of router and format to the largest difference.
    """
    kept = read()
    kept["exports"][backend] = [
        {"router": router, "format": format, "difference": float(f"{error:.1e}")}
        for (router, format), error in found.items()
    ]
    _write(kept)


def write_families(backend, rows):
    """Keep what was measured on a backend; rows of other families stay.

    Args:
        backend: str.
        rows: dict from families to dicts with a value for each of `COLUMNS`.
    """
    rounded = {
        family: {
            name: float(f"{value:.1e}") if isinstance(value, float) else value
            for name, value in row.items()
        }
        for family, row in rows.items()
    }
    kept = read()
    kept["families"][backend] = {**kept["families"].get(backend, {}), **rounded}
    _write(kept)


def read():
    """Return what is kept: `"exports"` and `"families"`, both by backend."""
    return json.loads(KEPT.read_text(encoding="utf-8"))


def _write(kept):
    with atomic_file(KEPT) as file:
        file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def exports():
    """How to read the tables of exports, and one for each backend, Markdown."""
    parts = [EXPORTS]
    for backend, rows in read()["exports"].items():
        cells = {(row["router"], row["format"]): row["difference"] for row in rows}
        formats = list(dict.fromkeys(format for _, format in cells))
        lines = [
            [router, *(f"{cells[router, format]:.0e}" for format in formats)]
            for router in dict.fromkeys(router for router, _ in cells)
        ]
        parts.append(_table([f"from {backend}", *formats], lines))
    return "\n".join(parts)


def families():
    """How to read the tables of families, and one for each backend, Markdown."""
    parts = [FAMILIES]
    for backend, rows in read()["families"].items():
        lines = [
            [family, *(_cell(row[column]) for column in COLUMNS)]
            for family, row in rows.items()
        ]
        parts.append(_table([backend, *COLUMNS], lines))
    return "\n".join(parts)


def _table(heads, lines):
    lines = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(value):
    return f"{value:.0e}" if isinstance(value, float) else str(value)
