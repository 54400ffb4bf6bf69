"""Derivatives beyond a gradient, as each backend offers them, as NumPy arrays."""

import keras

from tests.support.references import to_numpy


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
            gradients = jax.grad(fn, argnums)(*known)
            return sum(map(jax.numpy.vdot, gradients, directions))

        @jax.jit
        def both(*known):
            return jax.jvp(jax.grad(fn, argnums), *known)[1], jax.grad(along)(known[0])

        found = both(tuple(arrays), tuple(directions))
    elif keras.backend.backend() == "tensorflow":
        found = _changes_on_tensorflow(fn, _tensors(arrays), _tensors(directions))
    else:
        import torch

        arrays, directions = tuple(_tensors(arrays)), tuple(_tensors(directions))
        gradient = torch.func.grad(fn, argnums)
        forward = torch.func.jvp(gradient, arrays, directions)[1]
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
