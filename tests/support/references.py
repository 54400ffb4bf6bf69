"""Reference numbers: inputs and outputs of the reference code, by case."""

import functools
import json
import pathlib
import re
import zipfile

import keras
import numpy as np

from keras_softmoe import ops, routers
from tests.reference import INEXPRESSIBLE
from tests.support import twins
from tests.support.close import assert_near

# Where they come from is told in the README.md there.
NUMBERS = pathlib.Path(__file__).parents[1] / "reference" / "numbers"


def unpack_checkpoints(folder):
    """Write the files of the three checkpoints `ckpt`, `misc_ckpt_1234`, `sub_ckpt`."""
    with zipfile.ZipFile(NUMBERS / "checkpoint_vmoe_tiny.zip") as archive:
        archive.extractall(folder)


def to_numpy(x):
    """NumPy array of a tensor; bfloat16 becomes float32."""
    if keras.ops.is_tensor(x) and keras.backend.standardize_dtype(x.dtype) in (
        "bfloat16",
        "float16",
    ):
        x = keras.ops.cast(x, "float32")
    return keras.ops.convert_to_numpy(x)


def assert_each_near(actual, expected, rtol=1e-5, atol=1e-5):
    """Tensors under the names that are expected."""
    for name, value in expected.items():
        assert_near(to_numpy(actual[name]), to_numpy(value), rtol, atol, str(name))


def assert_all_equal(found, expected):
    """Tensors equal others, one for one."""
    for one, other in zip(found, expected, strict=True):
        path = getattr(one, "path", "")
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other), path)


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


def build(router, reference):
    """The router with the saved kernel, and the saved tokens."""
    tokens = reference.given("inputs")
    router.build((None, None, tokens.shape[-1]))
    router.kernel.assign(reference.given("params/dense/kernel"))
    return router, keras.ops.convert_to_tensor(tokens)


class AffineProbe(keras.layers.Layer):
    """A router whose experts all compute 2 x + 1, as in the reference numbers."""

    def __init__(self, router):
        super().__init__()
        self.router = router

    def build(self, tokens_shape):
        # The router comes built, with the saved kernel.
        pass

    def call(self, tokens):
        return affine_output(tokens, self.router(tokens).routing)


def affine_output(tokens, routing):
    slots = ops.dispatch(tokens, routing)
    return ops.combine(2.0 * slots + 1.0, routing, tokens.shape[1])


def slot_routing(token, filled, scores):
    """A `SlotRouting` whose gates are the `scores` (G, S, E) at (token, expert)."""
    by_expert = keras.ops.transpose(keras.ops.convert_to_tensor(scores), (0, 2, 1))
    gate = keras.ops.take_along_axis(by_expert, token, axis=-1)
    return ops.SlotRouting(token, filled, keras.ops.where(filled, gate, 0.0))


def check_dense(reference, case, routing):
    """Dispatch mask exactly, and combine weights where they are saved."""
    shape = reference.given(f"{case}dispatch_weights").shape
    dispatch, combine = ops.to_dense(routing, shape[1])
    dispatch = to_numpy(dispatch)
    assert set(np.unique(dispatch)) <= {0.0, 1.0}
    reference.check(f"{case}dispatch_weights", dispatch.astype(bool))
    if f"{case}combine_weights" in reference:
        reference.check(f"{case}combine_weights", combine)


def check_statistics(reference, prefix, routing, selection, tolerance=2e-5):
    """Statistics of expert choice, those that are saved below `prefix`.

    The selected gates are the `selection` scores (G, S, E) of the seated tokens.
    """
    token, filled, _ = map(to_numpy, routing)
    gate = twins.gates(to_numpy(selection), token, filled)
    num_groups, num_experts, _ = token.shape
    dispatch, _ = twins.to_dense(token, filled, gate, selection.shape[1])
    # (G, S): experts that process each token
    counts = dispatch.sum((2, 3)).astype("int32")
    gates = np.where(filled, gate, np.nan).reshape(num_groups, -1)
    statistics = {
        "max_selected_gate": np.nanmax(gates, -1),
        "min_selected_gate": np.nanmin(gates, -1),
        "num_experts_per_item_max": counts.max(-1),
        "num_experts_per_item_min": counts.min(-1),
        **{
            f"ratio_processed_items_by_at_least_{n}_experts": (counts >= n).mean(-1)
            for n in range(1, num_experts + 1)
        },
    }
    for name, value in statistics.items():
        key = f"{prefix}{name}"
        if key in reference:
            # Saved without an axis of groups where there is only one group.
            value = value.reshape(reference.given(key).shape)
            reference.check(key, value, tolerance)


def check_auxiliary_loss(reference, key, actual):
    """Losses that are 0 for every group are saved as one number."""
    actual = to_numpy(actual)
    expected = reference.given(key)
    reference.check(
        key, np.broadcast_to(actual.mean(), ()) if not expected.ndim else actual
    )


def finish(reference, prefix=""):
    reference.leave(INEXPRESSIBLE)
    reference.finish(prefix)


def losses_of(weights, noise_std):
    """Losses of a router from their weights by name: no load loss without noise.

    Those of V-MoE's router have weights of 0.005 where the settings have none.
    """
    weights = {"importance_loss_weight": 0.005, "load_loss_weight": 0.005, **weights}
    functions = {
        "gshard_loss_weight": ops.gshard_loss,
        "importance_loss_weight": ops.importance_loss,
        "load_loss_weight": ops.load_loss,
    }
    return [
        routers.RoutingLoss(functions[name], weight=weight)
        for name, weight in weights.items()
        if weight and (noise_std or name != "load_loss_weight")
    ]
