"""Products of rows that are sorted by expert, each with as many as it has.

Keras has no such product, and each backend another one.
"""

import functools

import keras
from keras import ops

from keras_softmoe.ops.backend import compiled_on_jax

# Of the mean number of rows: the sizes of the pieces in which JAX takes an expert's
# rows on a processor. Fine where most experts are; an expert with more takes several.
_PIECES = (0.25, 0.5, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5)


def knows_counts():
    """Whether what is computed now may depend on how many rows an expert has.

    Not in what XLA compiles for TensorFlow (`jit_compile=True`, the default of `fit`
    where there are accelerators).
    """
    if keras.backend.backend() != "tensorflow":
        return True
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph()
    return not control_flow_util.GraphOrParentsInXlaContext(graph)


def grouped_affine(rows, kernel, bias, count):
    """`matmul(rows, kernel[e]) + bias[e]`, for the rows of each expert `e`.

    Args:
        rows: `(N, D)` tensor: first those of expert 0, then those of expert 1, ...
        kernel: `(E, D, H)` tensor.
        bias: `(E, 1, H)` tensor.
        count: `(E,)` int32 tensor, rows of each expert. They add up to `N`.

    Returns:
        `(N, H)` tensor.
    """
    rows, kernel, bias = map(ops.convert_to_tensor, (rows, kernel, bias))
    return _GROUPED_AFFINE[keras.backend.backend()](rows, kernel, bias, count)


def map_experts(all_at_once, each, rows, weights, count):
    """What experts make of rows that are sorted by expert.

    Without gradients PyTorch on a processor computes expert after expert, whose hidden
    activations its caches hold.

    Args:
        all_at_once: callable `(rows, *weights)` that computes it.
        each: callable that does so for slots, `(E, N, D)`.
        rows: `(N, D)` tensor, see `grouped_affine`.
        weights: list of tensors whose first axis is that of experts.
        count: `(E,)` int32 tensor.

    Returns:
        `(N, D)` tensor.
    """
    if keras.backend.backend() == "torch":
        import torch

        is_eager = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        if is_eager and rows.device.type == "cpu":
            pieces = rows.split(count.tolist())
            banks = zip(*(w.split(1) for w in weights), strict=True)
            experts = zip(pieces, banks, strict=True)
            return torch.cat([each(x[None], *ws)[0] for x, ws in experts])
    return all_at_once(rows, *weights)


# === PyTorch ===


def _on_torch(rows, kernel, bias, count):
    import torch

    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:
        # What `torch.compile` knows of the grouped product is bfloat16 alone: a break
        # in its graph.
        return torch.compiler.disable(_eagerly_on_torch)(rows, kernel, bias, count)
    return _eagerly_on_torch(rows, kernel, bias, count)


def _eagerly_on_torch(rows, kernel, bias, count):
    import torch

    bytes_of_rows = [n * rows.element_size() for n in kernel.shape[1:]]
    # What PyTorch's grouped product takes, from version 2.10 on
    fits = rows.element_size() <= 4 and not any(n % 16 for n in bytes_of_rows)
    if fits and hasattr(torch.nn.functional, "grouped_mm"):
        ends = torch.cumsum(count, 0, dtype=torch.int32)
        products = torch.nn.functional.grouped_mm(rows, kernel, offs=ends)
        expert = torch.repeat_interleave(count, output_size=rows.shape[0])
        return products + bias[:, 0].index_select(0, expert)
    pieces = zip(rows.split(count.tolist()), kernel, bias, strict=True)
    return torch.cat([torch.addmm(b, piece, k) for piece, k, b in pieces])


# === TensorFlow ===


def _on_tensorflow(rows, kernel, bias, count):
    import tensorflow as tf

    ends = tf.cumsum(count)

    def stretch(x, expert):
        return x[ends[expert] - count[expert] : ends[expert]]

    def for_each_expert(fn, num_results):
        """What `fn` returns for each expert, as `TensorArray`s."""

        def step(expert, *results):
            written = zip(results, fn(expert), strict=True)
            return expert + 1, *(array.write(expert, x) for array, x in written)

        num_experts = kernel.shape[0]
        arrays = [
            tf.TensorArray(rows.dtype, num_experts, infer_shape=False)
            for _ in range(num_results)
        ]
        _, *arrays = tf.while_loop(
            lambda expert, *_: expert < num_experts, step, (0, *arrays)
        )
        return arrays

    # Differentiated, a loop would add up a gradient of all kernels in each step.
    @tf.custom_gradient
    def product(rows, kernel, bias):
        (results,) = for_each_expert(
            lambda e: (tf.matmul(stretch(rows, e), kernel[e]) + bias[e],), 1
        )

        def gradients(upstream):
            # Of rows that were taken TensorFlow has their indices only.
            upstream = tf.convert_to_tensor(upstream)

            def of_expert(e):
                given = stretch(upstream, e)
                return (
                    tf.matmul(given, kernel[e], transpose_b=True),
                    tf.matmul(stretch(rows, e), given, transpose_a=True),
                    tf.reduce_sum(given, axis=0, keepdims=True),
                )

            of_rows, of_kernel, of_bias = for_each_expert(of_expert, 3)
            return (
                tf.ensure_shape(of_rows.concat(), rows.shape),
                tf.ensure_shape(of_kernel.stack(), kernel.shape),
                tf.ensure_shape(of_bias.stack(), bias.shape),
            )

        shape = (rows.shape[0], kernel.shape[-1])
        return tf.ensure_shape(results.concat(), shape), gradients

    return product(rows, kernel, bias)


# === JAX ===


@compiled_on_jax()
def _on_jax(rows, kernel, bias, count):
    import jax
    from jax import numpy as jnp

    if jax.default_backend() != "cpu":
        expert = jnp.repeat(
            jnp.arange(len(count)), count, total_repeat_length=len(rows)
        )
        return jax.lax.ragged_dot(rows, kernel, count) + bias[expert, 0]
    return _by_pieces()(rows, kernel, bias, count)


@functools.cache
def _by_pieces():
    """`grouped_affine` for processors, where XLA's own multiplies all rows by all E.

    Shapes are fixed when XLA compiles, so an expert takes its rows in pieces of a few
    sizes: the smallest one that holds them all, or several of the largest. A piece may
    reach beyond the expert's last row; the next expert writes over that.
    """
    import jax
    from jax import lax
    from jax import numpy as jnp

    def pieces_of(rows, count):
        mean = rows.shape[0] / count.shape[0]
        sizes = sorted({8 * max(1, round(part * mean / 8)) for part in _PIECES})
        largest = sizes[-1]

        def piece(fn, left, start):
            """`fn(size, start)` with the size that suits `left` rows."""
            index = jnp.searchsorted(jnp.array(sizes), left)
            branches = [functools.partial(fn, size) for size in sizes]
            return lax.switch(jnp.minimum(index, len(sizes) - 1), branches, start)

        def padded(x):
            return jnp.pad(x, ((0, largest), (0, 0)))

        ends = jnp.cumsum(count)
        return piece, padded, largest, ends - count, ends

    def cut(x, start, size):
        return lax.dynamic_slice_in_dim(x, start, size)

    def multiply(rows, kernel, bias, count, contracted):
        """Products over the given axis of an expert's kernel."""
        piece, padded, largest, starts, ends = pieces_of(rows, count)
        x = padded(rows)

        def expert(results, operands):
            first, end, kernel, bias = operands

            def product(size, start):
                dimensions = (((1,), (contracted,)), ((), ()))
                y = lax.dot_general(cut(x, start, size), kernel, dimensions) + bias
                return jnp.pad(y, ((0, largest - size), (0, 0)))

            def step(state):
                start, results = state
                y = piece(product, end - start, start)
                results = lax.dynamic_update_slice_in_dim(results, y, start, 0)
                return start + largest, results

            state = lax.while_loop(lambda s: s[0] < end, step, (first, results))
            return state[1], None

        results = jnp.zeros((x.shape[0], kernel.shape[2 - contracted]), x.dtype)
        results, _ = lax.scan(expert, results, (starts, ends, kernel, bias))
        return results[: len(rows)]

    def outer(rows, upstream, count):
        """Gradients of kernels and biases."""
        piece, padded, largest, starts, ends = pieces_of(rows, count)
        x, given = padded(rows), padded(upstream)

        def expert(_, bounds):
            first, end = bounds

            def product(size, start):
                is_own = start + jnp.arange(size)[:, None] < end
                own = jnp.where(is_own, cut(given, start, size), 0)
                return cut(x, start, size).T @ own, own.sum(0, keepdims=True)

            def step(state):
                start, sums = state
                more = piece(product, end - start, start)
                return start + largest, jax.tree.map(jnp.add, sums, more)

            # Mostly one piece is all: nothing is added up then.
            state = first + largest, piece(product, end - first, first)
            return None, lax.while_loop(lambda s: s[0] < end, step, state)[1]

        return lax.scan(expert, None, (starts, ends))[1]

    @jax.custom_vjp
    def product(rows, kernel, bias, count):
        return multiply(rows, kernel, bias, count, contracted=0)

    def forward(rows, kernel, bias, count):
        return product(rows, kernel, bias, count), (rows, kernel, bias, count)

    def backward(kept, upstream):
        rows, kernel, bias, count = kept
        none = jnp.zeros((len(count), 1, 1), bias.dtype)
        of_rows = multiply(upstream, kernel, none, count, contracted=1)
        return of_rows, *outer(rows, upstream, count), None

    product.defvjp(forward, backward)
    return product


_GROUPED_AFFINE = {
    "torch": _on_torch,
    "tensorflow": _on_tensorflow,
    "jax": _on_jax,
}
