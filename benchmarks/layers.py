"""Time of each mixture-of-experts layer beside what it could cost at best.

Each layer takes turns with

- a dense MLP with as many multiply-adds (its hidden width is chosen so), and
- the layer's matrix products alone: operands of the same shapes, each laid out as its
  product likes it best, nothing in between.

Only the ratios of times within a round mean something on another machine, or on one
that has other work to do.

    KERAS_BACKEND=jax python benchmarks/layers.py --shapes paper --layers soft_128x1
"""

import argparse
import gc
import json
import os
import statistics
from math import prod
from typing import NamedTuple

import keras
import numpy as np
from keras import ops
from timing import interleave, machine, step

import keras_softmoe as ksm
from keras_softmoe.ops import DenseRouting


class Shapes(NamedTuple):
    """Sizes of one benchmark: images, tokens of an image, widths."""

    images: int
    tokens: int
    width: int
    mlp_dim: int


SHAPES = {
    "small": Shapes(images=16, tokens=64, width=96, mlp_dim=192),
    # Soft MoE S/16 at 224 pixels.
    "paper": Shapes(images=32, tokens=196, width=384, mlp_dim=1536),
}

_routers = ksm.routers
ROUTERS = {
    "soft_128x1": _routers.SoftRouter(128),
    "soft_32x6": _routers.SoftRouter(32, slots_per_expert=6),
    "token_choice": _routers.SoftmaxTokenChoiceRouter(32, priority="max"),
    "expert_choice": _routers.SoftmaxExpertChoiceRouter(32),
    "sinkhorn_token_choice": _routers.SinkhornTokenChoiceRouter(32, priority="max"),
    "sinkhorn_expert_choice": _routers.SinkhornExpertChoiceRouter(32),
    "sparse_transport": _routers.SparseTransportExpertChoiceRouter(32),
    "identity": _routers.IdentityRouter(32),
}

# Images in a group of a sparse router; a soft one sees one image at a time.
GROUP_IMAGES = 8


class Products(keras.layers.Layer):
    """Independent matrix products: `shapes` lists the two operands of each."""

    def __init__(self, shapes):
        super().__init__()
        rng = np.random.default_rng(0)

        # Results near one: no product meets infinities or subnormal numbers.
        def initializer(shape, dtype):
            return rng.standard_normal(shape, dtype) / shape[-1] ** 0.25

        self.operands = [
            [self.add_weight(shape, initializer) for shape in pair] for pair in shapes
        ]

    def call(self, inputs):
        return [ops.matmul(left, right) for left, right in self.operands]


def product_shapes(layer, images, tokens, width):
    """Operand shapes of a MoE layer's matrix products, in the order of the layer."""
    groups = images // layer.group_images
    # A symbolic call: shapes, but no work.
    group = keras.KerasTensor((groups, images * tokens // groups, width))
    routing = layer.router(group).routing
    num_experts, capacity = routing[0].shape[-2:]
    slots, mlp_dim = num_experts * capacity, layer.mlp_dim
    experts = [
        ((num_experts, groups * capacity, width), (num_experts, width, mlp_dim)),
        ((num_experts, groups * capacity, mlp_dim), (num_experts, mlp_dim, width)),
    ]
    if not isinstance(routing, DenseRouting):
        return experts
    logits = ((images * tokens, width), (width, slots))
    dispatch = ((groups, slots, tokens), (groups, tokens, width))
    combine = ((groups, tokens, slots), (groups, slots, width))
    return [logits, dispatch, *experts, combine]


def multiply_adds(shapes):
    """Number of multiply-adds in a list of products."""
    return sum(prod(left) * right[-1] for left, right in shapes)


def competitors(router, shapes, dispatcher):
    """The MoE layer, its equal in the dense world, and its products; and the inputs."""
    input_shape = (shapes.images, shapes.tokens, shapes.width)
    group_images = 1 if isinstance(router, _routers.SoftRouter) else GROUP_IMAGES
    moe = ksm.layers.MoE(router, shapes.mlp_dim, group_images, dispatcher)
    moe.build(input_shape)
    products = product_shapes(moe, *input_shape)
    mlp_dim = multiply_adds(products) / (2 * prod(input_shape))
    dense = ksm.layers.MLP(max(1, round(mlp_dim)))
    dense.build(input_shape)
    inputs = np.random.default_rng(0).standard_normal(input_shape, "float32")
    return {"layer": moe, "dense": dense, "products": Products(products)}, inputs


def summarize(seconds):
    """Median milliseconds, and the ratios of times in the same round."""
    result = {
        f"{name}_ms": 1e3 * statistics.median(times) for name, times in seconds.items()
    }
    for other in ("dense", "products"):
        ratios = [a / b for a, b in zip(seconds["layer"], seconds[other], strict=True)]
        result[f"to_{other}"] = {
            "median": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        }
    return result


def measure(names, shapes, rounds, dispatcher="auto", jit_compile=False, progress=None):
    """Time the named layers. Returns one dict per layer and pass."""
    results = []
    for name in names:
        layers, inputs = competitors(ROUTERS[name], shapes, dispatcher)
        for backward in (False, True):
            steps = {
                key: step(layer, inputs, backward, jit_compile)
                for key, layer in layers.items()
            }
            seconds = interleave(steps, rounds, progress or (lambda: None))
            kind = "forward+backward" if backward else "forward"
            results.append({"layer": name, "pass": kind, **summarize(seconds)})
        # The experts of the next layer need the room.
        del layers, steps
        gc.collect()
    return results


def table(results):
    """Results as lines of text."""
    heads = (
        "layer",
        "pass",
        "ms",
        "/ dense MLP (min to max)",
        "/ products (min to max)",
    )
    lines = ["{:<23} {:<17} {:>8}   {:<25} {}".format(*heads)]
    for row in results:
        ratios = [
            "{median:5.2f} ({min:.2f} to {max:.2f})".format(**row[key])
            for key in ("to_dense", "to_products")
        ]
        lines.append(
            "{:<23} {:<17} {:>8.2f}   {:<25} {}".format(
                row["layer"], row["pass"], row["layer_ms"], *ratios
            )
        )
    return "\n".join(lines)


def write_json(path, content):
    """Write aside and rename, so that no reader ever finds half a file."""
    aside = f"{path}.part"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
    os.replace(aside, path)


def main(arguments=None):
    """Command line: see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=20, help="at least 1")
    parser.add_argument("--layers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument(
        "--dispatcher", choices=("auto", "gather", "einsum"), default="auto"
    )
    parser.add_argument(
        "--jit-compile", action="store_true", help="compile with XLA on TensorFlow"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1. Received: {options.rounds}.")

    bar = keras.utils.Progbar(
        2 * len(options.layers) * options.rounds, unit_name="round"
    )
    results = measure(
        options.layers,
        SHAPES[options.shapes],
        options.rounds,
        options.dispatcher,
        options.jit_compile,
        lambda: bar.add(1),
    )
    content = {
        "machine": machine(),
        "shapes": SHAPES[options.shapes]._asdict(),
        "rounds": options.rounds,
        "dispatcher": options.dispatcher,
        "results": results,
    }
    for part in ("machine", "shapes"):
        print(", ".join(f"{key}: {value}" for key, value in content[part].items()))
    print(table(results))
    if options.json:
        write_json(options.json, content)


if __name__ == "__main__":
    main()
