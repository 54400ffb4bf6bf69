"""Time compiled calls of Keras layers, interleaved, on any backend."""

import os
import platform
import time

import keras


def step(layer, inputs, backward=False, jit_compile=False):
    """One compiled call of a layer, as a function without arguments.

    The function returns when the result is there, not when it has been asked for.

    Args:
        layer: A built layer. Its outputs may be nested.
        inputs: Array.
        backward: Whether to call it in training and to compute the gradients for the
            inputs and all trainable weights too. What is pulled back are the outputs
            themselves and the losses that the layer added, so no loss of ours is timed.
        jit_compile: Whether TensorFlow compiles with XLA. JAX always does.
    """
    make = {"jax": _jax_step, "tensorflow": _tensorflow_step, "torch": _torch_step}
    inputs = keras.ops.convert_to_tensor(inputs)
    return make[keras.backend.backend()](layer, inputs, backward, jit_compile)


# Keras has no gradients, no compilation and no way to wait for a device of its own:
# this is the one place where the benchmarks speak to a backend. Weights and inputs are
# arguments or captures of the compiled function, never constants, or the compiler would
# do part of the work beforehand.


def _jax_step(layer, inputs, backward, jit_compile):
    import jax

    variables = layer.trainable_variables + layer.non_trainable_variables
    values = [v.value for v in variables]
    num_weights = len(layer.trainable_variables)

    def call(x, values):
        # Not `stateless_call`, which hands `training` even to a `call` without it.
        scope = keras.StatelessScope(zip(variables, values, strict=True), True)
        with scope:
            outputs = layer(x, training=backward)
            return (outputs, layer.losses) if backward else outputs

    def gradients(x, values):
        weights, state = values[:num_weights], values[num_weights:]
        outputs, pull_back = jax.vjp(lambda x, w: call(x, w + state), x, weights)
        return pull_back(outputs)

    run = jax.jit(gradients if backward else call)
    return lambda: jax.block_until_ready(run(inputs, values))


def _tensorflow_step(layer, inputs, backward, jit_compile):
    import tensorflow as tf

    sources = [v.value for v in layer.trainable_variables]

    @tf.function(jit_compile=jit_compile)
    def run(x):
        if not backward:
            return layer(x, training=False)
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = keras.tree.flatten(layer(x, training=True)) + layer.losses
        return tape.gradient(outputs, [x, *sources], output_gradients=outputs)

    def wait():
        run(inputs)
        tf.test.experimental.sync_devices()

    return wait


def _torch_step(layer, inputs, backward, jit_compile):
    import torch

    sources = [inputs.requires_grad_(), *(v.value for v in layer.trainable_variables)]

    def run():
        if not backward:
            with torch.no_grad():
                return layer(inputs, training=False)
        outputs = keras.tree.flatten(layer(inputs, training=True)) + layer.losses
        cotangents = [y.detach() for y in outputs]
        return torch.autograd.grad(outputs, sources, cotangents, allow_unused=True)

    def wait():
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return wait


def interleave(steps, rounds, progress=lambda: None):
    """Run steps in turn (A B C A B C ...), so that all meet the same disturbances.

    Args:
        steps: Dict from name to a function without arguments.
        rounds: How often each is timed, after two calls that are not.
        progress: Called after each round.

    Returns:
        Dict from name to a list of seconds, one entry per round.
    """
    for run in steps.values():
        run()
        run()
    seconds = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
        progress()
    return seconds


def machine():
    """What the numbers depend on: cores, device, backend, versions, dtype."""
    backend = keras.backend.backend()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "platform": platform.platform(),
        "cores": cores or os.cpu_count(),
        "device": str(keras.ops.zeros(()).device),
        "backend": f"{backend} {__import__(backend).__version__}",
        "keras": keras.__version__,
        "dtype": keras.config.dtype_policy().name,
    }
