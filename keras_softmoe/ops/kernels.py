"""Operations that a backend can compute faster than Keras does.

Each docstring gives the definition in `keras.ops`. Layers have no other code that
depends on the backend for its speed.
"""

import functools
import itertools

import keras
import numpy as np
from keras import ops

from keras_softmoe.keras_adapter.layers import only_finds_shapes

if keras.backend.backend() == "torch":
    import torch
    from torch.nn import functional

# GELU in the tanh approximation, of a tensor
gelu = functools.partial(ops.gelu, approximate=True)
if keras.backend.backend() == "torch":
    gelu = functools.partial(functional.gelu, approximate="tanh")

# Products of fewer rows per expert are small, see `affine` and `chunked_map`.
_FEW_ROWS = 128
# Experts in a chunk: with few rows on JAX, and with many
_CHUNK = 8
_CHUNK_OF_MANY_ROWS = 4
# Bytes of input from which PyTorch computes in chunks: the hidden values of four times
# that size have left the caches of most processors by then.
_LARGE = 5 * 2**20


def compiled_on_jax(*static):
    """Return a decorator that compiles a function once for its shapes on JAX.

    Without it, JAX compiles a loop in the function again in every eager call. `static`
    are names of arguments that are not tensors.
    """

    def decorate(fn):
        if keras.backend.backend() != "jax":
            return fn
        import jax

        return functools.wraps(fn)(jax.jit(fn, static_argnames=static))

    return decorate


def affine(x, kernel, bias=None, sharded=False):
    """`matmul(x, kernel) + bias`, for one matrix or a stack.

    `(..., D)` by `(D, H)` is `(..., H)`, with a bias `(H,)`; `(E, N, D)` by a stack
    `(E, D, H)` is `(E, N, H)`, with a bias `(E, 1, H)`. A stack that may be sharded is
    computed at once: chunks would be copied to every device.

    The rows of all images are one matrix: with a separate axis of images, XLA's
    gradient of the kernel takes up to 1.5 times as long on a CPU. For stacks with few
    rows see `_product_of_few_rows`. PyTorch adds the bias within the product.
    """
    if isinstance(kernel, keras.Variable):
        # With factors of LoRA it is a tensor.
        kernel = kernel.value
    bias = bias.value if isinstance(bias, keras.Variable) else bias
    stacked = len(kernel.shape) == 3
    if keras.backend.backend() == "torch":
        if stacked:
            return x.bmm(kernel) if bias is None else torch.baddbmm(bias, x, kernel)
        return functional.linear(x, kernel.T, bias)
    if stacked:
        # The number of rows is unknown in an exported model.
        are_few = isinstance(x.shape[1], int) and x.shape[1] < _FEW_ROWS
        if are_few and is_jax_on("cpu") and not sharded:
            products = _product_of_few_rows(x, kernel)
        else:
            products = ops.matmul(x, kernel)
        return products if bias is None else products + bias
    rows = ops.matmul(reshape(x, (-1, x.shape[-1])), kernel)
    rows = rows if bias is None else rows + bias
    return reshape(rows, (*ops.shape(x)[:-1], kernel.shape[-1]))


@compiled_on_jax()
def _product_of_few_rows(x, kernel):
    """Return `matmul` of stacks with few rows for each matrix, for JAX on CPUs.

    For the gradient of the rows, XLA would transpose all kernels.
    """
    import jax
    from jax import numpy as jnp

    @jax.custom_jvp
    def product(x, kernel):
        return jnp.matmul(x, kernel)

    @product.defjvp
    def derivative(values, tangents):
        (x, kernel), (of_x, of_kernel) = values, tangents
        # (E, D, N): JAX transposes this to a gradient of that layout, for which XLA
        # transposes the few rows. The barrier keeps XLA from undoing it.
        columns = jax.lax.optimization_barrier(of_x.swapaxes(1, 2))
        # (E, H, N)
        change = jnp.einsum("edh,edn->ehn", kernel, columns)
        change = change.swapaxes(1, 2) + jnp.matmul(x, of_kernel)
        return product(x, kernel), change

    return product(x, kernel)


def layer_norm(x, gamma, beta, epsilon):
    """Compute `keras.ops.layer_normalization` of the last axis, in the dtype of `x`.

    PyTorch has one operator for it, in place of ten.
    """
    if keras.backend.backend() != "torch" or hasattr(x, "placements"):
        outputs = ops.layer_normalization(x, gamma, beta, -1, epsilon)
        return ops.cast(outputs, x.dtype)
    gamma, beta = (None if w is None else as_tensor(w) for w in (gamma, beta))
    if gamma is None or gamma.dtype == x.dtype:
        return functional.layer_norm(x, x.shape[-1:], gamma, beta, epsilon)
    # With mixed precision the weights are more precise than the tokens.
    precise = x.to(gamma.dtype)
    precise = functional.layer_norm(precise, x.shape[-1:], gamma, beta, epsilon)
    return precise.to(x.dtype)


def patches(images, kernel, bias):
    """Compute `keras.ops.conv` of patches that do not overlap, `(B, rows, columns, D)`.

    Images are `(B, height, width, channels)`, the kernel `(rows, columns, channels, D)`
    with rows and columns of a patch, the bias `(D,)`.
    """
    stride = tuple(kernel.shape[:2])
    if keras.backend.backend() != "torch" or only_finds_shapes():
        return ops.conv(images, kernel, stride, data_format="channels_last") + bias
    # Images of the processor go to the device of Keras. PyTorch has channels first.
    images = ops.convert_to_tensor(images).permute(0, 3, 1, 2)
    kernel = as_tensor(kernel).permute(3, 2, 0, 1)
    grid = functional.conv2d(images, kernel, as_tensor(bias), stride)
    return grid.permute(0, 2, 3, 1)


def attend(query, key, value, mask=None):
    """Compute `keras.ops.dot_product_attention`, with a softmax in float32 or more.

    Queries are `(B, Q, heads, head_dim)`, as is the result; keys and values
    `(B, S, heads, head_dim)`. A `(B, S)` bool mask is `False` for tokens without
    attention, and is ignored for images without a `True`.

    JAX has a fused kernel on accelerators; on CPUs plain products are faster. PyTorch
    has one for both, for which Keras would copy the operands.
    """
    if mask is not None:
        # The mean of no tokens would be 0 / 0.
        is_empty = ops.logical_not(ops.any(mask, axis=-1, keepdims=True))
        mask = ops.logical_or(mask, is_empty)
        # (B, 1, 1, S)
        mask = ops.expand_dims(ops.expand_dims(mask, 1), 1)
    if is_jax_on("gpu", "tpu") and mask is None:
        return ops.dot_product_attention(query, key, value)
    query, key, value = (swap_axes(x, 1, 2) for x in (query, key, value))
    if keras.backend.backend() == "torch":
        attention = functional.scaled_dot_product_attention
        known = () if mask is None else (mask,)
        means = on_own_groups(attention, query, key, value, *known)
    else:
        query = query * query.shape[-1] ** -0.5
        # (B, heads, Q, S)
        logits = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2)))
        logits = float32_at_least(logits)
        if mask is not None:
            logits = ops.where(mask, logits, -float("inf"))
        weights = softmax(logits)
        means = ops.matmul(ops.cast(weights, value.dtype), value)
    return swap_axes(means, 1, 2)


def on_own_groups(function, *tensors):
    """Apply a function to tensors, to the groups of this process if they are sharded.

    PyTorch has no rules for shards of some operations, and searches for others for
    seconds. The first axis of all tensors and of the result is that of groups.
    """
    sharded = [x for x in tensors if hasattr(x, "placements")]
    if not sharded:
        return function(*tensors)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    # Groups stay where they are if the devices divide them; else each has all of them.
    mesh, size = sharded[0].device_mesh, sharded[0].shape[0]
    placements = [Replicate()] * mesh.ndim
    if size % mesh.size() == 0:
        placements = [
            p if p == Shard(0) else Replicate() for p in sharded[0].placements
        ]

    def own(x):
        if not hasattr(x, "placements"):
            x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)
        return x.redistribute(mesh, placements).to_local()

    return DTensor.from_local(function(*map(own, tensors)), mesh, placements)


def float32_at_least(x):
    """Return a tensor in float32, or in its own dtype if that is more precise."""
    x = ops.convert_to_tensor(x)
    return ops.cast(x, keras.backend.result_type(x.dtype, "float32"))


def repeat(step, count, state):
    """Compute `keras.ops.fori_loop(0, count, step, state)`, with a gradient under XLA.

    For that TensorFlow must know the largest number of iterations.
    """
    if keras.backend.backend() != "tensorflow":
        return ops.fori_loop(0, count, step, state)
    return ops.while_loop(
        lambda number, _: number < count,
        lambda number, state: (number + 1, step(number, state)),
        (0, state),
        maximum_iterations=count,
    )[1]


def is_jax_on(*platforms):
    """Return whether the backend is JAX on one of these platforms, such as `"cpu"`."""
    if keras.backend.backend() != "jax":
        return False
    import jax

    return jax.default_backend() in platforms


def is_jax_on_nvidia():
    """Return whether the backend is JAX on GPUs of NVIDIA, and not of AMD."""
    if not is_jax_on("gpu"):
        return False
    import jax

    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def chunked_map(fn, operands, sharded=False):
    """`fn(*operands)`, computed in chunks of the first axis if that is faster.

    It is faster on CPUs, whose caches hold the intermediate results of a chunk. `fn`
    computes each element along the first axis separately, and the first operand is
    `(E, N, D)`. If `sharded`, see `affine`, there are no chunks.
    """
    count, rows, width = operands[0].shape
    size = _CHUNK_OF_MANY_ROWS
    # The number of rows is unknown in an exported model.
    many_rows = count > size and isinstance(rows, int) and rows >= _FEW_ROWS
    if keras.backend.backend() == "torch":
        # Gradients of chunks would have to be concatenated, which costs more.
        all_at_once = torch.is_grad_enabled() or operands[0].device.type != "cpu"
        element = operands[0].element_size()
        if all_at_once or not many_rows or count * rows * width * element < _LARGE:
            return fn(*operands)
        chunks = zip(*(x.split(size) for x in operands), strict=True)
        return torch.cat([fn(*chunk) for chunk in chunks])
    if not is_jax_on("cpu") or sharded:
        return fn(*operands)
    # XLA takes twice as long for hundreds of small products at once.
    if count >= 256 and count % _CHUNK == 0:
        return _in_chunks(fn, _CHUNK)(*operands)
    if many_rows and count % size == 0:
        return _with_gradients_of(_in_chunks(fn, size), fn)(*operands)
    return fn(*operands)


def _in_chunks(fn, size):
    """Return `fn`, computed for `size` elements of the first axis at a time."""

    def compute(*operands):
        chunks = [reshape(x, (-1, size, *x.shape[1:])) for x in operands]
        results = ops.map(lambda chunk: fn(*chunk), chunks)
        return reshape(results, (-1, *results.shape[2:]))

    return compute


def _with_gradients_of(quick, fn):
    """Return `quick`, which JAX replaces by the equal `fn` for derivatives."""
    import jax

    either = jax.custom_jvp(quick)

    @functools.partial(either.defjvp, symbolic_zeros=True)
    def derivative(values, tangents):
        # Only operands with a tangent: frozen kernels cost no products.
        moves = [
            not isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents
        ]

        def of_moving(*some):
            some = iter(some)
            pairs = zip(values, moves, strict=True)
            return fn(*(next(some) if moving else x for x, moving in pairs))

        chosen = (itertools.compress(xs, moves) for xs in (values, tangents))
        return jax.jvp(of_moving, *map(list, chosen))

    return either


def add_rows(rows, index, num_rows):
    """Compute `keras.ops.segment_sum`, without PyTorch's check and slow gradient.

    `(N, D)` rows go to the places `index`, `(N,)` int32 in `[0, num_rows)`; others of
    the `(num_rows, D)` result are zeros.
    """
    if keras.backend.backend() == "torch":
        return rows.new_zeros((num_rows, rows.shape[1])).index_add(0, index, rows)
    return ops.segment_sum(rows, index, num_segments=num_rows)


def take_rows(rows, index):
    """Compute `keras.ops.take` of the first axis, `(N, D)` by `(M,)` to `(M, D)`.

    On PyTorch, Keras looks for negative indices first, and converts all.
    """
    if keras.backend.backend() == "torch":
        return rows.index_select(0, index)
    return ops.take(rows, index, axis=0)


def matmul(x, y):
    """Compute `keras.ops.matmul` of `(G, N, M)` and `(M, D)` or `(G, M, D)` tensors.

    PyTorch's for tensors of any rank reshapes both of rank three, and the product.
    Where only shapes are found, costs are counted by Keras' products.
    """
    y = y.value if isinstance(y, keras.Variable) else y
    if keras.backend.backend() != "torch" or x.is_meta:
        return ops.matmul(x, y)
    return x.bmm(y) if y.dim() == 3 else x @ y


# Views of Keras take ten times as long as those of PyTorch: a fifth of a small layer.


def as_tensor(x):
    """Compute `keras.ops.convert_to_tensor`, at once for a tensor or `None`."""
    if keras.backend.backend() == "torch" and isinstance(x, torch.Tensor):
        return x
    if x is None:
        return None
    if keras.backend.backend() == "jax" and isinstance(x, np.ndarray):
        import jax

        # Keras makes float32 of integers and bools where `floatx` is bfloat16.
        return jax.numpy.asarray(x)
    return x.value if isinstance(x, keras.Variable) else ops.convert_to_tensor(x)


def as_mask(x):
    """Return a bool tensor: masks of tokenizers are often of int32."""
    if keras.backend.backend() == "torch" and isinstance(x, torch.Tensor):
        return x if x.dtype is torch.bool else x.bool()
    return ops.cast(as_tensor(x), "bool")


def reshape(x, shape):
    """Compute `keras.ops.reshape`; the shape is a tuple of ints."""
    x = x.value if isinstance(x, keras.Variable) else x
    if keras.backend.backend() == "torch" and isinstance(x, torch.Tensor):
        return x.reshape(shape)
    return ops.reshape(x, shape)


def swap_axes(x, first, second):
    """Compute `keras.ops.swapaxes`."""
    if keras.backend.backend() == "torch" and isinstance(x, torch.Tensor):
        return x.transpose(first, second)
    return ops.swapaxes(x, first, second)


def softmax(logits, axis=-1):
    """`keras.ops.softmax` without its warning for an axis of size one.

    Such an axis, of a single expert, slot or token, is intended.
    """
    if logits.shape[axis] == 1:
        return ops.ones_like(logits)
    if keras.backend.backend() == "torch":
        return logits.softmax(axis)
    return ops.softmax(logits, axis=axis)
