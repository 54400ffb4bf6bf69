"""Time of each mixture-of-experts layer beside what it could cost at best.

Each layer takes turns with

- a dense MLP with as many multiply-adds (its hidden width is chosen so),
- the layer's matrix products alone (`keras.ops.matmul` and, backward, the two products
  that differentiation makes of each): operands of the same shapes, nothing in between,
  and
- for a soft layer on PyTorch, the layers of other packages (see `rivals.py`).

Then token choice without a capacity takes turns with capacity 1.25, and the two ways to
the experts with each other, gathering rows and multiplying with one-hot weights, at the
groups of images of 384 pixels; beside them the experts' products alone, which both
contain.

Only the ratios of times within a round mean something on another machine, or on one
that has other work to do.
"""

import gc
from math import prod
from typing import NamedTuple

import keras
import numpy as np
import report
import rivals
from keras import ops
from timing import contest, one_pass, step, summarize

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

# For the two ways to the experts.
LONG_SHAPES = {
    "small": Shapes(images=8, tokens=100, width=96, mlp_dim=192),
    # V-MoE at 384 pixels: 576 patches and a class token, 4,616 tokens in a group.
    "paper": Shapes(images=8, tokens=577, width=384, mlp_dim=1536),
}

# Images, tokens of an image, width, width of an expert, slots; and numbers of experts.
SCALING = {
    "small": (8, 49, 64, 128, 64, (4, 16, 64)),
    "paper": (64, 196, 256, 512, 1024, (8, 32, 128, 512, 1024)),
}

_routers = ksm.routers
# As many slots as in all results so far: those of the released code's rounding.
ROUNDED_UP = {"rounding": "ceil", "multiple_of": 4}
# Functions: a router with noise takes memory of the device as soon as it is there.
ROUTERS = {
    "soft_128x1": lambda: _routers.SoftRouter(128),
    "soft_32x6": lambda: _routers.SoftRouter(32, slots_per_expert=6),
    "token_choice": lambda: _routers.SoftmaxTokenChoiceRouter(
        32, priority="max", **ROUNDED_UP
    ),
    "expert_choice": lambda: _routers.SoftmaxExpertChoiceRouter(32, **ROUNDED_UP),
    "sinkhorn_expert_choice": lambda: _routers.SinkhornExpertChoiceRouter(
        32, **ROUNDED_UP
    ),
    "sparse_transport": lambda: _routers.SparseTransportExpertChoiceRouter(
        32, **ROUNDED_UP
    ),
    "biased_token_choice": lambda: _routers.SoftmaxTokenChoiceRouter(
        32, score="sigmoid", bias_update_rate=0.001, priority="max", **ROUNDED_UP
    ),
    "expert_race": lambda: _routers.ExpertRaceRouter(32),
    # Of eight images in a group each expert takes two.
    "whole_images": lambda: _routers.SoftmaxTokenChoiceRouter(4),
}

# Those that can gather.
SPARSE_LAYERS = ("token_choice", "expert_choice")

# Images in a group of a sparse router; a soft one sees one image at a time.
GROUP_IMAGES = 8


class Products(keras.layers.Layer):
    """Independent matrix products: `shapes` lists the two operands of each."""

    def __init__(self, shapes):
        super().__init__()
        rng = np.random.default_rng(0)

        # Results near one: no product meets infinities or subnormal numbers.
        def initializer(shape, dtype):
            sample = rng.standard_normal(shape, "float32") / shape[-1] ** 0.25
            return ops.cast(sample, dtype)

        self.operands = [
            [self.add_weight(shape, initializer) for shape in pair] for pair in shapes
        ]

    def call(self, inputs):
        return [ops.matmul(left, right) for left, right in self.operands]


def product_shapes(layer, images, tokens, width):
    """Operand shapes of a MoE layer's matrix products, in the order of the layer."""
    groups = images // layer.group_images
    # A slot has the tokens of an image, or one of them.
    of_slot = tokens if layer.routes_images else 1
    # A symbolic call: shapes, but no work.
    group = keras.KerasTensor((groups, images * tokens // groups // of_slot, width))
    routing = layer.router(group).routing
    num_experts, capacity = routing[0].shape[-2:]
    slots, mlp_dim = num_experts * capacity, layer.mlp_dim
    capacity = capacity * of_slot
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


def competitors(router, shapes, by_image=False):
    """The MoE layer, its equal in the dense world, its products and its rivals.

    Returns:
        Dict from name to built layer, and the inputs.
    """
    input_shape = (shapes.images, shapes.tokens, shapes.width)
    moe = moe_layer(router, shapes, "auto", by_image)
    products = product_shapes(moe, *input_shape)
    mlp_dim = multiply_adds(products) / (2 * prod(input_shape))
    dense = ksm.layers.MLP(max(1, round(mlp_dim)))
    dense.build(input_shape)
    layers = {"layer": moe, "dense": dense, "products": Products(products)}
    if isinstance(router, _routers.SoftRouter):
        layers |= rivals.soft_moe_layers(
            router.num_experts, router.slots_per_expert, shapes.width, shapes.mlp_dim
        )
    return layers, inputs_of(shapes)


def moe_layer(router, shapes, dispatcher, by_image=False):
    """A built MoE layer."""
    group_images = 1 if isinstance(router, _routers.SoftRouter) else GROUP_IMAGES
    cls = ksm.layers.ImageMoE if by_image else ksm.layers.MoE
    layer = cls(router, shapes.mlp_dim, group_images, dispatcher)
    layer.build((shapes.images, shapes.tokens, shapes.width))
    return layer


def inputs_of(shapes):
    """Random tokens."""
    input_shape = (shapes.images, shapes.tokens, shapes.width)
    return np.random.default_rng(0).standard_normal(input_shape, "float32")


def measure(names, shapes, patience, jit_compile=False):
    """Time the named layers. Yields one row per layer and pass."""
    for name in names:
        layers, inputs = competitors(
            ROUTERS[name](), shapes, by_image=name == "whole_images"
        )
        yield from both_passes(name, layers, inputs, patience, jit_compile)
        # The experts of the next layer need the room.
        del layers
        gc.collect()


def measure_dropless(shapes, patience, jit_compile=False):
    """Time token choice that drops nothing beside a capacity. Yields two rows."""
    layers = {
        name: moe_layer(
            _routers.SoftmaxTokenChoiceRouter(32, capacity_factor=capacity_factor),
            shapes,
            "auto",
        )
        for name, capacity_factor in (("dropless", None), ("capacity_1.25", 1.25))
    }
    inputs = inputs_of(shapes)
    yield from both_passes("dropless", layers, inputs, patience, jit_compile)


def measure_dispatch(names, shapes, patience, jit_compile=False):
    """Time gathering beside multiplying. Yields one row per layer and pass."""
    for name in names:
        layers = {
            dispatcher: moe_layer(ROUTERS[name](), shapes, dispatcher)
            for dispatcher in ("gather", "einsum")
        }
        products = product_shapes(
            layers["gather"], shapes.images, shapes.tokens, shapes.width
        )
        layers["products"] = Products(products)
        inputs = inputs_of(shapes)
        yield from both_passes(
            f"{name}_dispatch", layers, inputs, patience, jit_compile
        )


def measure_scaling(options):
    """Time a Soft MoE layer as experts multiply and slots stay as many: a row for each.

    It costs as much as it has slots, whatever the number of experts that share them
    (Soft MoE, section 2.2 and figure 6).
    """
    images, tokens, width, mlp_dim, slots, numbers = SCALING[options.shapes]
    inputs = inputs_of(Shapes(images, tokens, width, mlp_dim))
    inputs = inputs.astype(keras.config.dtype_policy().compute_dtype)
    steps = {}
    for number in numbers:
        # Equal experts are there sooner, and take no less time when called.
        layer = ksm.layers.SoftMoE(
            number, mlp_dim, slots_per_expert=slots // number, equal_experts=True
        )
        layer.build(inputs.shape)
        steps[f"{number} experts"] = step(
            layer, inputs, jit_compile=options.jit_compile
        )
    results = contest(steps, report.patience(options))
    fewest, *others = steps
    for name in others:
        row = {"name": name, "slots": slots, "pass": "forward"}
        yield {**row, **summarize(*results, name, [fewest])}


def both_passes(name, layers, inputs, patience, jit_compile):
    """Let layers take turns, first forward, then forward and backward."""
    inputs = inputs.astype(keras.config.dtype_policy().compute_dtype)
    inputs = dict.fromkeys(layers, inputs)
    for backward in (False, True):
        yield one_pass(name, layers, inputs, backward, patience, jit_compile)


def measure_all(options):
    """Rows of all contests of layers."""
    patience, jit_compile = report.patience(options), options.jit_compile
    names = options.layers
    yield from measure(names, SHAPES[options.shapes], patience, jit_compile)
    sparse = [name for name in names if name in SPARSE_LAYERS]
    if "token_choice" in names:
        yield from measure_dropless(SHAPES[options.shapes], patience, jit_compile)
    yield from measure_dispatch(
        sparse, LONG_SHAPES[options.shapes], patience, jit_compile
    )
