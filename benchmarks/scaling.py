"""Forward time of a Soft MoE layer as experts multiply and slots stay as many.

Soft MoE costs as much as it has slots, whatever the number of experts that share them
(Soft MoE, section 2.2 and figure 6). Each number of experts is compared with the
smallest one, in the same round.

    KERAS_BACKEND=jax python benchmarks/scaling.py --shapes paper
"""

from typing import NamedTuple

import keras
import numpy as np
import report
from timing import contest, step, summarize

import keras_softmoe as ksm


class Shapes(NamedTuple):
    """Sizes of one benchmark: images, tokens of an image, widths, slots, experts."""

    images: int
    tokens: int
    width: int
    mlp_dim: int
    slots: int
    experts: tuple


SHAPES = {
    "small": Shapes(8, 49, 64, 128, slots=64, experts=(4, 16, 64)),
    "paper": Shapes(64, 196, 256, 512, slots=1024, experts=(8, 32, 128, 512, 1024)),
    # What "paper" means on an accelerator. 4,096 experts take 4.3 GB in float32.
    "paper_4096": Shapes(
        64, 196, 256, 512, slots=4096, experts=(8, 32, 128, 512, 1024, 2048, 4096)
    ),
}


def measure(shapes, patience, jit_compile=False):
    """Time all numbers of experts in turn. Yields a row for each."""
    input_shape = (shapes.images, shapes.tokens, shapes.width)
    inputs = np.random.default_rng(0).standard_normal(input_shape, "float32")
    inputs = inputs.astype(keras.config.dtype_policy().compute_dtype)
    steps = {}
    for num_experts in shapes.experts:
        # Equal experts are there sooner, and take no less time when called.
        layer = ksm.layers.SoftMoE(
            num_experts,
            shapes.mlp_dim,
            slots_per_expert=shapes.slots // num_experts,
            equal_experts=True,
        )
        layer.build(input_shape)
        steps[f"{num_experts} experts"] = step(layer, inputs, jit_compile=jit_compile)
    results = contest(steps, patience)
    fewest, *others = steps
    for name in others:
        row = {"name": name, "slots": shapes.slots, "pass": "forward"}
        yield {**row, **summarize(*results, name, [fewest])}


def measure_all(options):
    """Rows of all numbers of experts, for `report.run_alone`."""
    name = options.shapes
    if name == "paper" and report.accelerator(keras.backend.backend()):
        name = "paper_4096"
    return measure(SHAPES[name], report.patience(options), options.jit_compile)


def main(arguments=None):
    """Command line: see `--help`."""
    options = report.command_line(__doc__, SHAPES).parse_args(arguments)
    report.run_alone("scaling", options, measure_all)


if __name__ == "__main__":
    main()
