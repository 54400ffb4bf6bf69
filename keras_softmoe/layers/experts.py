"""The experts of a mixture: one MLP per expert, each applied to its own slots."""

import functools

import keras
from keras import ops

from keras_softmoe.checks import check_bools, check_numbers, check_whole_numbers
from keras_softmoe.keras_adapter.layers import Layer
from keras_softmoe.keras_adapter.runs import is_traced_for_xla
from keras_softmoe.layers.expert_bank import ExpertBank, per_expert
from keras_softmoe.layers.groups import by_expert
from keras_softmoe.layers.mlp import activation_of
from keras_softmoe.ops.grouped import grouped_affine, map_experts
from keras_softmoe.ops.kernels import affine, chunked_map, reshape
from keras_softmoe.sharding.constraints import check_placement, is_distributed

_IN_8_BITS = ("int8", "float8")


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Experts(Layer):
    """A bank of MLPs, one per expert, each applied to its own slots.

    `quantize` and `enable_lora` treat each expert separately, see `ExpertBank`.

    Args:
        num_experts: int, number `E` of experts.
        mlp_dim: int, hidden width `H` of an expert.
        equal_experts: bool, whether all start with the same weights (V-MoE's code).
        dropout_rate: float, dropout between the two layers ("expert dropout").
        remat: bool, whether hidden activations are recomputed in the backward pass
            instead of kept (`keras.remat`); the outputs of dropout are kept.
        activation, gated: as in `MLP`; with a third bank, `gate_dense`, if gated.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Maps slots `(G, E, C, D)` to outputs `(G, E, C, D)`; or rows `(N, D)`, sorted by
    expert, to outputs `(N, D)`, with the number of rows of each expert as a second
    argument, an `(E,)` int32 tensor whose sum is `N`. Slots are sent to the devices of
    the experts and back under `keras_softmoe.distribution.expert_parallel`.

    Raises:
        ValueError: if an argument is not among the accepted values, the input is not
            `(G, num_experts, C, D)`, or the devices do not divide the experts.

    Source: V-MoE, section 2.2 and table 7; Fedus et al. 2021, section 2.4 (dropout).

    Examples:
        >>> experts = ksm.layers.Experts(num_experts=4, mlp_dim=64)
        >>> experts(np.zeros((2, 4, 3, 16))).shape
        (2, 4, 3, 16)
    """

    config_arguments = (
        *("num_experts", "mlp_dim", "equal_experts", "dropout_rate", "remat"),
        *("activation", "gated"),
    )

    def __init__(
        self,
        num_experts: int,
        mlp_dim: int,
        equal_experts: bool = False,
        dropout_rate: float = 0.0,
        remat: bool = False,
        activation: str = "gelu_tanh",
        gated: bool = False,
        **kwargs,
    ):
        check_whole_numbers(1, num_experts=num_experts, mlp_dim=mlp_dim)
        check_numbers(least=0, under=1, dropout_rate=dropout_rate)
        activate = activation_of(activation)
        check_bools(gated=gated)
        check_placement("check_divides_experts", num_experts)
        super().__init__(**kwargs)
        self.keep_arguments(locals())
        # Here, as PyTorch does not compile a call of a function with a cache.
        self._activate = activate
        self._stages = _stages_of_slots(activation, remat, gated)
        self.dropout = keras.layers.Dropout(
            dropout_rate, dtype=self.dtype_policy, name="dropout"
        )

    def build(self, slots_shape):
        if len(slots_shape) != 4 or slots_shape[1] != self.num_experts:
            raise ValueError(
                "Experts expect slots of shape (groups, experts, slots, width) with "
                f"{self.num_experts} experts. Received: slots_shape={slots_shape}."
            )
        # n counts the slots of an expert in all groups, G * C.
        to_hidden = "end,edh->enh", slots_shape[-1], self.mlp_dim
        to_outputs = "enh,ehd->end", self.mlp_dim, slots_shape[-1]
        gate = {"gate_dense": to_hidden} if self.gated else {}
        products = {"intermediate_dense": to_hidden, **gate, "output_dense": to_outputs}
        for name, (equation, num_inputs, units) in products.items():
            kernel_initializer = per_expert("glorot_uniform")
            if self.equal_experts:
                kernel_initializer = EqualExperts(kernel_initializer)
            bank = ExpertBank(
                equation,
                output_shape=(None, units),
                # A bias for each expert and output, (E, 1, H)
                bias_axes=equation[-3] + equation[-1],
                kernel_initializer=kernel_initializer,
                # As in the papers' code
                bias_initializer=keras.initializers.RandomNormal(stddev=1e-6),
                dtype=self.dtype_policy,
                name=name,
            )
            setattr(self, name, bank)
            bank.build((self.num_experts, None, num_inputs))
        self.dropout.build((self.num_experts, None, self.mlp_dim))
        # Tuple of the dense layers of all experts, in the order of their use
        self.banks = tuple(getattr(self, name) for name in products)
        check_placement("check_layer", self)

    def takes_rows(self) -> bool:
        """Return whether rows sorted by expert are supported, besides slots."""
        # XLA must know the number of rows of an expert when it compiles.
        modes = {bank.quantization_mode for bank in self.banks}
        return modes.isdisjoint(_IN_8_BITS) and not is_traced_for_xla()

    def call(self, slots, count=None, training=None):
        sharded = is_distributed()
        if count is not None:
            return self._mlps(slots, training, sharded, count)
        mlps = functools.partial(self._mlps, training=training, sharded=sharded)
        return by_expert(mlps, slots, self.path, sharded)

    def _mlps(self, x, training, sharded, count=None):
        """Return the experts' outputs for slots `(E, G * C, D)`, or rows `(N, D)`."""
        banks = self.banks
        if any(bank.quantization_mode in _IN_8_BITS for bank in banks):
            # The banks multiply integers themselves.
            hidden = _activated([bank(x) for bank in banks[:-1]], self._activate)
            return banks[-1](self.dropout(hidden, training=training))
        weights = [weight for bank in banks for weight in (bank.kernel, bank.bias)]
        weights = [w.value if isinstance(w, keras.Variable) else w for w in weights]
        multiply = functools.partial(affine, sharded=sharded)
        if count is not None:
            multiply = functools.partial(grouped_affine, count=count)
        # Bound beforehand, as `remat` would convert arguments to tensors.
        known = {"activate": self._activate, "multiply": multiply}
        hidden, mlp = (functools.partial(f, **known) for f in (_hidden, _mlp))
        if self.remat:
            # Views, because TensorFlow's `remat` counts gradients of variables twice
            weights = [reshape(weight, weight.shape) for weight in weights]
            hidden, mlp = keras.remat(hidden), keras.remat(mlp)
        if training and self.dropout_rate:
            # Dropout outside `remat`, which would draw another mask
            x = self.dropout(hidden(x, *weights[:-2]), training=True)
            return multiply(x, *weights[-2:])
        if count is not None:
            weights = tuple(map(ops.convert_to_tensor, weights))
            stages = (weights,) if self.remat else (weights[:-2], weights[-2:])
            return map_experts(mlp, self._stages, x, stages, count)
        return chunked_map(mlp, [x, *weights], sharded)


def _activated(products, activate):
    """Return hidden units from their products, and that of the gate if there is one."""
    units, *gate = products
    return activate(gate[0]) * units if gate else activate(units)


def _hidden(x, *weights, activate, multiply):
    # Kernel and bias of the first layer, and of the gate
    units = multiply(x, weights[0], weights[1])
    if len(weights) == 2:
        return activate(units)
    return activate(multiply(x, weights[2], weights[3])) * units


def _mlp(x, *weights, activate, multiply):
    hidden = _hidden(x, *weights[:-2], activate=activate, multiply=multiply)
    return multiply(hidden, *weights[-2:])


def _two_products(x, kernel, bias, gate_kernel, gate_bias):
    pairs = (kernel, bias), (gate_kernel, gate_bias)
    return ops.concatenate([affine(x, *pair) for pair in pairs], axis=-1)


def _after_first(x, kernel, bias, activate, is_gated):
    products = ops.split(x, 2, axis=-1) if is_gated else [x]
    return affine(_activated(products, activate), kernel, bias)


@functools.cache
def _stages_of_slots(activation, is_one, is_gated):
    """Return the same functions for all layers, see `map_experts`."""
    activate = activation_of(activation)
    if is_one:
        return (functools.partial(_mlp, activate=activate, multiply=affine),)
    known = {"activate": activate, "is_gated": is_gated}
    first = _two_products if is_gated else affine
    return first, functools.partial(_after_first, **known)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class EqualExperts(keras.initializers.Initializer):
    """Initializer that draws the weights of one expert for all of them.

    `initializer` is for a bank of one, `(1, ...)`.
    """

    def __init__(self, initializer):
        self.initializer = keras.initializers.get(initializer)

    def __call__(self, shape, dtype=None):
        one = self.initializer((1, *shape[1:]), dtype=dtype)
        # Not `repeat`: on PyTorch its result shares memory, which optimizers refuse.
        return ops.zeros(shape, dtype=dtype) + one

    def get_config(self):
        return {"initializer": keras.saving.serialize_keras_object(self.initializer)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["initializer"]))
