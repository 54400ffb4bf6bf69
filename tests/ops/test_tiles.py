"""JAX on GPUs of NVIDIA: each expert's rows, padded to tiles, give the same numbers."""

import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from keras_softmoe.ops import grouped
from keras_softmoe.ops.grouped import _in_tiles
from keras_softmoe.ops.kernels import affine
from tests.support.close import assert_near

# Rows of each expert: none, whole tiles of 16 and parts of them, one with most.
COUNTS = {"no rows": [0, 0, 0], "uneven": [16, 0, 7, 90, 0, 33]}


def made_up(count, sizes=(8, 4, 6)):
    """Rows and two stages of weights, float32."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((sum(count), sizes[0]), "float32")
    pairs = zip(sizes, sizes[1:], strict=False)
    weights = tuple(
        tuple(rng.standard_normal((len(count), n, b), "float32") for n in (a, 1))
        for a, b in pairs
    )
    return rows, weights


def hidden(x, kernel, bias):
    return jnp.tanh(affine(x, kernel, bias))


def expert_by_expert(rows, weights, count, stages):
    ends = np.cumsum(count)
    results = []
    for e, (end, number) in enumerate(zip(ends, count, strict=True)):
        x = rows[None, end - number : end]
        for stage, of_stage in zip(stages, weights, strict=True):
            x = stage(x, *(w[e : e + 1] for w in of_stage))
        results.append(x[0])
    return jnp.concatenate(results)


@pytest.mark.parametrize("name", COUNTS)
def test_outputs_and_derivatives(name):
    count = np.array(COUNTS[name], "int32")
    known = made_up(count)

    def judged(fn, *known):
        def total(rows, weights):
            results = fn(rows, weights, count, (hidden, affine))
            return (jnp.sin(results) * jnp.arange(6)).sum(), results

        def gradients(rows, weights):
            return jax.grad(total, (0, 1), has_aux=True)(rows, weights)

        # With the change of the gradients along the values themselves
        return jax.jit(lambda *known: jax.jvp(gradients, known, known))(*known)

    expected, found = judged(expert_by_expert, *known), judged(_in_tiles, *known)
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert_near(two, one, rtol=1e-4, atol=2e-4)


def test_at_most_twice_the_products_of_the_rows():
    count = np.array([400, 10, 30, 0, 200, 60, 50, 50], "int32")
    known = made_up(count, (32, 64))
    fn = functools.partial(_in_tiles, count=count, stages=(affine,))

    def gradients(*known):
        return jax.grad(lambda *known: jnp.square(fn(*known)).sum(), (0, 1))(*known)

    least = 2 * count.sum() * 32 * 64
    for compute, products in ((fn, 1), (gradients, 3)):
        cost = jax.jit(compute).lower(*known).compile().cost_analysis()
        assert products * least <= cost["flops"] < 2.2 * products * least


@pytest.mark.parametrize(
    "platform, plugins, expected",
    [
        ("cpu", (), grouped._in_pieces),
        ("gpu", ("cuda",), _in_tiles),
        ("gpu", ("rocm",), None),
        ("tpu", (), None),
    ],
)
def test_chosen_by_the_platform(monkeypatch, platform, plugins, expected):
    def devices(plugin):
        if plugin not in plugins:
            raise RuntimeError(f"Unknown backend {plugin}")
        return ["a device"]

    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "devices", devices)
    assert grouped._by_stages_on_jax(np.zeros((5, 3))) is expected


def test_without_pieces_and_tiles(monkeypatch):
    count = np.array([5, 0, 7], "int32")
    rows, ((kernel, bias),) = made_up(count, (8, 4))
    expected = grouped.grouped_affine(rows, kernel, bias, count)
    monkeypatch.setattr(grouped, "_by_stages_on_jax", lambda rows: None)
    found = grouped.grouped_affine(rows, kernel, bias, count)
    assert_near(found, expected, rtol=1e-5, atol=1e-5)
