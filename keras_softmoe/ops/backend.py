"""Operations for which a backend has a faster way than Keras takes.

Each says in the words of `keras.ops` what it computes; nothing else in the layers
depends on the backend for its speed.
"""

import functools

import keras
from keras import ops

# An expert with fewer rows is a small product, see `affine` and `chunked_map`.
_FEW_ROWS = 128
# Experts of a chunk: with few rows on JAX, and with many.
_CHUNK = 8
_CHUNK_OF_MANY_ROWS = 4


def compiled_on_jax(*static):
    """Decorator of a function with a loop: on JAX it is compiled once for its shapes.

    Without, JAX compiles the loop of an eager call anew each time.

    Args:
        *static: str, the names of arguments that are no tensors.
    """

    def decorate(fn):
        if keras.backend.backend() != "jax":
            return fn
        import jax

        return functools.wraps(fn)(jax.jit(fn, static_argnames=static))

    return decorate


def affine(x, kernel, bias, sharded=False):
    """`matmul(x, kernel) + bias`, for one matrix or for a stack of them.

    Rows of all images make one matrix: with the images as an axis of their own, XLA's
    gradient of the kernel takes up to half as long again on a processor. Where a stack
    has few rows for each matrix, their gradient is another product there, see
    `_product_of_few_rows`. PyTorch adds the bias within the product.

    Args:
        x: `(..., D)` tensor, or `(E, N, D)` with a stack.
        kernel: `(D, H)` tensor, or a stack `(E, D, H)`.
        bias: `(H,)` tensor, or `(E, 1, H)` with a stack.
        sharded: bool, whether a stack may be sharded over devices along its first axis.
            Its products are then computed together: chunk by chunk, all of them would
            have to come to each device.

    Returns:
        `(..., H)` tensor, or `(E, N, H)`.
    """
    x, kernel = ops.convert_to_tensor(x), ops.convert_to_tensor(kernel)
    bias, stacked = ops.convert_to_tensor(bias), len(kernel.shape) == 3
    if keras.backend.backend() == "torch":
        import torch

        if stacked:
            return torch.baddbmm(bias, x, kernel)
        return torch.nn.functional.linear(x, kernel.T, bias)
    if stacked:
        on_processor = is_jax_on("cpu") and not sharded
        if on_processor and _are_few(x.shape[1]):
            return _product_of_few_rows(x, kernel) + bias
        return ops.matmul(x, kernel) + bias
    rows = ops.matmul(ops.reshape(x, (-1, x.shape[-1])), kernel) + bias
    return ops.reshape(rows, (*ops.shape(x)[:-1], kernel.shape[-1]))


@compiled_on_jax()
def _product_of_few_rows(x, kernel):
    """`matmul` of stacks for JAX on processors, where each matrix meets few rows.

    Before XLA multiplies the gradients of few rows with kernels, it transposes all
    kernels. The other way around, kernels times the transposed gradients, only those
    few are transposed: a third of the time. The barrier keeps XLA from turning it back.
    """
    import jax

    def of_rows(upstream):
        transposed = jax.numpy.einsum("edh,enh->edn", kernel, upstream)
        return jax.lax.optimization_barrier(transposed).swapaxes(1, 2)

    return linear_on_jax(lambda x: jax.numpy.matmul(x, kernel), of_rows, x)


def linear_on_jax(fn, transposed, x, plain=None):
    """`fn(x)` of a linear function, whose gradient is computed by another one.

    `jax.custom_vjp` is that too, but has no derivative in forward mode. The solution
    `x, y` of the linear system `x = b`, `y - fn(x) = 0` has derivatives of any order
    and mode, and batches: JAX solves another such system for each.

    Args:
        fn: callable of `x`. Values it closes over may be differentiated, too.
        transposed: callable of the gradient of `fn(x)` that returns the one of `x`.
        x: tensor, or a structure of tensors, none a scalar.
        plain: optional callable that computes the same as `fn`, which JAX can
            differentiate and transpose by itself. If `None`, `fn` can be.

    Returns:
        `fn(x)`.
    """
    import jax
    from jax import numpy as jnp

    def add(a, b):
        return jax.tree.map(jnp.add, a, b)

    def equations(unknown):
        x, y = _tied(unknown)
        return _tied((x, jax.tree.map(jnp.subtract, y, (plain or fn)(x))))

    def solve(_, given):
        return given[0], add(given[1], fn(given[0]))

    def solve_transposed(_, given):
        return add(given[0], transposed(given[1])), given[1]

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(fn, x))
    solution = jax.lax.custom_linear_solve(
        equations, _tied((x, zeros)), solve, solve_transposed
    )
    return _tied(solution)[1]


def _tied(tensors):
    """The same tensors, each of which depends on all of them: on none of their entries.

    JAX does not solve systems where some values have a derivative, and others none.
    """
    import jax
    from jax import numpy as jnp

    nothing = sum(x[:0].sum() for x in jax.tree.leaves(tensors))

    def tie(x):
        no_rows = jnp.broadcast_to(nothing, (0, *x.shape[1:])).astype(x.dtype)
        return jnp.concatenate([x, no_rows])

    return jax.tree.map(tie, tensors)


def attend(query, key, value, mask=None):
    """`keras.ops.dot_product_attention`, with the softmax in float32 at least.

    That is what JAX does on accelerators, where it has fused programs. On processors
    plain products are faster; PyTorch has one program for both, for which Keras would
    copy the operands.

    Args:
        query: `(B, Q, heads, head_dim)` tensor.
        key: `(B, S, heads, head_dim)` tensor.
        value: `(B, S, heads, head_dim)` tensor.
        mask: optional `(B, S)` bool tensor, `False` for tokens that get no attention.
            If all of an image are, none is left out.

    Returns:
        `(B, Q, heads, head_dim)` tensor.
    """
    if mask is not None:
        # Of nothing there is no mean: 0 / 0.
        is_empty = ops.logical_not(ops.any(mask, axis=-1, keepdims=True))
        mask = ops.logical_or(mask, is_empty)
        # (B, 1, 1, S)
        mask = ops.expand_dims(ops.expand_dims(mask, 1), 1)
    if is_jax_on("gpu", "tpu") and mask is None:
        return ops.dot_product_attention(query, key, value)
    query, key, value = (ops.transpose(x, (0, 2, 1, 3)) for x in (query, key, value))
    if keras.backend.backend() == "torch":
        import torch

        means = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask
        )
    else:
        query = query * query.shape[-1] ** -0.5
        # (B, heads, Q, S)
        logits = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2)))
        logits = float32_at_least(logits)
        if mask is not None:
            logits = ops.where(mask, logits, -float("inf"))
        weights = softmax(logits)
        means = ops.matmul(ops.cast(weights, value.dtype), value)
    return ops.transpose(means, (0, 2, 1, 3))


def float32_at_least(x):
    """A tensor in float32, or in its own dtype where that is more precise."""
    x = ops.convert_to_tensor(x)
    return ops.cast(x, keras.backend.result_type(x.dtype, "float32"))


def normal_like(x, seed):
    """Standard normal noise of the shape and dtype of a tensor.

    Args:
        x: float tensor.
        seed: int or `keras.random.SeedGenerator`.

    Returns:
        Tensor like `x`.
    """
    return keras.random.normal(ops.shape(x), dtype=x.dtype, seed=seed)


def repeat(step, count, state):
    """`keras.ops.fori_loop(0, count, step, state)`, whose gradient XLA compiles.

    TensorFlow has to be told the largest number of iterations for that.

    Args:
        step: callable `(number, state)`, from the number of an iteration (a scalar
            tensor or an int) and a state to the next state.
        count: int, the number of iterations.
        state: tensor or nested structure of tensors.

    Returns:
        The last state.
    """
    if keras.backend.backend() != "tensorflow":
        return ops.fori_loop(0, count, step, state)
    return ops.while_loop(
        lambda number, _: number < count,
        lambda number, state: (number + 1, step(number, state)),
        (0, state),
        maximum_iterations=count,
    )[1]


def _are_few(rows):
    """Whether rows are few. Exported for batches of any size, nothing is known."""
    return isinstance(rows, int) and rows < _FEW_ROWS


def is_jax_on(*platforms):
    """Whether the backend is JAX, and computes on one of these, such as `"cpu"`."""
    if keras.backend.backend() != "jax":
        return False
    import jax

    return jax.default_backend() in platforms


def chunked_map(fn, operands, sharded=False):
    """`fn(*operands)`, computed in chunks of the first axis where that is faster.

    It is on processors, whose caches hold what was computed for a chunk until it is
    needed.

    Args:
        fn: callable that computes each element along the first axis by itself.
        operands: list of tensors of the same first axis. The first is `(E, N, D)`, the
            rows of each element.
        sharded: bool, see `affine`: there are no chunks then.

    Returns:
        What `fn` returns, a tensor of that first axis.
    """
    operands = [ops.convert_to_tensor(operand) for operand in operands]
    count, rows, _ = operands[0].shape
    size = _CHUNK_OF_MANY_ROWS
    many_rows = count > size and isinstance(rows, int) and not _are_few(rows)
    if keras.backend.backend() == "torch":
        import torch

        # Gradients would be put together from as many parts, which costs more.
        all_at_once = torch.is_grad_enabled() or operands[0].device.type != "cpu"
        if all_at_once or not many_rows:
            return fn(*operands)
        chunks = zip(*(x.split(size) for x in operands), strict=True)
        return torch.cat([fn(*chunk) for chunk in chunks])
    if not is_jax_on("cpu") or sharded:
        return fn(*operands)
    # XLA takes twice as long for hundreds of small products as for some at a time.
    if count >= 256 and count % _CHUNK == 0:
        return _in_chunks(fn, _CHUNK)(*operands)
    if many_rows and count % size == 0:
        return _but_for_gradients(_in_chunks(fn, size), fn)(*operands)
    return fn(*operands)


def _in_chunks(fn, size):
    """`fn`, computed for as many elements along the first axis at a time."""

    def compute(*operands):
        chunks = [ops.reshape(x, (-1, size, *x.shape[1:])) for x in operands]
        results = ops.map(lambda chunk: fn(*chunk), chunks)
        return ops.reshape(results, (-1, *results.shape[2:]))

    return compute


def _but_for_gradients(quick, fn):
    """On JAX, `quick`, and the equal `fn` where something is differentiated."""
    import jax

    either = jax.custom_jvp(quick)

    @functools.partial(either.defjvp, symbolic_zeros=True)
    def derivative(values, tangents):
        is_zero = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]

        def of_others(*others):
            others = iter(others)
            pairs = zip(values, is_zero, strict=True)
            return fn(*(value if zero else next(others) for value, zero in pairs))

        def without_zeros(items):
            return [x for x, zero in zip(items, is_zero, strict=True) if not zero]

        return jax.jvp(of_others, without_zeros(values), without_zeros(tangents))

    return either


def remat(fn):
    """`keras.remat` of a function of tensors that returns one.

    It may also be differentiated twice and in forward mode, which TensorFlow's own does
    not let it. There in forward mode nothing is recomputed, and on PyTorch nothing by
    `torch.func`, which has no way to.

    Args:
        fn: callable of tensors. Others that it closes over get no gradient.

    Returns:
        Callable like `fn`.
    """
    if keras.backend.backend() == "torch":
        recomputed = keras.remat(fn)
        return lambda *tensors: (recomputed if _may_remat() else fn)(*tensors)
    if keras.backend.backend() == "tensorflow":
        return _remat_on_tensorflow(fn)
    return keras.remat(fn)


def _may_remat():
    import torch

    if torch.compiler.is_compiling():
        return True
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return True
    except RuntimeError:
        return False


def _remat_on_tensorflow(fn):
    import tensorflow as tf
    from tensorflow.python.eager import forwardprop_util

    @tf.custom_gradient
    def recomputed(*tensors):
        def gradients(upstream):
            again = [tf.identity(x) for x in tensors]
            if not tf.executing_eagerly():
                # Not before there is a gradient, as in `tf.recompute_grad`: else the
                # first results may be kept for it.
                given = tf.cast(tf.reduce_max(tf.reshape(upstream, [-1])[:1]), "bool")
                zero = tf.where(given == given, 0.0, float("nan"))
                again = [x + tf.cast(zero, x.dtype) for x in tensors]
            with tf.GradientTape() as tape:
                tape.watch(again)
                results = fn(*again)
            return tape.gradient(results, again, upstream, tf.UnconnectedGradients.ZERO)

        return fn(*map(tf.stop_gradient, tensors)), gradients

    def call(*tensors):
        in_forward_mode = forwardprop_util.pack_tangents(tensors).tangents
        return (fn if in_forward_mode else recomputed)(*tensors)

    return call


def add_rows(rows, index, num_rows):
    """Sum the rows that go to the same place.

    `keras.ops.segment_sum`, which is what this means and what other backends do. On
    PyTorch Keras first looks for indices out of range, and its gradient is slow.

    Args:
        rows: `(N, D)` tensor.
        index: `(N,)` int32 tensor, the place of each row, in `[0, num_rows)`.
        num_rows: int (or scalar int tensor), the number of places.

    Returns:
        `(num_rows, D)` tensor; zeros where no row goes.
    """
    if keras.backend.backend() == "torch":
        return rows.new_zeros((num_rows, rows.shape[1])).index_add(0, index, rows)
    return ops.segment_sum(rows, index, num_segments=num_rows)


def softmax(logits, axis=-1):
    """Softmax that also takes an axis of size one.

    Keras warns that this gives ones. With a single expert, slot or token it is meant.

    Args:
        logits: float tensor.
        axis: int.

    Returns:
        Tensor like `logits`, which sums to one along the axis.
    """
    if logits.shape[axis] == 1:
        return ops.ones_like(logits)
    return ops.softmax(logits, axis=axis)
