"""Operations of the backends equal their definitions in `keras.ops` and NumPy."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_softmoe.layers import Experts
from keras_softmoe.ops import kernels as backend
from keras_softmoe.ops.kernels import (
    add_rows,
    affine,
    attend,
    chunked_map,
    on_own_groups,
)
from tests.skips import only_on
from tests.support.close import assert_near, difference
from tests.support.gradients import changes_of_gradients, slope, value_and_gradients
from tests.support.references import to_numpy


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def assert_same(own, portable, arrays, tolerance=1e-5):
    """Values of both, and gradients of a weighted sum of each."""
    value = to_numpy(portable(*map(ops.convert_to_tensor, arrays)))
    found = to_numpy(own(*map(ops.convert_to_tensor, arrays)))
    assert found.shape == value.shape
    assert_near(found, value, rtol=tolerance, atol=tolerance)
    weights = normal(*value.shape, seed=1)
    gradients = [
        value_and_gradients(
            lambda *x, f=f: ops.sum(ops.multiply(f(*x), weights)), arrays
        )[1]
        for f in (own, portable)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        assert abs(theirs).max() > 0.01
        assert_near(ours, theirs, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("leading", [(4,), (2, 5), (2, 3, 4), (0, 5)])
def test_affine(leading):
    x, kernel, bias = normal(*leading, 3), normal(3, 7), normal(7)
    found = to_numpy(affine(*map(ops.convert_to_tensor, (x, kernel, bias))))
    assert_near(found, x @ kernel + bias, rtol=1e-5, atol=1e-6)
    if 0 not in leading:
        assert_same(affine, lambda *a: ops.matmul(*a[:2]) + a[2], (x, kernel, bias))


@pytest.mark.parametrize("count", [4, 11])
def test_affine_of_stacks(count):
    arrays = normal(count, 5, 3), normal(count, 3, 7), normal(count, 1, 7)
    expected = np.einsum("end,edh->enh", *arrays[:2]) + arrays[2]
    found = to_numpy(affine(*map(ops.convert_to_tensor, arrays)))
    assert_near(found, expected, rtol=1e-5, atol=1e-5)
    assert_same(affine, lambda *a: ops.matmul(*a[:2]) + a[2], arrays)


def test_derivatives_of_stacks():
    """Of second order and in forward mode; on JAX of third order, too."""
    arrays = normal(4, 5, 3), normal(4, 3, 7), normal(4, 1, 7)
    directions = [normal(*x.shape, seed=1) for x in arrays]

    def of(product):
        return lambda *arrays: ops.mean(ops.tanh(product(*arrays)))

    own = of(affine)
    plain = of(lambda x, kernel, bias: ops.matmul(x, kernel) + bias)
    for derivative in (slope, changes_of_gradients):
        found, expected = (derivative(f, arrays, directions) for f in (own, plain))
        for one, other in zip(*map(keras.tree.flatten, (found, expected)), strict=True):
            assert_near(one, other, rtol=1e-4, atol=1e-5)
    if keras.backend.backend() == "jax":
        import jax

        for number in (0, 1):

            def third(f, number=number):
                second = jax.jacfwd(jax.grad(f, number), number)
                total = jax.grad(lambda *x: (second(*x) ** 2).sum(), number)
                return jax.jit(total)(*arrays)

            assert_near(third(own), third(plain), rtol=1e-3, atol=1e-6)


def test_affine_in_half_precision():
    arrays = [ops.cast(x, "bfloat16") for x in (normal(2, 3), normal(3, 4), normal(4))]
    found = affine(*arrays)
    assert keras.backend.standardize_dtype(found.dtype) == "bfloat16"
    x, kernel, bias = map(to_numpy, arrays)
    assert_near(to_numpy(found), x @ kernel + bias, rtol=0.02, atol=0.05)


def test_attend_to_one_token():
    query, key, value = normal(2, 3, 2, 4), normal(2, 1, 2, 4), normal(2, 1, 2, 4)
    found = to_numpy(attend(query, key, value))
    np.testing.assert_allclose(found, np.repeat(value, 3, axis=1), rtol=1e-6)


def test_attend():
    query, key, value = (
        normal(2, 5, 3, 8),
        normal(2, 7, 3, 8),
        normal(2, 7, 3, 8, seed=2),
    )
    logits = np.einsum("bqhk,bshk->bhqs", query, key) / np.sqrt(8)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhqs,bshk->bqhk", weights, value)
    found = to_numpy(attend(*map(ops.convert_to_tensor, (query, key, value))))
    assert_near(found, expected, rtol=1e-5, atol=1e-6)
    assert_same(attend, ops.dot_product_attention, (query, key, value))


@only_on("torch", because="own loop")
def test_groups_of_a_process():
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    def function(x, y):
        # Shapes are those of a process: here there is one.
        assert not hasattr(x, "placements") and not hasattr(y, "placements")
        return x * y

    x, y = (ops.convert_to_tensor(normal(4, 3, seed=seed)) for seed in (0, 1))
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        found = on_own_groups(function, sharded, y)
        assert found.placements == (Shard(0),)
        found.sum().backward()
        gradient = to_numpy(sharded.grad.full_tensor())
        found = to_numpy(found.full_tensor())
    finally:
        distributed.destroy_process_group()
    np.testing.assert_array_equal(found, to_numpy(x * y))
    np.testing.assert_array_equal(gradient, to_numpy(y))
    np.testing.assert_array_equal(to_numpy(on_own_groups(function, x, y)), found)


def test_attend_in_half_precision():
    arrays = [ops.cast(normal(1, 4, 2, 8, seed=i), "bfloat16") for i in range(3)]
    found = attend(*arrays)
    assert keras.backend.standardize_dtype(found.dtype) == "bfloat16"
    expected = ops.dot_product_attention(*(ops.cast(x, "float32") for x in arrays))
    assert_near(to_numpy(found), to_numpy(expected), rtol=0.02, atol=0.02)


def test_add_rows():
    rows, index = normal(6, 3), np.array([2, 0, 2, 3, 0, 2], "int32")
    expected = np.zeros((5, 3), "float32")
    np.add.at(expected, index, rows)

    def add(rows):
        return add_rows(rows, ops.convert_to_tensor(index), 5)

    np.testing.assert_allclose(
        to_numpy(add(ops.convert_to_tensor(rows))), expected, rtol=1e-6
    )
    one_hot = (index[None] == np.arange(5)[:, None]).astype("float32")
    assert_same(add, lambda x: ops.matmul(one_hot, x), (rows,))


@pytest.mark.parametrize(
    "count, rows", [(8, 2), (256, 2), (257, 2), (264, 2), (8, 128), (6, 130)]
)
def test_chunked_map(count, rows, monkeypatch):
    """Few elements, many, many that chunks do not divide, and few with many rows."""
    x, kernel = normal(count, rows, 3), normal(count, 3, 4)
    sizes = []

    def products(x, kernel):
        sizes.append(x.shape[0])
        return ops.tanh(ops.matmul(x, kernel))

    expected = np.tanh(x @ kernel)
    x, kernel = map(ops.convert_to_tensor, (x, kernel))
    found = to_numpy(chunked_map(products, [x, kernel]))
    assert_near(found, expected, rtol=1e-5, atol=1e-5)
    if keras.backend.backend() == "torch":
        import torch

        with torch.no_grad():
            chunked_map(products, [x, kernel])
            # Each is smaller than those that PyTorch computes in chunks.
            assert sizes == [count, count]
            monkeypatch.setattr(backend, "_LARGE", 0)
            found = to_numpy(chunked_map(products, [x, kernel]))
        chunks = {(8, 128): [4, 4], (6, 130): [4, 2]}
        if x.device.type != "cpu":
            chunks = {}
        assert sizes[2:] == chunks.get((count, rows), [count])
        assert_near(found, expected, rtol=1e-5, atol=1e-5)
    assert_same(lambda *a: chunked_map(products, a), products, (x, kernel))


@only_on("jax", because="own loop")
def test_chunks_cost_gradients_nothing():
    """Operands without a derivative cost no products, forward or backward."""
    import jax

    def products(x, kernel):
        return ops.tanh(ops.matmul(x, kernel))

    def gradient(fn, number):
        def total(x, kernel):
            return ops.sum(fn(x, kernel))

        return jax.grad(total, number)

    arrays = normal(8, 128, 3), normal(8, 3, 4)
    tangents = normal(8, 128, 3), normal(8, 3, 4)

    def chunked(*operands):
        return chunked_map(products, operands)

    for number in (0, 1, (0, 1)):
        texts = [
            str(jax.make_jaxpr(gradient(fn, number))(*arrays))
            for fn in (chunked, products)
        ]
        counts = [text.count("dot_general") for text in texts]
        assert counts[0] == counts[1]
    for found, expected in zip(
        jax.jvp(chunked, arrays, tangents),
        jax.jvp(products, arrays, tangents),
        strict=True,
    ):
        assert_near(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout_rate", [0.0, 0.5])
def test_many_experts(dropout_rate):
    """Each computes its own slots, and drops units only in training."""
    experts = Experts(256, 3, dropout_rate=dropout_rate)
    slots = normal(2, 256, 1, 4)
    experts.build(slots.shape)
    found = to_numpy(experts(slots))
    weights = [to_numpy(v.value) for v in experts.trainable_variables]
    kernel, bias, output_kernel, output_bias = weights
    assert kernel.shape == (256, 4, 3)
    x = slots[:, :, 0].transpose(1, 0, 2)
    h = x @ kernel + bias
    h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    expected = (h @ output_kernel + output_bias).transpose(1, 0, 2)
    assert_near(found[:, :, 0], expected, rtol=1e-4, atol=1e-5)
    trained = to_numpy(experts(slots, training=True))
    assert (difference(trained, found) < 1e-5) == (not dropout_rate)
