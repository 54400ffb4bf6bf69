"""What layers cost for a shape of inputs, without being built."""

import math
from typing import NamedTuple

import keras


class LayerCost(NamedTuple):
    """What a layer, or a sum of layers, takes for one batch of inputs.

    Costs are added with `+` and repeated with `*`.

    Attributes:
        weights: int, numbers in the weights that follow the dtype policy.
        float32_weights: int, numbers in weights that are float32 under any policy.
        products: float, multiply-adds in matrix products of a forward pass.
        kept: float, numbers in the dtype of computation that the backward pass needs
            of the forward pass.
        kept_float32: float, such numbers that are float32 under any policy, and
            whatever else takes four bytes.
        kept_bytes: float, such numbers of one byte (masks of dropout).
        dense_kernels: int, those of `weights` that are kernels of dense layers outside
            of experts.
        mixtures: tuple of `MixtureCost`, one for each mixture of experts.
    """

    weights: int = 0
    float32_weights: int = 0
    products: float = 0
    kept: float = 0
    kept_float32: float = 0
    kept_bytes: float = 0
    dense_kernels: int = 0
    mixtures: tuple = ()

    def __add__(self, other):
        return LayerCost(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, times):
        return LayerCost(*(times * value for value in self))


class MixtureCost(NamedTuple):
    """What of a mixture of experts is sharded when experts are.

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


def cost_of(layer, shape, training=False):
    """The cost of a layer of this library, or of a dense or normalization layer.

    Args:
        layer: `keras.layers.Layer`. It need not be built.
        shape: shape of its inputs, batch included; a dict of shapes where the layer
            takes several modalities.
        training: bool, whether the settings of training count, such as the capacity of
            routers.

    Returns:
        `LayerCost`.

    Raises:
        ValueError: if the layer does not say what it costs.
    """
    if isinstance(layer, keras.layers.Dense):
        return dense(shape[-1], layer.units, math.prod(shape[:-1]), layer.use_bias)
    if isinstance(layer, keras.layers.LayerNormalization):
        return normalization(shape, layer.center)
    if not hasattr(layer, "cost"):
        raise ValueError(
            "A layer has to say what it costs, with a method `cost(shape, training)` "
            f"that returns a `LayerCost`. Received: layer={layer!r}."
        )
    return layer.cost(shape, training)


def dense(inputs, outputs, times=1, use_bias=True):
    """A dense layer that is applied to some vectors. It keeps nothing by itself.

    Args:
        inputs: int, width of a vector.
        outputs: int, width of the result.
        times: int, number of vectors.
        use_bias: bool.
    """
    kernel = inputs * outputs
    return LayerCost(
        weights=kernel + use_bias * outputs,
        products=times * kernel,
        dense_kernels=kernel,
    )


def normalization(shape, center=True):
    """A layer normalization: its input, its output and the centred input are kept."""
    numbers = math.prod(shape)
    return LayerCost(
        weights=(1 + center) * shape[-1], kept=2 * numbers, kept_float32=numbers
    )
