"""Time compiled calls of Keras layers, interleaved, on any backend."""

import gc
import statistics
import time
from typing import NamedTuple

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
    return lambda: wait(run(inputs, values))


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

    return lambda: wait(run(inputs))


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

    return lambda: wait(run())


def wait(values):
    """Return when devices have computed the values."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        jax.block_until_ready(values)
    elif backend == "tensorflow":
        import tensorflow as tf

        tf.test.experimental.sync_devices()
    else:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def fit_step(model, inputs, targets):
    """One step of `fit`, as a function without arguments.

    Without its input pipeline: TensorFlow's would tune itself anew for each epoch of
    one batch, and waits for that longer than the step takes.

    Args:
        model: A compiled `keras.Model`.
        inputs: Array, one batch.
        targets: Array, one batch.
    """

    def run():
        model.train_on_batch(inputs, targets)
        wait([v.value for v in model.trainable_variables])

    return run


class Patience(NamedTuple):
    """When a contest ends: after `rounds`, or sooner once `seconds` are over.

    Three rounds are run in any case (unless `rounds` is less): a median needs them.
    """

    rounds: int = 20
    seconds: float = 10.0


def contest(steps, patience):
    """Run steps in turn (A B C A B C ...), so that all meet the same disturbances.

    Args:
        steps: Dict from name to a function without arguments.
        patience: `Patience`.

    Returns:
        Two dicts from name: to the seconds of the first call, which traces and
        compiles, and to a list of seconds, one entry per round.
    """
    # What earlier contests left behind takes room, gigabytes on PyTorch.
    gc.collect()
    first_call = {name: _seconds(run) for name, run in steps.items()}
    start = time.perf_counter()
    # Allocators and caches settle in a second call. It is not timed, and left out where
    # calls are so long that nobody would see it.
    if sum(first_call.values()) < patience.seconds:
        for run in steps.values():
            run()
    seconds = {name: [] for name in steps}
    for count in range(patience.rounds):
        if count >= 3 and time.perf_counter() - start > patience.seconds:
            break
        for name, run in steps.items():
            seconds[name].append(_seconds(run))
    return first_call, seconds


def _seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def summarize(first_call, seconds, ours, rivals):
    """Medians, and the ratios of our time to those of rivals in the same round.

    Args:
        first_call: As `contest` returns it.
        seconds: As `contest` returns it.
        ours: The name whose times are divided.
        rivals: The names by whose times they are divided.

    Returns:
        A dict of plain values: `ours`, `rounds`, `ms` and `first_call_s` (by name), and
        `ratios` (by rival: `median`, `min`, `max`, and the median of `"products"`, if
        they take part, over the rival as `products`).
    """
    names = [ours, *rivals]
    ratios = {}
    for rival in rivals:
        pairs = zip(seconds[ours], seconds[rival], strict=True)
        of_rounds = [mine / theirs for mine, theirs in pairs]
        ratios[rival] = {
            "median": statistics.median(of_rounds),
            "min": min(of_rounds),
            "max": max(of_rounds),
        }
        if "products" in rivals and rival != "products":
            pairs = zip(seconds["products"], seconds[rival], strict=True)
            limit = statistics.median(least / theirs for least, theirs in pairs)
            ratios[rival]["products"] = limit
    return {
        "ours": ours,
        "rounds": len(seconds[ours]),
        "ms": {name: 1e3 * statistics.median(seconds[name]) for name in names},
        "first_call_s": {name: first_call[name] for name in names},
        "ratios": ratios,
    }


def one_pass(name, layers, inputs, backward, patience, jit_compile):
    """Let layers or models take turns: forward, or forward and backward.

    Args:
        name: What the row is called.
        layers: Dict from name to built layer.
        inputs: Dict from name to array.
        backward, jit_compile: As in `step`.
        patience: `Patience`.
    """
    steps = {
        key: step(layer, inputs[key], backward, jit_compile)
        for key, layer in layers.items()
    }
    return row_of_pass(name, steps, backward, patience)


def row_of_pass(name, steps, backward, patience):
    """Let steps take turns, ours first: a row, `summarize` with `name` and `pass`."""
    ours, *rivals = steps
    kind = "forward+backward" if backward else "forward"
    found = summarize(*contest(steps, patience), ours, rivals)
    return {"name": name, "pass": kind, **found}
