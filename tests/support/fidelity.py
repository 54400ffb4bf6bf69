"""Records how far the reference tests are from the released code's numbers.

    KERAS_BACKEND=torch python -m pytest -p tests.support.fidelity tests/reference

writes a part of `experiments/fidelity.json`: of each file of reference numbers how many
arrays were compared, how many of them exactly (masks and indices), and the largest
`|a - b| / (1 + |b|)` of the others. `python -m experiments.pages` makes a table of it.
"""

import importlib.metadata
import json
from pathlib import Path

import keras
import numpy as np

from tests.support import references

KEPT = Path(__file__).resolve().parents[2] / "experiments" / "fidelity.json"
FILES = {}


def pytest_configure(config):
    check = references.Reference.check

    def recorded(self, key, actual, tolerance=2e-5):
        check(self, key, actual, tolerance)
        expected, actual = self.given(key), references.to_numpy(actual)
        entry = FILES.setdefault(self.name, {})
        if expected.dtype.kind in "bi":
            entry[key] = None
        else:
            difference = np.abs(actual - expected) / (1 + np.abs(expected))
            entry[key] = max(entry.get(key) or 0.0, float(difference.max(initial=0)))

    references.Reference.check = recorded


def pytest_sessionfinish(session, exitstatus):
    if exitstatus or not FILES:
        return
    backend = keras.backend.backend()
    files = {}
    for name, arrays in sorted(FILES.items()):
        values = [value for value in arrays.values() if value is not None]
        files[name] = {
            "arrays": len(arrays),
            "exact": len(arrays) - len(values),
            "largest": float(f"{max(values, default=0.0):.1e}"),
        }
    content = {"version": importlib.metadata.version(backend), "files": files}
    kept = json.loads(KEPT.read_text(encoding="utf-8")) | {backend: content}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
