"""Products of rows that are sorted by expert are those of each expert's own rows."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_softmoe.ops.grouped import grouped_affine
from tests.skips import only_on
from tests.support.close import assert_near
from tests.support.gradients import value_and_gradients

# Rows of each expert: of an odd number of experts, none, and far more than the mean,
# which JAX takes in several pieces.
COUNTS = {"odd": [5, 0, 7], "even": [4, 6], "pieces": [0, 90, 3, 2, 0, 1, 2, 2]}


@pytest.mark.parametrize("name", COUNTS)
def test_grouped_affine(name):
    count = np.array(COUNTS[name], "int32")
    rng = np.random.default_rng(0)
    shapes = (count.sum(), 8), (len(count), 8, 4), (len(count), 1, 4), (count.sum(), 4)
    *arrays, weight = (rng.standard_normal(shape).astype("float32") for shape in shapes)
    ends = np.cumsum(count)

    def each(rows, kernel, bias):
        pieces = [
            ops.matmul(rows[end - number : end], kernel[e]) + bias[e]
            for e, (number, end) in enumerate(zip(count, ends, strict=True))
        ]
        return ops.sum(ops.multiply(ops.tanh(ops.concatenate(pieces)), weight))

    def grouped(rows, kernel, bias):
        found = grouped_affine(rows, kernel, bias, ops.convert_to_tensor(count))
        return ops.sum(ops.multiply(ops.tanh(found), weight))

    expected, found = (value_and_gradients(fn, arrays) for fn in (each, grouped))
    for one, two in zip(
        keras.tree.flatten(expected), keras.tree.flatten(found), strict=True
    ):
        assert_near(two, one, rtol=1e-4, atol=2e-5)


def test_gradient_of_a_sum():
    # It comes as one number, expanded, which not every product takes.
    count = np.array([5, 0, 7], "int32")
    rng = np.random.default_rng(0)
    shapes = (12, 8), (3, 8, 4), (3, 1, 4)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]

    def fn(*arrays):
        return ops.sum(grouped_affine(*arrays, ops.convert_to_tensor(count)))

    _, (of_rows, of_kernel, of_bias) = value_and_gradients(fn, arrays)
    rows, kernel, _ = arrays
    expert = np.repeat(np.arange(3), count)
    expected = kernel.sum(-1)[expert]
    assert_near(of_rows, expected, rtol=1e-5, atol=1e-5)
    expected = [rows[expert == e].sum(0)[:, None] + np.zeros((8, 4)) for e in range(3)]
    assert_near(of_kernel, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_bias[:, 0], count[:, None] + np.zeros((3, 4)))


@only_on("torch", because="own loop")
def test_one_graph():
    import torch

    torch._dynamo.reset()
    count = ops.convert_to_tensor([5, 0, 7], "int32")
    rng = np.random.default_rng(0)
    shapes = (12, 8), (3, 8, 4), (3, 1, 4)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]

    def fn(*arrays):
        return ops.sum(ops.tanh(grouped_affine(*arrays, count)))

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for one, two in zip(
        keras.tree.flatten(value_and_gradients(fn, arrays)),
        keras.tree.flatten(value_and_gradients(compiled, arrays)),
        strict=True,
    ):
        assert_near(two, one, rtol=1e-5, atol=1e-6)
