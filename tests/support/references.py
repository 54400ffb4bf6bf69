"""Reference numbers: inputs and outputs of the reference code, by case."""

import functools
import json
import pathlib
import re

import keras
import numpy as np

from tests.support.close import assert_near

# Where they come from is told in the README.md there.
NUMBERS = pathlib.Path(__file__).parents[1] / "reference" / "numbers"


def to_numpy(x):
    """NumPy array of a tensor; bfloat16 becomes float32."""
    if keras.ops.is_tensor(x) and keras.backend.standardize_dtype(x.dtype) in (
        "bfloat16",
        "float16",
    ):
        x = keras.ops.cast(x, "float32")
    return keras.ops.convert_to_numpy(x)


@functools.cache
def names():
    """Dict from the name of each case to the file that holds its arrays."""
    found = {}
    for path in sorted(NUMBERS.glob("*.npz")):
        with np.load(path) as file:
            found |= dict.fromkeys((key.split("/")[0] for key in file.files), path)
    return found


@functools.cache
def _read(name):
    """Read-only arrays of a case, and its configuration."""
    with np.load(names()[name]) as file:
        arrays = {
            key.removeprefix(f"{name}/"): file[key]
            for key in file.files
            if key.startswith(f"{name}/")
        }
    for array in arrays.values():
        array.flags.writeable = False
    return arrays, str(arrays.pop("config"))


class Reference:
    """Arrays of one case, remembering which of them a test has looked at.

    `given` reads an input, `check` compares an output, `leave` sets outputs aside
    that the public API cannot express, and `finish` fails on any array that was none
    of the three, so that no number is passed over in silence.

    Attributes:
        name: Name of the case, such as `a_soft_base`.
        config: Dict, the configuration that the numbers were computed with.
    """

    def __init__(self, name):
        self.name = name
        self._arrays, config = _read(name)
        self.config = json.loads(config)
        self._seen = set()

    def __contains__(self, key):
        return key in self._arrays

    @property
    def keys(self):
        return list(self._arrays)

    def given(self, key):
        """Array to compute with."""
        self._seen.add(key)
        return self._arrays[key]

    def given_under(self, prefix):
        """Dict of all the arrays below `prefix`, which is cut off their names."""
        keys = [k for k in self._arrays if k.startswith(prefix)]
        return {k.removeprefix(prefix): self.given(k) for k in keys}

    def check(self, key, actual, tolerance=2e-5):
        """Compares by |a - b| <= tolerance * (1 + |b|); masks and indices exactly."""
        expected, actual = self.given(key), to_numpy(actual)
        if expected.dtype.kind in "bi":
            np.testing.assert_array_equal(actual, expected, err_msg=key)
        else:
            assert_near(actual, expected, rtol=tolerance, atol=tolerance, err_msg=key)

    def leave(self, inexpressible):
        """Sets aside the arrays that a table of exceptions names.

        Args:
            inexpressible: Dict from a pair of patterns, of the whole name of the case
                and of the whole array name, to the reason.
        """
        for file_pattern, key_pattern in inexpressible:
            if re.fullmatch(file_pattern, self.name):
                self._seen |= {k for k in self._arrays if re.fullmatch(key_pattern, k)}

    def finish(self, prefix=""):
        """Fails if an array below `prefix` was not looked at."""
        passed_over = [
            k for k in self._arrays if k.startswith(prefix) and k not in self._seen
        ]
        assert not passed_over, f"not compared: {passed_over}"
