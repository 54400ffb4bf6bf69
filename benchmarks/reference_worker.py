"""A layer of the papers' own code, which runs once for each line that it is sent.

Started by `reference.py` with the Python of another environment, where the released
code and the JAX that it needs are installed. It knows nothing of our library.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from vmoe.nn.vit_moe import MlpMoeBlock


def layer_step(images, tokens, width, backward, **block):
    """One compiled call of a layer, as a function without arguments.

    Args:
        images: int.
        tokens: int, tokens of an image.
        width: int.
        backward: bool, whether to call it in training, and to compute the gradients of
            its output and its auxiliary loss for the inputs and all weights.
        **block: arguments of `MlpMoeBlock`.
    """
    layer = MlpMoeBlock(deterministic=not backward, split_rngs=True, **block)
    shape = (images, tokens, width)
    inputs = jnp.asarray(np.random.default_rng(0).standard_normal(shape, "float32"))
    keys = {"params": jax.random.key(0), "gating": jax.random.key(1)}
    weights = jax.jit(layer.init)(keys, inputs)["params"]

    def call(inputs, weights, key):
        outputs, metrics = layer.apply(
            {"params": weights}, inputs, rngs={"gating": key}
        )
        return (outputs, metrics["auxiliary_loss"]) if backward else outputs

    def gradients(inputs, weights, key):
        outputs, pull_back = jax.vjp(lambda x, w: call(x, w, key), inputs, weights)
        return pull_back(outputs)

    run = jax.jit(gradients if backward else call)
    return lambda: jax.block_until_ready(run(inputs, weights, keys["gating"]))


def main():
    step = layer_step(**json.loads(sys.argv[1]))
    print("ready", flush=True)
    for _ in sys.stdin:
        step()
        print("done", flush=True)


if __name__ == "__main__":
    main()
