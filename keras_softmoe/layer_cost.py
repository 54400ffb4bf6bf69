"""Costs of layers for a shape of inputs, without building them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import keras

# Bytes of a number. Routers compute in float32 under any dtype policy.
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

# Layers without weights and products, which keep their output for the backward pass.
_WITHOUT_PRODUCTS = (
    keras.layers.Activation,
    keras.layers.Dropout,
    keras.layers.Identity,
)


class LayerCost(NamedTuple):
    """The cost of a layer, or of a sum of layers, for one batch of inputs.

    Costs are added with `+` and repeated with `*`.

    Attributes:
        weights: int, numbers in the weights that follow the dtype policy.
        float32_weights: int, numbers in weights that are float32 under any policy.
        products: float, multiply-adds in matrix products of a forward pass.
        kept: float, numbers in the compute dtype that are kept from the forward pass
            for the backward pass.
        kept_float32: float, such numbers that are float32 under any policy, and others
            of four bytes.
        kept_bytes: float, such numbers of one byte (masks of dropout).
        sharded_kernels: int, those of `weights` that dense sharding cuts: kernels of
            embeddings, attention and MLPs.
        slot_weights: int, those of `float32_weights` that belong to slots.
        mixtures: tuple of `MixtureCost`, one for each mixture of experts.

    Examples:
        >>> layer = ksm.layers.MLP(64)
        >>> per_image = ksm.layers.cost_of(layer, (1, 16, 32))
        >>> per_image.weights, per_image.products
        (4192, 65536)
        >>> (per_image + per_image.without_weights() * 2).weights
        4192
    """

    weights: int = 0
    float32_weights: int = 0
    products: float = 0
    kept: float = 0
    kept_float32: float = 0
    kept_bytes: float = 0
    sharded_kernels: int = 0
    slot_weights: int = 0
    mixtures: tuple = ()

    def __add__(self, other):
        return LayerCost(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, times):
        return LayerCost(*(times * value for value in self))

    @property
    def parameters(self) -> int:
        """Int, numbers in all weights."""
        return self.weights + self.float32_weights

    def without_weights(self) -> "LayerCost":
        """Return the cost of using the same layer once more."""
        return self._replace(
            weights=0,
            float32_weights=0,
            sharded_kernels=0,
            slot_weights=0,
            mixtures=(),
        )


class MixtureCost(NamedTuple):
    """Sizes of the parts of a mixture of experts that are sharded with the experts.

    Attributes:
        name: str, name of the layer.
        num_experts: int.
        expert_weights: int, numbers in kernels and biases of all experts.
        slot_weights: int, float32 numbers in the router that belong to slots.
        slots: int, slots of all experts for a batch of inputs.
        slot_width: int, numbers in a slot.
    """

    name: str
    num_experts: int
    expert_weights: int
    slot_weights: int
    slots: int
    slot_width: int


def cost_of(
    layer: keras.Layer, shape: Sequence[int], training: bool = False
) -> LayerCost:
    """Return the cost of a layer of this library, or of some layers of Keras.

    Those are `Dense`, `LayerNormalization`, `Activation`, `Dropout`, `Identity` and a
    `Sequential` of layers whose cost is known.

    Args:
        layer: `keras.layers.Layer`. It need not be built.
        shape: shape of its inputs, batch included; a dict of shapes where the layer
            takes several modalities.
        training: bool, whether to use the settings of training, such as the capacity of
            routers.

    Returns:
        `LayerCost`.

    Raises:
        ValueError: if the layer has no method `cost`.

    Examples:
        >>> layer = ksm.layers.SoftMoE(num_experts=4, mlp_dim=64)
        >>> ksm.layers.cost_of(layer, (1, 16, 32)).weights
        16768
    """
    if isinstance(layer, keras.layers.Dense):
        return dense_cost(shape[-1], layer.units, math.prod(shape[:-1]), layer.use_bias)
    if isinstance(layer, keras.layers.LayerNormalization):
        return normalization_cost(shape, layer.center)
    if isinstance(layer, _WITHOUT_PRODUCTS):
        return LayerCost(kept=math.prod(shape))
    if isinstance(layer, keras.Sequential):
        total = LayerCost()
        for part in layer.layers:
            total += cost_of(part, shape, training)
            shape = part.compute_output_shape(shape)
        return total
    if not hasattr(layer, "cost"):
        raise ValueError(
            "`layer` must have a method `cost(shape, training)` that returns a "
            "`keras_softmoe.layers.LayerCost`. Received: "
            f"layer={layer!r}."
        )
    return layer.cost(shape, training)


def dense_cost(
    inputs: int,
    outputs: int,
    times: int = 1,
    use_bias: bool = True,
    is_sharded: bool = False,
) -> LayerCost:
    """Return the cost of a dense layer. It keeps nothing for the backward pass.

    Args:
        inputs: int, width of a vector.
        outputs: int, width of the result.
        times: int, number of vectors it is applied to.
        use_bias: bool.
        is_sharded: bool, whether dense sharding cuts its kernel.
    """
    kernel = inputs * outputs
    return LayerCost(
        weights=kernel + use_bias * outputs,
        products=times * kernel,
        sharded_kernels=is_sharded * kernel,
    )


def normalization_cost(shape: Sequence[int], center: bool = True) -> LayerCost:
    """Return the cost of a layer normalization.

    The input, the output and the centred input are kept for the backward pass.

    Args:
        shape: sequence of ints, the shape of the input with the batch.
        center: bool, whether there is an offset.
    """
    numbers = math.prod(shape)
    return LayerCost(
        weights=(1 + center) * shape[-1], kept=2 * numbers, kept_float32=numbers
    )


def joined_shape(shapes):
    """Return `(B, S, D)` of tokens of any rank, or of a dict of modalities."""
    if isinstance(shapes, dict):
        batch, _, width = next(iter(shapes.values()))
        return batch, sum(shape[1] for shape in shapes.values()), width
    return shapes[0], math.prod(shapes[1:-1]), shapes[-1]


def sum_costs(cost_of_shape, shapes):
    """Return the cost of a layer applied to each modality, with its weights once.

    Args:
        cost_of_shape: callable from a shape to a `LayerCost`.
        shapes: dict of shapes, or one of them.
    """
    parts = shapes.values() if isinstance(shapes, dict) else [shapes]
    first, *others = map(cost_of_shape, parts)
    return sum((cost.without_weights() for cost in others), start=first)
