"""Products of rows sorted by expert, with different numbers of rows.

Keras has no such operation, and each backend has its own.
"""

import functools

import keras
from keras import ops

from keras_softmoe.ops.kernels import (
    affine,
    compiled_on_jax,
    is_jax_on,
    is_jax_on_nvidia,
    linear_on_jax,
)
from keras_softmoe.ops.tiles import chain, in_tiles

# Sizes of the pieces in which JAX computes an expert's rows on a CPU, as fractions of
# the mean number of rows. They are dense near 1, where most experts are; an expert with
# more rows takes several pieces.
_PIECES = (0.25, 0.5, 0.75, 0.8125, 0.875, 0.9375, 1.0, 1.0625, 1.125, 1.25, 1.5)


def knows_counts():
    """Return whether shapes may depend on the number of rows of an expert.

    They may not if XLA compiles for TensorFlow (`jit_compile=True`, the default of
    `fit` on accelerators).
    """
    if keras.backend.backend() != "tensorflow":
        return True
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph()
    return not control_flow_util.GraphOrParentsInXlaContext(graph)


def grouped_affine(rows, kernel, bias, count):
    """Return `matmul(rows, kernel[e]) + bias[e]` for the rows of each expert `e`.

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


def map_experts(all_at_once, stages, rows, weights, count):
    """Return the outputs of experts for rows sorted by expert.

    On a CPU, JAX, and PyTorch without gradients, compute one expert after another, so
    that caches hold its hidden activations.

    Args:
        all_at_once: callable from `(rows, *weights)` to the outputs.
        stages: tuple of callables that compute the same for slots, `(E, N, D)`, one
            after another, each with its weights; the same callables in every call, as
            JAX compiles them. Results between stages are kept for gradients, those
            inside of a stage are recomputed.
        rows: `(N, D)` tensor, see `grouped_affine`.
        weights: tuple with a tuple for each stage, of tensors whose first axis is that
            of experts.
        count: `(E,)` int32 tensor.

    Returns:
        `(N, D)` tensor.
    """
    if keras.backend.backend() == "torch":
        import torch

        is_eager = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        sizes = None
        if is_eager and rows.device.type == "cpu":
            sizes = _known_counts(count)
        if sizes is not None:
            results = []
            for e, x in enumerate(rows.split(sizes)):
                own = [[w[e : e + 1] for w in of_stage] for of_stage in weights]
                results.append(chain(stages, x[None], own)[-1][0])
            return torch.cat(results)
    if compute := _by_stages_on_jax(rows):
        return compute(rows, weights, count, stages)
    return all_at_once(rows, *(w for of_stage in weights for w in of_stage))


# === PyTorch ===


def _on_torch(rows, kernel, bias, count):
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:
        # `torch.compile` supports the grouped product only for bfloat16.
        return _opaque(rows, kernel, bias, count)
    return _eagerly_on_torch(rows, kernel, bias, count)


if keras.backend.backend() == "torch":
    import torch

    @torch.library.custom_op("keras_softmoe::grouped_affine", mutates_args=())
    def _opaque(
        rows: torch.Tensor,
        kernel: torch.Tensor,
        bias: torch.Tensor,
        count: torch.Tensor,
    ) -> torch.Tensor:
        return _eagerly_on_torch(rows, kernel, bias, count)

    @torch.library.custom_op("keras_softmoe::grouped_affine_gradient", mutates_args=())
    def _opaque_gradient(
        upstream: torch.Tensor,
        rows: torch.Tensor,
        kernel: torch.Tensor,
        count: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = count.tolist()
        pieces = [*zip(upstream.split(sizes), rows.split(sizes), kernel, strict=True)]
        return (
            torch.cat([y @ k.T for y, _, k in pieces]),
            torch.stack([x.T @ y for y, x, _ in pieces]),
            torch.stack([y.sum(0, keepdim=True) for y, _, _ in pieces]),
        )

    @_opaque.register_fake
    def _(rows, kernel, bias, count):
        return rows.new_empty(rows.shape[0], kernel.shape[2])

    @_opaque_gradient.register_fake
    def _(upstream, rows, kernel, count):
        bias = kernel.new_empty(kernel.shape[0], 1, kernel.shape[2])
        return torch.empty_like(rows), torch.empty_like(kernel), bias

    torch.library.register_autograd(
        _opaque,
        lambda ctx, grad: (*_opaque_gradient(grad, *ctx.saved_tensors), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(
            inputs[0], inputs[1], inputs[3]
        ),
    )


def _eagerly_on_torch(rows, kernel, bias, count):
    import torch

    bytes_of_rows = [n * rows.element_size() for n in kernel.shape[1:]]
    # The requirements of PyTorch's grouped product, from version 2.10 on
    fits = rows.element_size() <= 4 and not any(n % 16 for n in bytes_of_rows)
    if fits and hasattr(torch.nn.functional, "grouped_mm"):
        ends = torch.cumsum(count, 0, dtype=torch.int32)
        try:
            products = torch.nn.functional.grouped_mm(rows, kernel, offs=ends)
        except NotImplementedError:
            # It has no derivative in forward mode.
            pass
        else:
            if products.requires_grad and not torch.compiler.is_compiling():
                # Its gradient rejects expanded tensors, such as the gradient of a sum.
                products.register_hook(lambda upstream: upstream.contiguous())
            expert = torch.repeat_interleave(count, output_size=rows.shape[0])
            return products + bias[:, 0].index_select(0, expert)
    sizes = _known_counts(count)
    if sizes is None:
        return _by_all_experts_on_torch(rows, kernel, bias, count)
    pieces = zip(rows.split(sizes), kernel, bias, strict=True)
    return torch.cat([torch.addmm(b, piece, k) for piece, k, b in pieces])


def _known_counts(count):
    """Return the counts as ints; `None` under `torch.func.vmap`."""
    try:
        return count.tolist()
    except RuntimeError:
        return None


def _by_all_experts_on_torch(rows, kernel, bias, count):
    import torch

    ends = torch.cumsum(count, 0)
    row = torch.arange(rows.shape[0], device=rows.device)[:, None]
    results = torch.zeros_like(rows[:, :1])
    for e, end in enumerate(ends):
        is_own = (row < end) & (row >= end - count[e])
        product = torch.addmm(bias[e], rows, kernel[e])
        results = results + torch.where(is_own, product, 0)
    return results


# === TensorFlow ===


def _on_tensorflow(rows, kernel, bias, count):
    import tensorflow as tf

    ends = tf.cumsum(count)

    def stretch(x, expert):
        return x[ends[expert] - count[expert] : ends[expert]]

    def for_each_expert(fn, num_results):
        """Return the results of `fn` for each expert as `TensorArray`s."""

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

    # The default gradient of a loop adds up a gradient of all kernels in each step.
    @tf.custom_gradient
    def product(rows, kernel, bias):
        (results,) = for_each_expert(
            lambda e: (tf.matmul(stretch(rows, e), kernel[e]) + bias[e],), 1
        )

        def gradients(upstream):
            # The gradient of taken rows is a `tf.IndexedSlices`.
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


def _on_jax(rows, kernel, bias, count):
    import jax
    from jax import numpy as jnp

    if compute := _by_stages_on_jax(rows):
        return compute(rows, ((kernel, bias),), count, (affine,))
    index = jnp.arange(rows.shape[0])
    expert = jnp.searchsorted(jnp.cumsum(count), index, side="right")
    return jax.lax.ragged_dot(rows, kernel, count) + bias[expert, 0]


def _by_stages_on_jax(rows):
    """Return a faster `map_experts` than by `ragged_dot`, `None` if there is none."""
    if not isinstance(rows.shape[0], int):
        # Of a batch of any size, when a layer around the experts is traced for shapes
        return None
    if is_jax_on("cpu"):
        return _in_pieces
    return in_tiles if is_jax_on_nvidia() else None


@compiled_on_jax("stages")
def _in_pieces(rows, weights, count, stages):
    """`map_experts` on CPUs, where `ragged_dot` multiplies all rows by all kernels."""
    import jax
    from jax import numpy as jnp

    num_rows = rows.shape[0]
    parts = (round(part * num_rows / count.shape[0] / 8) for part in _PIECES)
    sizes = sorted({8 * max(1, part) for part in parts})

    def padded(x):
        # A piece may extend beyond the last row.
        return jnp.pad(x, ((0, sizes[-1]), (0, 0)))

    def all_stages(xs, weights):
        return chain(stages, xs[0], weights), []

    def last_stage(xs, weights):
        return chain(stages, xs[0], weights)[-1:], []

    one = rows[None, :1], jax.tree.map(lambda weight: weight[:1], weights)
    widths = [
        x.shape[-1] for x in jax.eval_shape(functools.partial(chain, stages), *one)
    ]

    @jax.custom_jvp
    def last(rows, weights, count):
        known = [padded(rows)], weights, count, sizes
        (results,), _ = _for_all_experts(last_stage, *known, widths[-1:])
        return results[:num_rows]

    @jax.custom_jvp
    def each(rows, weights, count):
        """Return the results of all stages, with the derivative of the last one."""
        *between, results = _for_all_experts(
            all_stages, [padded(rows)], weights, count, sizes, widths
        )[0]
        return [*between, results[:num_rows]]

    def derivative(values, tangents):
        rows, weights, count = values
        *between, results = each(*values)
        xs = [padded(rows), *between]

        def all_forward(xs, weights):
            *xs, given = xs
            for stage, x, own, of_own in zip(stages, xs, *weights, strict=True):
                _, given = jax.jvp(stage, (x, *own), (given, *of_own))
            return [given], []

        def forward(tangents):
            of_rows, of_weights = tangents
            known = [*xs, padded(of_rows)], (weights, of_weights), count, sizes
            (results,), _ = _for_all_experts(all_forward, *known, widths[-1:])
            return results[:num_rows]

        def all_backward(xs, weights):
            *xs, given = xs
            of_weights = []
            for stage, x, own in reversed([*zip(stages, xs, weights, strict=True)]):
                _, pull_back = jax.vjp(stage, x, *own)
                given, *found = pull_back(given)
                of_weights = [*found, *of_weights]
            return [given], of_weights

        def backward(upstream):
            known = [*xs, padded(upstream)], weights, count, sizes
            (of_rows,), of_weights = _for_all_experts(
                all_backward, *known, [rows.shape[-1]], of_weights=True
            )
            of_weights = jax.tree.unflatten(jax.tree.structure(weights), of_weights)
            return of_rows[:num_rows], of_weights

        def plain(tangents):
            by_all = functools.partial(_each_row_by_all_experts, stages, count=count)
            return jax.jvp(by_all, (rows, weights), tangents)[1]

        return between, results, linear_on_jax(forward, backward, tangents[:2], plain)

    @last.defjvp
    def derivative_of_last(values, tangents):
        return derivative(values, tangents)[1:]

    @each.defjvp
    def derivative_of_each(values, tangents):
        between, results, tangent = derivative(values, tangents)
        return [*between, results], [*map(jnp.zeros_like, between), tangent]

    return last(rows, weights, count)


def _each_row_by_all_experts(stages, rows, weights, count):
    """`map_experts` in a slow form that JAX can differentiate any number of times."""
    import jax
    from jax import numpy as jnp

    ends = jnp.cumsum(count)
    expert = jnp.searchsorted(ends, jnp.arange(len(rows)), side="right")

    @jax.checkpoint
    def add(total, of_expert):
        number, own = of_expert
        own = jax.tree.map(lambda weight: weight[None], own)
        results = chain(stages, rows[None], own)[-1][0]
        return total + jnp.where(expert[:, None] == number, results, 0), None

    shape = len(rows), weights[-1][-1].shape[-1]
    of_experts = jnp.arange(len(count)), weights
    return jax.lax.scan(add, jnp.zeros(shape, rows.dtype), of_experts)[0]


def _for_all_experts(fn, xs, weights, count, sizes, widths, of_weights=False):
    """Return the results of a function for the rows of each expert, on JAX.

    Shapes are fixed when XLA compiles, so an expert's rows are computed in pieces of a
    few sizes: the smallest that holds them all, or several of the largest. Two experts
    with similar numbers of rows are computed at a time, which is faster than one.

    Args:
        fn: callable `(xs, weights)` for some experts, which returns a list of results
            for rows and one of results for weights. Rows beyond those of an expert are
            zeros in the last of `xs`, and rows of other experts in the others.
        xs: list of tensors of rows, padded by the largest size.
        weights: tuples of `(E, ...)` tensors.
        count: `(E,)` tensor.
        sizes: list of ints, ascending.
        widths: list of ints, of the results for rows.
        of_weights: bool, whether there are results for weights, one for each.

    Returns:
        Two lists: the results for rows, padded as `xs`, and for weights.
    """
    import jax
    from jax import lax, numpy as jnp

    num_experts, largest = count.shape[0], sizes[-1]
    together = 2 - num_experts % 2
    starts = jnp.cumsum(count) - count
    order = jnp.argsort(count)

    def own(x, experts):
        return jnp.stack([lax.dynamic_index_in_dim(x, e, 0, False) for e in experts])

    def piece(size, first, left, weights):
        """Return `fn` of `size` rows of some experts, padded to the largest size."""

        def cut(x):
            return jnp.stack([lax.dynamic_slice_in_dim(x, n, size) for n in first])

        *before, last = map(cut, xs)
        is_own = (jnp.arange(size) < left[:, None])[..., None]
        of_rows, of_weights = fn([*before, jnp.where(is_own, last, 0)], weights)
        missing = ((0, 0), (0, largest - size), (0, 0))
        return [jnp.pad(x, missing) for x in of_rows], of_weights

    def write(results, found, first, left):
        """Return the results with the own rows of a piece written into them."""
        for number in range(len(first)):
            is_own = (jnp.arange(largest) < left[number])[:, None]
            for place, new in enumerate(found):
                kept = lax.dynamic_slice_in_dim(results[place], first[number], largest)
                results[place] = lax.dynamic_update_slice_in_dim(
                    results[place],
                    jnp.where(is_own, new[number], kept),
                    first[number],
                    0,
                )
        return results

    def first_pieces(turn, state):
        """Compute one piece of each of some experts."""
        results, sums = state
        experts = [order[turn * together + number] for number in range(together)]
        first, left = own(starts, experts), own(count, experts)
        index = jnp.minimum(
            jnp.searchsorted(jnp.array(sizes), left.max()), len(sizes) - 1
        )
        branches = [functools.partial(piece, size) for size in sizes]
        some = jax.tree.map(lambda weight: own(weight, experts), weights)
        found, new = lax.switch(index, branches, first, left, some)
        for number, e in enumerate(experts):
            pairs = zip(sums, new, strict=True)
            sums = [
                lax.dynamic_update_index_in_dim(x, y[number], e, 0) for x, y in pairs
            ]
        return write(results, found, first, left), sums

    def more_pieces(expert, state):
        """Compute the other pieces of an expert with more rows than the largest."""
        end = starts[expert] + count[expert]

        def another(state):
            start, results, sums = state
            first, left = start[None], (end - start)[None]
            some = jax.tree.map(lambda weight: own(weight, [expert]), weights)
            found, new = piece(largest, first, left, some)
            pairs = zip(sums, new, strict=True)
            sums = [x.at[expert].add(y[0]) for x, y in pairs]
            return start + largest, write(results, found, first, left), sums

        state = (starts[expert] + largest, *state)
        return lax.while_loop(lambda state: state[0] < end, another, state)[1:]

    num_rows, dtype = xs[0].shape[0], xs[0].dtype
    results = [jnp.zeros((num_rows, width), dtype) for width in widths]
    sums = [jnp.zeros_like(x) for x in jax.tree.leaves(weights) if of_weights]
    state = lax.fori_loop(0, num_experts // together, first_pieces, (results, sums))
    return lax.fori_loop(0, num_experts, more_pieces, state)


_GROUPED_AFFINE = {
    "torch": _on_torch,
    "tensorflow": _on_tensorflow,
    "jax": _on_jax,
}
