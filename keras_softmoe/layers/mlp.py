"""The MLP of a dense encoder block, and the activations of MLPs and experts."""

import contextlib
import math

import keras
from keras import ops

from keras_softmoe.checks import check_bools, check_whole_numbers, received
from keras_softmoe.keras_adapter.layers import Layer
from keras_softmoe.ops.kernels import affine, gelu
from keras_softmoe.types import Tensor


def _exact_gelu(x):
    if keras.backend.backend() == "tensorflow":
        # TensorFlow's has a function that runtimes of exported files do not support.
        return 0.5 * x * (1.0 + ops.erf(math.sqrt(0.5) * x))
    return ops.gelu(x, approximate=False)


# The papers' code has the tanh approximation; models from PyTorch have the exact one.
_ACTIVATIONS = {"gelu_tanh": gelu, "gelu": _exact_gelu}
ACTIVATIONS = tuple(_ACTIVATIONS)


def activation_of(activation):
    """Return the function of an activation; raise unless its name is known."""
    function = None
    if isinstance(activation, str) and activation:
        with contextlib.suppress(ValueError):
            function = _ACTIVATIONS.get(activation) or keras.activations.get(activation)
    if not callable(function):
        raise ValueError(
            f"Unknown `activation`. Accepted: {', '.join(map(repr, ACTIVATIONS))}, and "
            "the other names of `keras.activations`, such as 'silu'. "
            + received(activation=activation)
        )
    return function


@keras.saving.register_keras_serializable(package="keras_softmoe")
class MLP(Layer):
    """Feed-forward network of a dense encoder block.

    Args:
        mlp_dim: int, hidden width.
        activation: `"gelu_tanh"`, `"gelu"` (exact), or one of `keras.activations`.
        gated: bool, whether a third layer, `gate_dense`, multiplies the hidden units:
            `activation(gate_dense(x)) * intermediate_dense(x)`; SwiGLU with `"silu"`.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Maps `(..., D)` to `(..., D)`.

    Raises:
        ValueError: if `mlp_dim` is no positive integer, or the activation unknown.

    Source: V-MoE, section 2.1; gated: Shazeer 2020 (GLU variants), section 2.

    Examples:
        >>> ksm.layers.MLP(64)(np.zeros((2, 16, 32))).shape
        (2, 16, 32)
    """

    config_arguments = ("mlp_dim", "activation", "gated")

    def __init__(
        self, mlp_dim: int, activation: str = "gelu_tanh", gated: bool = False, **kwargs
    ):
        check_whole_numbers(1, mlp_dim=mlp_dim)
        activate = activation_of(activation)
        check_bools(gated=gated)
        super().__init__(**kwargs)
        mlp_dim = int(mlp_dim)
        self.keep_arguments(locals())
        self._activate = activate
        self.supports_masking = True

    def build(self, inputs_shape):
        *axes, width = inputs_shape
        # Number of inputs and outputs of the layers, in the order of their use
        sizes = {"intermediate_dense": (width, self.mlp_dim)}
        if self.gated:
            sizes["gate_dense"] = (width, self.mlp_dim)
        sizes["output_dense"] = (self.mlp_dim, width)
        for name, (num_inputs, units) in sizes.items():
            dense = keras.layers.Dense(
                units,
                # As in the papers' code
                bias_initializer=keras.initializers.RandomNormal(stddev=1e-6),
                dtype=self.dtype_policy,
                name=name,
            )
            setattr(self, name, dense)
            dense.build((*axes, num_inputs))

    def call(self, inputs):
        return _multiply(self.output_dense, self.hidden(inputs))

    def hidden(self, inputs: Tensor) -> Tensor:
        """Return the input of the last layer, `(..., H)`."""
        hidden = _multiply(self.intermediate_dense, inputs)
        if self.gated:
            # A gated linear unit: the gate alone goes through the activation.
            gate = _multiply(self.gate_dense, inputs)
            return self._activate(gate) * hidden
        return self._activate(hidden)


def _multiply(dense, x):
    """Return the output of a `keras.layers.Dense`, computed by `affine`."""
    if dense.quantization_mode:
        # Its kernel is not a matrix of floats.
        return dense(x)
    # All images are one matrix here, which is faster than the layer's own product.
    return affine(x, dense.kernel, dense.bias)
