"""Experts that begin as copies of an MLP of any model."""

import math
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_softmoe.keras_adapter.products import counted_products
from keras_softmoe.keras_adapter.surgery import call_symbolically, sublayers
from keras_softmoe.layer_cost import LayerCost
from keras_softmoe.layers import MLP, ImageMoE, MoE
from keras_softmoe.ops.kernels import reshape

# Activations that layers use in their own code
_ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


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
        outputs = inputs
        for part in self.parts:
            outputs = part(outputs)
        sizes = tuple(inputs.shape[1:])
        if None in outputs.shape[1:] and None not in sizes:
            # MiT's MLP loses the number of tokens on TensorFlow.
            outputs = reshape(outputs, (-1, *sizes))
        return outputs

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


class _InModel:
    """Mixin of mixtures of experts in a model whose tokens are known beforehand.

    On TensorFlow, layers of other libraries may lose the number of tokens in a batch of
    any size.
    """

    # Shape of the tokens without the batch; `None` if it varies
    token_shape = None

    def call(self, inputs, mask=None, training=None):
        if self.token_shape and None in tuple(inputs.shape[1:]):
            inputs = reshape(inputs, (-1, *self.token_shape))
        return super().call(inputs, mask=mask, training=training)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class MoEInModel(_InModel, MoE):
    """`layers.MoE` in a model."""


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ImageMoEInModel(_InModel, ImageMoE):
    """`layers.ImageMoE` in a model."""


def make_moe(router, parts, shape, settings, start="copies"):
    """Return a built `layers.MoE` whose experts are copies of an MLP.

    This alone decides which kind of experts there are: an MLP of dense layers with
    biases that `layers.MLP` can be (gated or not) becomes a bank, which is fast and
    takes LoRA and int8. Any other is the template of the experts, by image if it
    computes a token from others, too.

    Args:
        router: `Router`, a template.
        parts: built layers, applied one after the other: the MLP, from tokens to tokens
            of the same width.
        shape: shape of the tokens, `(None, ..., D)`.
        settings: dict of further arguments of `layers.MoE`; and `by_image`: bool or
            `None`, whether whole images are routed (`layers.ImageMoE`).
        start: as in `add_experts`.
    """
    mlp = Chain(parts, name="mlp")
    known = {"dtype": mlp.dtype_policy, **settings}
    by_image = known.pop("by_image", None)
    plain = plain_mlp(mlp, shape)
    if plain is None:
        if start == "shared":
            raise ValueError(
                "A shared expert is an MLP of dense layers with biases and an "
                f'activation of Keras. Received: start="shared" for '
                f'{parts[0].path!r}, another kind of layer. Take `start="copies"`.'
            )
        mixes = mixes_tokens(mlp, shape)
        if mixes and by_image is False:
            raise ValueError(
                "An MLP that computes a token from others, too, such as a convolution, "
                "is applied to whole images. Received: by_image=False for "
                f"{parts[0].path!r}. Leave it out, or take `by_image=True`."
            )
        by_image = mixes if by_image is None else by_image
        cls = ImageMoEInModel if by_image else MoEInModel
        moe = cls(router, expert=mlp, **known)
        moe.build(shape)
        return moe
    known |= {"activation": plain.activation, "gated": plain.gated}
    if start == "shared":
        known["shared_mlp_dim"] = plain.mlp_dim
    cls = ImageMoEInModel if by_image else MoEInModel
    moe = cls(router, plain.mlp_dim, **known)
    moe.build(shape)
    values = plain.read()
    for name, (kernel, bias) in values.items():
        bank = getattr(moe.experts, name)
        if start == "shared":
            layer = getattr(moe.shared_mlp, name)
            layer.kernel.assign(kernel)
            layer.bias.assign(bias)
            if name == "output_dense":
                kernel, bias = np.zeros_like(kernel), np.zeros_like(bias)
        bank.kernel.assign(np.broadcast_to(kernel, bank.kernel.shape))
        bank.bias.assign(np.broadcast_to(bias[None], bank.bias.shape))
    return moe


def mixes_tokens(mlp, shape):
    """Return whether a layer computes a token from others or from its place, too.

    Half of the tokens of an image are changed, under random weights: do the outputs of
    the others change? Do outputs move with tokens?

    Args:
        mlp: built layer.
        shape: shape of its inputs, `(None, ..., D)`.
    """
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=v.shape) for v in mlp.trainable_variables]
    given = [
        ops.convert_to_tensor(value / np.sqrt(max(value.shape[0], 1)), dtype=v.dtype)
        for value, v in zip(weights, mlp.trainable_variables, strict=True)
    ]
    fixed = [ops.convert_to_tensor(v) for v in mlp.non_trainable_variables]
    # (3, S, D)
    x = np.repeat(rng.normal(size=(1, math.prod(shape[1:-1]), shape[-1])), 3, axis=0)
    changed, others = np.split(rng.permutation(x.shape[1]), [x.shape[1] // 2])
    x[1, changed] = rng.normal(size=x[1, changed].shape)
    x[2] = np.roll(x[0], 1, axis=0)
    inputs = ops.convert_to_tensor(x.reshape(3, *shape[1:]), dtype=mlp.compute_dtype)
    outputs = mlp.stateless_call(given, fixed, inputs, training=False)[0]
    y = ops.convert_to_numpy(ops.cast(outputs, "float32")).reshape(x.shape)
    differences = np.abs(y[0] - y[1])[others], np.abs(np.roll(y[0], 1, 0) - y[2])
    # In half precision, rounding may depend on the place of a token.
    tolerance = 1e-4 if mlp.compute_dtype in ("float32", "float64") else 0.02
    return bool(max(x.max() for x in differences) > tolerance * np.abs(y).max())


class PlainMLP(NamedTuple):
    """How dense layers make up a `layers.MLP`.

    Attributes:
        layers: list of `keras.layers.Dense`.
        pieces: dict from the names of the dense layers of `layers.MLP` to `(i, half)`:
            its kernel is that of `layers[i]`, or half 0 or 1 of it, `None` for all.
        activation: str.
    """

    layers: list
    pieces: dict
    activation: str

    @property
    def gated(self):
        """Bool, whether it is gated."""
        return "gate_dense" in self.pieces

    @property
    def mlp_dim(self):
        """Int, hidden width."""
        return self.layers[-1].kernel.shape[0]

    def read(self):
        """Return a dict from names to kernel and bias, arrays."""
        found = {}
        for name, (index, half) in self.pieces.items():
            layer = self.layers[index]
            pair = ops.convert_to_numpy(layer.kernel), ops.convert_to_numpy(layer.bias)
            if half is not None:
                pair = tuple(np.split(x, 2, axis=-1)[half] for x in pair)
            found[name] = pair
        return found

    def write(self, values):
        """Give the dense layers the values that `read` returns."""
        parts = {}
        for name, (index, half) in self.pieces.items():
            parts.setdefault(index, {})[half or 0] = values[name]
        for index, halves in parts.items():
            pairs = zip(*(halves[half] for half in sorted(halves)), strict=True)
            kernel, bias = (np.concatenate(pair, axis=-1) for pair in pairs)
            self.layers[index].kernel.assign(kernel)
            self.layers[index].bias.assign(bias)


def plain_mlp(mlp, shape):
    """Return the `PlainMLP` that a layer is, `None` if it is anything else.

    Args:
        mlp: built layer.
        shape: shape of its inputs, `(None, ..., D)`.
    """
    inside = [layer for _, layer, _ in sublayers(mlp)]
    dense = [x for x in (mlp, *inside) if type(x) is keras.layers.Dense]
    if len(dense) not in (2, 3) or not all(x.use_bias for x in dense):
        return None
    own = {id(x) for layer in dense for x in (layer.kernel, layer.bias)}
    # Random numbers (dropout, drop path) have a state, too.
    if {id(variable) for variable in mlp.variables} != own:
        return None
    arrangements = _arrangements(dense, shape[-1])
    if not arrangements:
        return None
    named = [getattr(x, "activation", None) for x in (*dense, *inside)]
    named = [keras.activations.serialize(f) for f in named if callable(f)]
    # Of functions of a user they are dicts.
    named = [x for x in named if isinstance(x, str) and x != "linear"]
    # An activation in the code of a layer can be told from another one by its values,
    # in full precision.
    is_exact = mlp.compute_dtype in ("float32", "float64")
    for activation in dict.fromkeys((*named, *(_ACTIVATIONS if is_exact else ()))):
        for pieces in arrangements:
            plain = PlainMLP(dense, pieces, activation)
            if _computes(mlp, plain, len(shape), 1e-5 if is_exact else 5e-2):
                return plain
    return None


def _arrangements(dense, width):
    """Return a list of the `pieces` that dense layers may be by their shapes."""
    *first, last = (tuple(layer.kernel.shape) for layer in dense)
    units = last[0]
    if last[1] != width or units == 0:
        return []
    if first == [(width, units)]:
        return [{"intermediate_dense": (0, None), "output_dense": (1, None)}]
    if first == [(width, 2 * units)]:
        halves = [((0, 0), (0, 1)), ((0, 1), (0, 0))]
    elif first == [(width, units)] * 2:
        halves = [((0, None), (1, None)), ((1, None), (0, None))]
    else:
        return []
    output = (len(dense) - 1, None)
    return [
        {"gate_dense": gate, "intermediate_dense": units, "output_dense": output}
        for gate, units in halves
    ]


def _computes(mlp, plain, rank, tolerance):
    """Return whether a layer computes the same as a `layers.MLP` of its weights."""
    rng = np.random.default_rng(0)
    width = plain.layers[0].kernel.shape[0]
    ours = MLP(
        plain.mlp_dim, activation=plain.activation, gated=plain.gated, dtype="float32"
    )
    ours.build((None, width))
    values = {}
    for layer in plain.layers:
        # Where the activations differ: between -3 and 3
        scale = 1 / np.sqrt(layer.kernel.shape[0])
        for variable in (layer.kernel, layer.bias):
            value = rng.normal(scale=scale, size=variable.shape)
            values[id(variable)] = value.astype("float32")
    for name, (index, half) in plain.pieces.items():
        layer, copy = plain.layers[index], getattr(ours, name)
        pairs = (layer.kernel, copy.kernel), (layer.bias, copy.bias)
        for variable, other in pairs:
            value = values[id(variable)]
            if half is not None:
                value = np.split(value, 2, axis=-1)[half]
            other.assign(value)
    x = 2 * rng.normal(size=(*[2] * (rank - 1), width)).astype("float32")
    given = (
        [ops.convert_to_tensor(values[id(v)], dtype=v.dtype) for v in variables]
        for variables in (mlp.trainable_variables, mlp.non_trainable_variables)
    )
    outputs = mlp.stateless_call(*given, x, training=False)[0], ours(x)
    found, expected = (ops.convert_to_numpy(ops.cast(y, "float32")) for y in outputs)
    return np.abs(found - expected).max() < tolerance * np.abs(expected).max()
