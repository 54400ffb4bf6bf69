"""Experts that begin as copies of an MLP of any model."""

import functools
import itertools
import math
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_softmoe.keras_adapter.surgery import sublayers
from keras_softmoe.layers import ImageMoE, MoE
from keras_softmoe.layers.mlp import activation_of
from keras_softmoe.ops.kernels import reshape

# Activations that layers call in their own code
_ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
_FULL_PRECISION = ("float32", "float64")


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Chain(keras.layers.Layer):
    """Layers applied one after the other: the MLP of another library's model.

    With `gate`, the name of an activation, they are the gate, what it multiplies, and
    the output, without biases.
    """

    def __init__(self, parts, gate=None, **kwargs):
        kwargs.setdefault("dtype", parts[0].dtype_policy)
        super().__init__(**kwargs)
        self.parts, self.gate = list(parts), gate
        self.built = all(part.built for part in parts)

    def build(self, inputs_shape):
        is_gated = self.gate is not None
        if is_gated:
            self.parts[0].build(inputs_shape)
        for part in self.parts[is_gated:]:
            part.build(inputs_shape)
            inputs_shape = part.compute_output_shape(inputs_shape)

    def call(self, inputs, training=None):
        # Keras passes `training` on to the parts.
        outputs, parts = inputs, self.parts
        if self.gate is not None:
            # As in KerasHub, the activation is computed in float32.
            gates = ops.cast(parts[0](inputs), "float32")
            gates = ops.cast(activation_of(self.gate)(gates), self.compute_dtype)
            outputs, parts = gates * parts[1](inputs), parts[2:]
        for part in parts:
            outputs = part(outputs)
        sizes = tuple(inputs.shape[1:])
        if None in outputs.shape[1:] and None not in sizes:
            # MiT's MLP loses the number of tokens on TensorFlow.
            outputs = reshape(outputs, (-1, *sizes))
        return outputs

    def get_config(self):
        parts = [keras.saving.serialize_keras_object(part) for part in self.parts]
        gate = {} if self.gate is None else {"gate": self.gate}
        return {**super().get_config(), "parts": parts, **gate}

    @classmethod
    def from_config(cls, config):
        parts = map(keras.saving.deserialize_keras_object, config["parts"])
        return cls(**{**config, "parts": list(parts)})


class OpenGate(keras.layers.Layer):
    """A gate that multiplies by one: numbers whose activation is one, `(..., 1)`.

    It is in the place of the gate of a decoder, whose code then applies the activation
    and multiplies by the outputs of experts. In float32, where it is one up to
    rounding.
    """

    def __init__(self, activation, **kwargs):
        super().__init__(dtype="float32", **kwargs)
        function, low, high = activation_of(activation), 0.0, 4.0
        for _ in range(40):
            self.value = (low + high) / 2
            result = ops.convert_to_numpy(function(ops.convert_to_tensor(self.value)))
            low, high = (self.value, high) if result < 1 else (low, self.value)
        # It has no weights, but `quantize` refuses a model with an unbuilt layer.
        self.built = True

    def call(self, inputs):
        return self.value * ops.ones_like(inputs[..., :1], dtype="float32")


class _InModel:
    """Mixin of mixtures of experts in a model with a fixed shape of tokens.

    On TensorFlow, layers of other libraries may lose the number of tokens.
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


def make_moe(router, site, shape, settings, start="copies"):
    """Return a built `layers.MoE` whose experts are copies of an MLP.

    An MLP that `plain_mlp` recognizes becomes a bank of experts, any other the template
    of the experts. `shape` is that of the tokens, `(None, ..., D)`, and `settings` are
    those of `layers.MoE`, and `by_image`.
    """
    parts = site.parts
    mlp = Chain(parts, site.gate, name="mlp")
    settings = {"dtype": mlp.dtype_policy, **settings}
    by_image = settings.pop("by_image", None)
    plain = plain_mlp(mlp, shape)
    if plain is None:
        if start == "shared":
            raise ValueError(
                "A shared expert is an MLP of dense layers with biases and an "
                f'activation of Keras. Received: start="shared" for '
                f'{parts[0].path!r}, another kind of layer. Pass `start="copies"`.'
            )
        mixes = mixes_tokens(mlp, shape)
        if mixes and by_image is False:
            raise ValueError(
                "An MLP that computes a token from others, too, such as a convolution, "
                "is applied to whole images. Received: by_image=False for "
                f"{parts[0].path!r}."
            )
        by_image = mixes if by_image is None else by_image
        settings["expert"] = mlp
    else:
        is_gated = "gate_dense" in plain.pieces
        settings |= {"activation": plain.activation, "gated": is_gated}
        settings["mlp_dim"] = mlp_dim = plain.layers[-1].kernel.shape[0]
        if start == "shared":
            settings["shared_mlp_dim"] = mlp_dim
    moe = (ImageMoEInModel if by_image else MoEInModel)(router, **settings)
    moe.build(shape)
    if plain is None:
        return moe
    for name, (kernel, bias) in plain.read().items():
        bank = getattr(moe.experts, name)
        if start == "shared":
            layer = getattr(moe.shared_mlp, name)
            layer.kernel.assign(kernel)
            layer.bias.assign(bias)
            if name == "output_dense":
                kernel, bias = np.zeros_like(kernel), np.zeros_like(bias)
        bank.kernel.assign(np.broadcast_to(kernel, bank.kernel.shape))
        bank.bias.assign(np.broadcast_to(bias[None], bank.bias.shape))
        # The way back has no place for biases that the MLP lacks.
        bank.bias.trainable = site.gate is None
    return moe


class PlainMLP(NamedTuple):
    """Dense layers that make up a `layers.MLP`.

    `pieces` is a dict from the names of the dense layers of `layers.MLP` to `(i,
    half)`: its kernel is that of `layers[i]`, or half 0 or 1 of it, `None` for all.
    """

    layers: list
    pieces: dict
    activation: str

    def read(self, pairs=None):
        """Return a dict from names to kernel and bias, the layers' by default."""
        if pairs is None:
            kernels = [ops.convert_to_numpy(layer.kernel) for layer in self.layers]
            pairs = [
                (kernel, np.zeros_like(kernel[0]))
                if layer.bias is None
                else (kernel, ops.convert_to_numpy(layer.bias))
                for kernel, layer in zip(kernels, self.layers, strict=True)
            ]
        found = {}
        for name, (index, half) in self.pieces.items():
            found[name] = pairs[index]
            if half is not None:
                halves = (np.split(x, 2, axis=-1) for x in pairs[index])
                found[name] = tuple(x[half] for x in halves)
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
            if self.layers[index].bias is not None:
                self.layers[index].bias.assign(bias)


def plain_mlp(mlp, shape):
    """Return the `PlainMLP` that a layer is, `None` if it is anything else.

    The activation may be in the code of a layer. So the arrangement and the activation
    are those with which an MLP computes the same from random weights.
    """
    inside = [mlp, *(layer for _, layer, _ in sublayers(mlp))]
    is_gated = isinstance(mlp, Chain) and mlp.gate is not None
    dense = [x for x in inside if type(x) is keras.layers.Dense and x.use_bias]
    if is_gated:
        dense = list(mlp.parts)
    own = [v for x in dense for v in (x.kernel, *([] if is_gated else [x.bias]))]
    # Random numbers (dropout, drop path) have a state, too.
    if len(dense) not in (2, 3) or {*map(id, mlp.variables)} != {*map(id, own)}:
        return None
    named = [getattr(x, "activation", None) for x in (*dense, *inside)]
    named = [keras.activations.serialize(f) for f in named if callable(f)]
    # Those of a user's functions are dicts.
    named = [x for x in named if isinstance(x, str) and x != "linear"]
    is_exact = mlp.compute_dtype in _FULL_PRECISION
    # In half precision GELU and its approximation cannot be told apart.
    activations = dict.fromkeys((*named, *(_ACTIVATIONS if is_exact else ())))
    # Inputs of activations are between -3 and 3, where these differ.
    rng = np.random.default_rng(0)
    x = 2 * rng.normal(size=(*[2] * (len(shape) - 1), shape[-1]))
    arrangements = _arrangements(dense, shape[-1])
    if arrangements:
        expected, values = _outputs(mlp, own, x, rng)
        if is_gated:
            activations = [mlp.gate]
            pairs = [(kernel, np.zeros(kernel.shape[1])) for kernel in values]
        else:
            pairs = list(zip(values[::2], values[1::2], strict=True))
    for pieces, activation in itertools.product(arrangements, activations):
        plain = PlainMLP(dense, pieces, activation)
        layers = plain.read(pairs)
        kernel, bias = layers.pop("output_dense")
        firsts = {name: x @ first[0] + first[1] for name, first in layers.items()}
        hidden = firsts["intermediate_dense"]
        gate = firsts.get("gate_dense", hidden)
        function = functools.partial(keras.activations.gelu, approximate=True)
        if activation != "gelu_tanh":
            function = keras.activations.get(activation)
        activated = function(ops.convert_to_tensor(gate, "float32"))
        activated = ops.convert_to_numpy(activated)
        if gate is not hidden:
            activated = activated * hidden
        difference = np.abs(activated @ kernel + bias - expected)
        if difference.max() < (1e-5 if is_exact else 5e-2) * np.abs(expected).max():
            return plain
    return None


def _arrangements(dense, width):
    """Return a list of the `pieces` that dense layers may be by their shapes."""
    *first, last = (tuple(layer.kernel.shape) for layer in dense)
    units, output = last[0], (len(dense) - 1, None)
    halves = []
    if last[1] != width or units == 0:
        return []
    if first == [(width, units)]:
        return [{"intermediate_dense": (0, None), "output_dense": output}]
    if first == [(width, 2 * units)]:
        halves = [((0, 0), (0, 1)), ((0, 1), (0, 0))]
    elif first == [(width, units)] * 2:
        halves = [((0, None), (1, None)), ((1, None), (0, None))]
    names = ("gate_dense", "intermediate_dense", "output_dense")
    return [dict(zip(names, (*pair, output), strict=True)) for pair in halves]


def mixes_tokens(mlp, shape):
    """Return whether a layer computes a token from others or from its place, too."""
    rng = np.random.default_rng(0)
    # (3, S, D)
    x = np.repeat(rng.normal(size=(1, math.prod(shape[1:-1]), shape[-1])), 3, axis=0)
    changed, others = np.split(rng.permutation(x.shape[1]), [x.shape[1] // 2])
    x[1, changed] = rng.normal(size=x[1, changed].shape)
    x[2] = np.roll(x[0], 1, axis=0)
    inputs = x.reshape(3, *shape[1:])
    y = _outputs(mlp, mlp.trainable_variables, inputs, rng)[0].reshape(x.shape)
    differences = np.abs(y[0] - y[1])[others], np.abs(np.roll(y[0], 1, 0) - y[2])
    # In half precision, rounding may depend on the place of a token.
    tolerance = 1e-4 if mlp.compute_dtype in _FULL_PRECISION else 0.02
    return bool(max(x.max() for x in differences) > tolerance * np.abs(y).max())


def _outputs(mlp, variables, inputs, rng):
    """Return the outputs with random values of some variables, and these values."""
    values = []
    for v in variables:
        scale = 1 / np.sqrt(max((*v.shape, 1)[0], 1))
        values.append(rng.normal(scale=scale, size=v.shape))
    given = {id(v): value for v, value in zip(variables, values, strict=True)}
    state = (
        [ops.convert_to_tensor(given.get(id(v), v), dtype=v.dtype) for v in part]
        for part in (mlp.trainable_variables, mlp.non_trainable_variables)
    )
    inputs = ops.convert_to_tensor(inputs, dtype=mlp.compute_dtype)
    outputs = mlp.stateless_call(*state, inputs, training=False)[0]
    return ops.convert_to_numpy(ops.cast(outputs, "float32")), values
