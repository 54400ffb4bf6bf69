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
)

# Sizes of the pieces in which JAX computes an expert's rows on a CPU, as fractions of
# the mean number of rows. They are dense near 1, where most experts are; an expert with
# more rows takes several pieces.
_PIECES = (0.25, 0.5, 0.75, 0.8125, 0.875, 0.9375, 1.0, 1.0625, 1.125, 1.25, 1.5)
# Rows for each expert, on average, up to which JAX computes one after another on a CPU
_FEW = 2
# Bytes of all kernels of a layer that fit into the caches of a CPU
_SMALL = 2**19
# The fewest rows in a tile, those of the GPU's own products of matrices
_FEWEST = 16


def grouped_affine(rows, kernel, bias=None, count=None):
    """Return `matmul(rows, kernel[e]) + bias[e]` for the rows of each expert `e`.

    Args:
        rows: `(N, D)` tensor: first those of expert 0, then those of expert 1, ...
        kernel: `(E, D, H)` tensor.
        bias: `(E, 1, H)` tensor, or `None`.
        count: `(E,)` int32 tensor, rows of each expert. They add up to `N`.

    Returns:
        `(N, H)` tensor.
    """
    if bias is None:
        bias = ops.zeros((kernel.shape[0], 1, kernel.shape[2]), rows.dtype)
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
        is_eager = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        kernel = weights[0][0]
        is_small = kernel.numel() * kernel.element_size() < _SMALL
        if is_eager and rows.device.type == "cpu" and not is_small:
            results = []
            for e, x in enumerate(rows.split(count.tolist())):
                # The last one also gives no rows their shape.
                if len(x) or not (results or e < len(kernel) - 1):
                    own = [[w[e : e + 1] for w in of_stage] for of_stage in weights]
                    results.append(_chain(stages, x[None], own)[-1][0])
            return torch.cat(results)
    if compute := _by_stages_on_jax(rows):
        return compute(rows, weights, count, stages)
    return all_at_once(rows, *(w for of_stage in weights for w in of_stage))


def _chain(stages, x, weights):
    """Return the list of results of consecutive stages."""
    results = []
    for stage, of_stage in zip(stages, weights, strict=True):
        x = stage(x, *of_stage)
        results.append(x)
    return results


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
    bytes_of_rows = [n * rows.element_size() for n in kernel.shape[1:]]
    # The requirements of PyTorch's grouped product, from version 2.10 on
    fits = rows.element_size() <= 4 and not any(n % 16 for n in bytes_of_rows)
    if fits and hasattr(torch.nn.functional, "grouped_mm"):
        ends = torch.cumsum(count, 0, dtype=torch.int32)
        products = torch.nn.functional.grouped_mm(rows, kernel, offs=ends)
        if products.requires_grad and not torch.compiler.is_compiling():
            # Its gradient rejects expanded tensors, such as the gradient of a sum.
            products.register_hook(lambda upstream: upstream.contiguous())
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


# === JAX on CPUs, and its choice ===


def _on_jax(rows, kernel, bias, count):
    import jax

    if compute := _by_stages_on_jax(rows):
        return compute(rows, ((kernel, bias),), count, (affine,))
    expert = _expert_of_rows(count, rows.shape[0])
    return jax.lax.ragged_dot(rows, kernel, count) + bias[expert, 0]


def _expert_of_rows(count, num_rows):
    """Return the `(N,)` experts of rows, from the numbers of rows of each."""
    from jax import numpy as jnp

    return jnp.searchsorted(jnp.cumsum(count), jnp.arange(num_rows), side="right")


def _by_stages_on_jax(rows):
    """Return a faster `map_experts` than by `ragged_dot`, `None` if there is none."""
    if not isinstance(rows.shape[0], int):
        # Of a batch of any size, when a layer around the experts is traced for shapes
        return None
    if is_jax_on("cpu"):
        return _in_pieces
    return _in_tiles if is_jax_on_nvidia() else None


@compiled_on_jax("stages")
def _in_pieces(rows, weights, count, stages):
    """Compute `map_experts` on CPUs, where `ragged_dot` multiplies too much."""
    import jax
    from jax import numpy as jnp

    num_rows = rows.shape[0]
    parts = (round(part * num_rows / count.shape[0] / 8) for part in _PIECES)
    sizes = sorted({8 * max(1, part) for part in parts})

    def padded(x):
        # A piece may extend beyond the last row.
        return jnp.pad(x, ((0, sizes[-1]), (0, 0)))

    def forward_of(fn, rows, weights, count, widths):
        return _for_all_experts(fn, [padded(rows)], weights, count, sizes, widths)[0]

    def last_stage(xs, weights):
        return _chain(stages, xs[0], weights)[-1:], []

    def all_stages(xs, weights):
        return _chain(stages, xs[0], weights), []

    one = rows[None, :1], jax.tree.map(lambda weight: weight[:1], weights)
    found = jax.eval_shape(functools.partial(_chain, stages), *one)
    widths = [x.shape[-1] for x in found]

    @jax.custom_vjp
    def compute(rows, weights, count):
        if num_rows <= _FEW * count.shape[0]:
            return _row_by_row(rows, weights, count, stages)
        (results,) = forward_of(last_stage, rows, weights, count, widths[-1:])
        return results[:num_rows]

    def forward(rows, weights, count):
        # Results between stages are kept, each padded by the largest piece.
        *between, results = forward_of(all_stages, rows, weights, count, widths)
        return results[:num_rows], (rows, weights, count, between)

    def pull_back(xs, weights):
        # From the last stage to the first; what is inside of one is computed again.
        *xs, given = xs
        of_weights = []
        for stage, x, own in reversed([*zip(stages, xs, weights, strict=True)]):
            (*found,) = jax.vjp(stage, x, *own)[1](given)
            given, of_weights = found[0], [*found[1:], *of_weights]
        return [given], of_weights

    @jax.custom_jvp
    def gradients(known, upstream):
        rows, weights, count, between = known
        xs = [padded(rows), *between, padded(upstream)]
        (of_rows,), of_weights = _for_all_experts(
            pull_back, xs, weights, count, sizes, [rows.shape[-1]], of_weights=True
        )
        of_weights = jax.tree.unflatten(jax.tree.structure(weights), of_weights)
        return of_rows[:num_rows], of_weights

    @gradients.defjvp
    def second_derivative(values, tangents):
        raise NotImplementedError(
            "Dropless experts have no second derivative on JAX on a CPU. Set a "
            "`capacity_factor`."
        )

    def backward(known, upstream):
        return *gradients(known, upstream), None

    compute.defvjp(forward, backward)
    return compute(rows, weights, count)


def _row_by_row(rows, weights, count, stages):
    """Compute `map_experts` of few rows, as in the generation of text.

    Most experts have none, and a slice of a kernel for one row is not copied.
    """
    import jax

    def one(row_and_expert):
        row, e = row_and_expert
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, e, 1), weights)
        return _chain(stages, row[None, None], own)[-1][0, 0]

    return jax.lax.map(one, (rows, _expert_of_rows(count, rows.shape[0])))


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
        """Return `fn` of `size` rows of some experts, padded to the largest size.

        Branches of a switch have one shape.
        """

        def cut(x):
            return jnp.stack([lax.dynamic_slice_in_dim(x, n, size) for n in first])

        # (experts, size, D). A piece also cuts rows of the next expert.
        *before, last = map(cut, xs)
        is_own = (jnp.arange(size) < left[:, None])[..., None]
        of_rows, of_weights = fn([*before, jnp.where(is_own, last, 0)], weights)
        missing = ((0, 0), (0, largest - size), (0, 0))
        return [jnp.pad(x, missing) for x in of_rows], of_weights

    def write(results, found, first, left):
        """Return the results with the own rows of a piece written into them.

        Rows of the next expert keep what is there.
        """
        for number in range(len(first)):
            is_own = (jnp.arange(largest) < left[number])[:, None]
            for place, new in enumerate(found):
                start = first[number]
                kept = lax.dynamic_slice_in_dim(results[place], start, largest)
                kept = jnp.where(is_own, new[number], kept)
                results[place] = lax.dynamic_update_slice_in_dim(
                    results[place], kept, start, 0
                )
        return results

    def first_pieces(turn, state):
        """Compute one piece of each of some experts."""
        results, sums = state
        # Neighbours in the order of counts waste fewest rows in a common size.
        experts = [order[turn * together + number] for number in range(together)]
        first, left = own(starts, experts), own(count, experts)
        index = jnp.searchsorted(jnp.array(sizes), left.max())
        index = jnp.minimum(index, len(sizes) - 1)
        branches = [functools.partial(piece, size) for size in sizes]
        some = jax.tree.map(lambda weight: own(weight, experts), weights)
        found, new = lax.switch(index, branches, first, left, some)
        # Gradients of kernels: this is the first piece of each expert.
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

    # One piece for each expert, then more for those that need them.
    num_rows, dtype = xs[0].shape[0], xs[0].dtype
    results = [jnp.zeros((num_rows, width), dtype) for width in widths]
    sums = [jnp.zeros_like(x) for x in jax.tree.leaves(weights) if of_weights]
    state = lax.fori_loop(0, num_experts // together, first_pieces, (results, sums))
    return lax.fori_loop(0, num_experts, more_pieces, state)


# === JAX on GPUs of NVIDIA ===


@compiled_on_jax("stages")
def _in_tiles(rows, weights, count, stages):
    """Compute `map_experts` on GPUs of NVIDIA, where `ragged_dot` does, too.

    XLA expands `ragged_dot` to products of all rows by all kernels there: always up to
    jaxlib 0.10.2 (marin-community/marin#7012), and for the gradients of kernels and in
    float32 after it (openxla/xla#40189). Here each expert's rows are padded to whole
    tiles, and each tile is multiplied by a copy of its expert's kernel. With at least
    16 rows per expert these are at most twice the products, whatever the counts, and
    three copies of the kernels.
    """
    import jax
    from jax import numpy as jnp

    num_rows, num_experts = rows.shape[0], count.shape[0]
    if num_rows == 0:
        first = jax.tree.map(lambda weight: weight[:1], weights)
        return _chain(stages, rows[None], first)[-1][0]
    size = max(_FEWEST, 1 << (num_rows // num_experts).bit_length() >> 1)
    num_tiles = num_rows // size + num_experts

    ends = jnp.cumsum(count)
    tiles = (count + size - 1) // size
    end_tiles = jnp.cumsum(tiles)
    # A row of an expert is its place in the tiles plus this.
    shift = ends - count - (end_tiles - tiles) * size

    def expert_of(ends, number):
        found = jnp.searchsorted(ends, jnp.arange(number), side="right")
        return jnp.minimum(found, num_experts - 1)

    expert = expert_of(end_tiles, num_tiles)
    # (tiles, size)
    row = jnp.arange(num_tiles * size).reshape(num_tiles, size) + shift[expert, None]
    row = jnp.where(row < ends[expert, None], row, num_rows)
    x = rows.at[row].get(mode="fill", fill_value=0)
    own = jax.tree.map(
        lambda weight: weight.at[expert].get(indices_are_sorted=True), weights
    )
    results = _chain(stages, x, own)[-1]
    place = jnp.arange(num_rows) - shift[expert_of(ends, num_rows)]
    return results.reshape(num_tiles * size, -1)[place]


_GROUPED_AFFINE = {"torch": _on_torch, "tensorflow": _on_tensorflow, "jax": _on_jax}
