"""The table of `experiments/FAMILIES.md`: experts in models of other families.

The tests measure it, one backend after the other:

    for backend in jax tensorflow torch; do
        KERAS_BACKEND=$backend python -m pytest tests/converters/test_add_experts.py \
            --all-families
    done
"""

import json
from pathlib import Path

from keras_softmoe.files import atomic_file

DIRECTORY = Path(__file__).with_name("families")
PAGE = Path(__file__).with_name("FAMILIES.md")
BACKENDS = ("jax", "tensorflow", "torch")

HEAD = """\
# Families

`ksm.converters.add_experts` in a tiny model of each family, with four experts in the
second of two MLPs, of which each token chooses two, with room for all. Measured by
`tests/converters/test_add_experts.py` (`--all-families`).

- MLPs: how many were found.
- experts: a bank (fast; LoRA and int8), or copies of a template, where the MLP has
  another activation than those of Keras, or computes a token from others, too (MiT:
  whole images are routed).
- from dense: the largest difference between the outputs of the new model and those of
  the dense one. The tests accept 1e-5.
- a step: the largest change of an expert's weight in one step of `fit`.
- from file: the largest difference between the outputs of the model after that step and
  those of the one that is read from its `.keras` file. The tests accept 1e-6.

Refused, with the reason: Gemma and others whose blocks compute a gated MLP in their own
code, and causal decoders such as GPT-2 under routers that look at later tokens.
"""
COLUMNS = ("MLPs", "experts", "from dense", "a step", "from file")


def write(backend, rows):
    """Keep what was measured on a backend, and write the page anew.

    Of families that were not measured this time, earlier rows stay.

    Args:
        backend: str.
        rows: dict from families to dicts with a value for each of `COLUMNS`.
    """
    DIRECTORY.mkdir(exist_ok=True)
    rows = {**kept(backend), **rows}
    with atomic_file(DIRECTORY / f"{backend}.json") as file:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    with atomic_file(PAGE) as file:
        file.write_text(page(), encoding="utf-8")


def kept(backend):
    """Return the rows of a backend that were measured."""
    file = DIRECTORY / f"{backend}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def page():
    """The text of the page, from what is kept of each backend."""
    parts = [HEAD]
    for backend in BACKENDS:
        rows = kept(backend)
        if not rows:
            continue
        lines = [
            f"| {backend} | {' | '.join(COLUMNS)} |",
            "|---" * (1 + len(COLUMNS)) + "|",
        ]
        for family, row in rows.items():
            cells = (_cell(row[column]) for column in COLUMNS)
            lines.append(f"| {family} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(value):
    return f"{value:.0e}" if isinstance(value, float) else str(value)
