"""Outputs and gradients on whichever backend Keras runs, as NumPy arrays."""

import keras
import numpy as np

from keras_softmoe import routers
from tests.support.references import to_numpy


def outputs(fn, inputs):
    """What `fn(inputs)` returns, for arrays in any structure.

    On JAX one program compiles faster than each of its operations.
    """
    inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
    if keras.backend.backend() == "jax":
        import jax

        with keras.StatelessScope():
            found = jax.jit(fn)(inputs)
    else:
        found = fn(inputs)
    return keras.tree.map_structure(to_numpy, found)


def value_and_gradients(fn, arrays, compiled=True):
    """Value of `fn(*tensors)`, a scalar, and its gradient for every array.

    An array that the value does not depend on gets a gradient of zeros. On JAX one
    program compiles faster than each of its operations, unless the same operations
    come hundreds of times: then pass `compiled=False`.
    """
    arrays = [np.asarray(a, "float32") for a in arrays]
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        value_and_grad = jax.value_and_grad(lambda tensors: fn(*tensors))
        arrays = [jax.numpy.asarray(a) for a in arrays]
        value, gradients = (jax.jit if compiled else lambda f: f)(value_and_grad)(
            arrays
        )
    elif backend == "tensorflow":
        import tensorflow as tf

        tensors = [tf.convert_to_tensor(a) for a in arrays]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = fn(*tensors)
        gradients = tape.gradient(
            value, tensors, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
    else:
        tensors = [_leaf(a) for a in arrays]
        value = fn(*tensors)
        gradients = _torch_gradients(value, tensors)
        value = value.detach()
    return float(to_numpy(value)), [to_numpy(g) for g in gradients]


def layer_gradients(layer, inputs, loss_fn, compiled=True, **call_kwargs):
    """Loss, gradient for the inputs, and gradients for the trainable weights.

    Args:
        layer: A built layer or model.
        inputs: Array, its only positional input.
        loss_fn: Callable from the outputs and the list of the losses that the layer
            added to a scalar.
        compiled: As in `value_and_gradients`.
        **call_kwargs: Passed to the call, for example `training=True`.

    Returns:
        Tuple of float, array of the shape of `inputs`, and dict from variable path
        to array.
    """
    variables = layer.trainable_variables

    def loss(x, *values):
        # Only JAX hands over values: the other backends watch the variables.
        with keras.StatelessScope(
            state_mapping=list(zip(variables, values, strict=False)),
            collect_losses=True,
        ):
            return loss_fn(layer(x, **call_kwargs), layer.losses)

    if keras.backend.backend() == "jax":
        weights = [to_numpy(v.value) for v in variables]
        value, gradients = value_and_gradients(loss, [inputs, *weights], compiled)
    else:
        value, gradients = _eager_gradients([v.value for v in variables], inputs, loss)
    paths = [v.path for v in variables]
    return value, gradients[0], dict(zip(paths, gradients[1:], strict=True))


def _eager_gradients(variables, inputs, loss):
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        x = tf.convert_to_tensor(inputs)
        with tf.GradientTape() as tape:
            tape.watch([x, *variables])
            value = loss(x)
        gradients = tape.gradient(
            value, [x, *variables], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return float(value), [to_numpy(tf.convert_to_tensor(g)) for g in gradients]

    x = _leaf(inputs)
    value = loss(x)
    gradients = _torch_gradients(value, [x, *variables])
    return float(value.detach()), [to_numpy(g) for g in gradients]


def _leaf(array):
    """A tensor where Keras has its own, in memory of its own."""
    return keras.ops.convert_to_tensor(np.array(array)).requires_grad_()


def _torch_gradients(value, sources):
    import torch

    if not value.requires_grad:
        return [torch.zeros_like(s).detach() for s in sources]
    gradients = torch.autograd.grad(value, sources, allow_unused=True)
    return [
        torch.zeros_like(s).detach() if g is None else g
        for s, g in zip(sources, gradients, strict=True)
    ]


def recorded(layer, inputs, **kwargs):
    """Outputs of a call and the `Decision` of the one router in the layer.

    On JAX they are arrays of one program, which compiles faster than each operation of
    it, and the layer keeps no losses and draws the same random numbers again.
    """

    def call(inputs):
        with routers.record() as decisions:
            found = layer(inputs, **kwargs)
        (decision,) = decisions.values()
        return found, decision

    if keras.backend.backend() == "jax":
        return outputs(call, inputs)
    return call(inputs)


def slope(fn, arrays, directions):
    """Derivative of `fn(*tensors)`, a scalar, along directions, in forward mode."""
    if keras.backend.backend() == "jax":
        import jax

        known = tuple(arrays), tuple(directions)
        found = jax.jit(lambda *known: jax.jvp(fn, *known)[1])(*known)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tensors, tangents = _tensors(arrays), _tensors(directions)
        with tf.autodiff.ForwardAccumulator(tensors, tangents) as accumulator:
            value = fn(*tensors)
        found = accumulator.jvp(value)
    else:
        import torch

        known = tuple(_tensors(arrays)), tuple(_tensors(directions))
        found = torch.func.jvp(fn, *known)[1]
    return float(to_numpy(found))


def changes_of_gradients(fn, arrays, directions):
    """Derivatives of the gradients of `fn(*tensors)` along directions.

    Returns:
        Two lists of an array for each of `arrays`: in forward mode over reverse mode,
        and in reverse mode over reverse mode.
    """
    argnums = tuple(range(len(arrays)))
    if keras.backend.backend() == "jax":
        import jax

        def along(known):
            return sum(map(jax.numpy.vdot, jax.grad(fn, argnums)(*known), directions))

        @jax.jit
        def both(*known):
            return jax.jvp(jax.grad(fn, argnums), *known)[1], jax.grad(along)(known[0])

        found = both(tuple(arrays), tuple(directions))
    elif keras.backend.backend() == "tensorflow":
        found = _changes_on_tensorflow(fn, _tensors(arrays), _tensors(directions))
    else:
        import torch

        arrays, directions = tuple(_tensors(arrays)), tuple(_tensors(directions))
        forward = torch.func.jvp(torch.func.grad(fn, argnums), arrays, directions)[1]
        arrays = [x.requires_grad_() for x in arrays]
        gradients = torch.autograd.grad(fn(*arrays), arrays, create_graph=True)
        total = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
        found = forward, torch.autograd.grad(total, arrays)
    return [[to_numpy(x) for x in each] for each in found]


def _changes_on_tensorflow(fn, tensors, directions):
    import tensorflow as tf

    def gradients():
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = fn(*tensors)
        return tape.gradient(value, tensors)

    with tf.autodiff.ForwardAccumulator(tensors, directions) as accumulator:
        found = gradients()
    forward = [accumulator.jvp(each) for each in found]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        found = gradients()
    return forward, tape.gradient(found, tensors, directions)


def gradients_of_each(fn, examples, arrays):
    """Gradients of `fn(example, *tensors)` for the arrays, `(N, ...)` for N examples.

    With the `vmap` of a backend; TensorFlow has none that takes what is not compiled.
    """
    argnums = tuple(range(1, 1 + len(arrays)))
    if keras.backend.backend() == "jax":
        import jax

        gradient = jax.jit(
            jax.vmap(jax.grad(fn, argnums), (0, *(None for _ in arrays)))
        )
        return [to_numpy(x) for x in gradient(examples, *arrays)]
    import torch

    gradient = torch.func.grad(fn, argnums)
    gradient = torch.func.vmap(gradient, (0, *(None for _ in arrays)))
    return [to_numpy(x) for x in gradient(*_tensors([examples, *arrays]))]


def _tensors(arrays):
    return [keras.ops.convert_to_tensor(x) for x in arrays]


def difference(fn, arrays, directions, step=1e-3):
    """`fn` of arrays, an array or a list of some, by central differences."""
    after, before = (
        fn([x + sign * step * d for x, d in zip(arrays, directions, strict=True)])
        for sign in (1, -1)
    )
    return keras.tree.map_structure(lambda a, b: (a - b) / (2 * step), after, before)
