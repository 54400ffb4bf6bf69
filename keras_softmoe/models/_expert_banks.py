"""Experts that begin as copies of an MLP of any model."""

import math

import keras
import numpy as np
from keras import ops

from keras_softmoe.keras_adapter.products import counted_products
from keras_softmoe.keras_adapter.surgery import call_symbolically, sublayers
from keras_softmoe.layer_cost import LayerCost
from keras_softmoe.layers import MLP, MoE

# Activations of banks, and of `layers.MLP`
_ACTIVATIONS = ("gelu", "gelu_tanh")
# Dtypes in which two activations can be told apart by their values.
_EXACT = ("float32", "float64")


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Chain(keras.layers.Layer):
    """Layers applied one after the other, the MLP of a model of somebody else.

    Args:
        parts: layers, built or not.
        **kwargs: as in `keras.layers.Layer`.
    """

    def __init__(self, parts, **kwargs):
        kwargs.setdefault("dtype", parts[0].dtype_policy)
        super().__init__(**kwargs)
        self.parts = list(parts)
        self.built = all(part.built for part in parts)

    def build(self, inputs_shape):
        for part in self.parts:
            part.build(inputs_shape)
            inputs_shape = part.compute_output_shape(inputs_shape)

    def call(self, inputs, training=None):
        # Keras passes `training` on to the parts.
        for part in self.parts:
            inputs = part(inputs)
        return inputs

    def cost(self, inputs_shape, training=False):
        inputs = keras.KerasTensor(inputs_shape, self.compute_dtype)
        with counted_products() as products:
            call_symbolically(self, inputs, start=products.restart)
        weights = sum(math.prod(weight.shape) for weight in self.weights)
        return LayerCost(weights=weights, products=products.total)

    def get_config(self):
        parts = [keras.saving.serialize_keras_object(part) for part in self.parts]
        return {**super().get_config(), "parts": parts}

    @classmethod
    def from_config(cls, config):
        parts = map(keras.saving.deserialize_keras_object, config["parts"])
        return cls(**{**config, "parts": list(parts)})


def make_moe(router, parts, shape, settings):
    """Return a built `layers.MoE` whose experts are copies of an MLP.

    This alone decides which kind of experts there are: an MLP of two dense layers with
    biases and an activation between them becomes a bank, which is fast and takes LoRA
    and int8. Any other is the template of the experts.

    Args:
        router: `Router`, a template.
        parts: built layers, applied one after the other: the MLP, from tokens to tokens
            of the same width.
        shape: shape of the tokens, `(None, ..., D)`.
        settings: dict of further arguments of `layers.MoE`.
    """
    mlp = Chain(parts, name="mlp")
    known = {"dtype": mlp.dtype_policy, **settings}
    plain = plain_mlp(mlp, shape)
    if plain is None:
        moe = MoE(router, expert=mlp, **known)
        moe.build(shape)
        return moe
    first, second, activation = plain
    moe = MoE(router, first.units, activation=activation, **known)
    moe.build(shape)
    banks = moe.experts.intermediate_dense, moe.experts.output_dense
    for bank, dense in zip(banks, (first, second), strict=True):
        for variable, source in ((bank.kernel, dense.kernel), (bank.bias, dense.bias)):
            value = ops.convert_to_numpy(source).reshape(-1, source.shape[-1])
            variable.assign(np.broadcast_to(value, variable.shape))
    return moe


def plain_mlp(mlp, shape):
    """Return the dense layers of an MLP and its activation, `None` if there is more.

    Args:
        mlp: built layer.
        shape: shape of its inputs, `(None, ..., D)`.

    Returns:
        Tuple of two `keras.layers.Dense` and the activation.
    """
    inside = [layer for _, layer, _ in sublayers(mlp)]
    dense = dense_layers(mlp)
    if len(dense) != 2 or not all(x.use_bias for x in dense):
        return None
    first, second = dense
    own = {id(x) for layer in dense for x in (layer.kernel, layer.bias)}
    # Random numbers (dropout, drop path) have a state, too.
    has_others = {id(variable) for variable in mlp.variables} != own
    shapes = tuple(first.kernel.shape), tuple(second.kernel.shape)
    if has_others or shapes != ((shape[-1], first.units), (first.units, shape[-1])):
        return None
    if mlp.compute_dtype not in _EXACT:
        # An activation in the code of a layer cannot be told from another one.
        named = [first, *(x for x in inside if isinstance(x, keras.layers.Activation))]
        functions = [getattr(x, "activation", None) for x in named]
        if all(f in (None, keras.activations.linear) for f in functions):
            return None
    for activation in _ACTIVATIONS:
        if _computes(mlp, dense, activation, len(shape)):
            return first, second, activation
    return None


def dense_layers(mlp):
    """Return the dense layers of an MLP, a list."""
    inside = (layer for _, layer, _ in sublayers(mlp))
    return [x for x in (mlp, *inside) if type(x) is keras.layers.Dense]


def _computes(mlp, dense, activation, rank):
    """Return whether an MLP is two dense layers with an activation between them."""
    rng = np.random.default_rng(0)
    width, units = dense[0].kernel.shape
    ours = MLP(units, activation=activation, dtype="float32")
    ours.build((None, width))
    values = {}
    copies = ours.intermediate_dense, ours.output_dense
    for layer, copy in zip(dense, copies, strict=True):
        for variable, other in ((layer.kernel, copy.kernel), (layer.bias, copy.bias)):
            # Where the activations differ: between -3 and 3
            scale = 1 / np.sqrt(variable.shape[0])
            value = rng.normal(scale=scale, size=variable.shape).astype("float32")
            values[id(variable)] = value
            other.assign(value)
    x = 2 * rng.normal(size=(*[2] * (rank - 1), width)).astype("float32")
    given = (
        [ops.convert_to_tensor(values[id(v)], dtype=v.dtype) for v in variables]
        for variables in (mlp.trainable_variables, mlp.non_trainable_variables)
    )
    found, _ = mlp.stateless_call(*given, x, training=False)
    found, expected = (
        ops.convert_to_numpy(ops.cast(y, "float32")) for y in (found, ours(x))
    )
    tolerance = 1e-5 if mlp.compute_dtype in _EXACT else 5e-2
    return np.abs(found - expected).max() < tolerance * np.abs(expected).max()
