"""Experts that are copies of any layer, with weights of their own."""

import functools
import math

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import check_bools, check_whole_numbers
from keras_softmoe.keras_adapter import layers
from keras_softmoe.keras_adapter.surgery import named_weights
from keras_softmoe.layers import template as templates
from keras_softmoe.layers.groups import by_expert
from keras_softmoe.ops.kernels import chunked_map, reshape
from keras_softmoe.sharding import constraints


@keras.saving.register_keras_serializable(package="keras_softmoe")
class TemplateExperts(layers.Layer):
    """Experts of any layer, each applied to its own slots.

    The weights of all experts are stacked: `stacked_NAME` is `(E, ...)` for a weight of
    the template. They are computed together, by `keras.ops.vectorized_map`.

    Args:
        num_experts: int, number `E` of experts.
        expert: `keras.layers.Layer`, the template, which is neither changed nor a part
            of this layer. If it is not built, each expert is cloned from its
            configuration; if it is built, each begins with a copy of its weights.
        equal_experts: bool, whether all experts start with the same weights.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Attributes:
        stacked: list of the `(E, ...)` weights, in the order of the template's.

    Maps slots `(G, E, C, D)` to outputs `(G, E, C, D)`: a template gets its slots of
    all groups as `(N, D)`, or as `(N, 1, D)` if it does not accept those. Slots of
    several axes, `(G, E, C, H, W, D)`, are given as `(N, H, W, D)`.

    Raises:
        ValueError: if the template is no layer that is a function of a single slot.
    """

    config_arguments = ("num_experts", "equal_experts")
    layer_arguments = ("expert",)

    def __init__(
        self,
        num_experts: int,
        expert: keras.layers.Layer,
        equal_experts: bool = False,
        **kwargs,
    ):
        check_whole_numbers(1, num_experts=num_experts)
        check_bools(equal_experts=equal_experts)
        templates.check_template(expert)
        constraints.check_placement("check_divides_experts", num_experts)
        super().__init__(**kwargs)
        self.keep_arguments(locals())
        # `given` is the user's, `used` the one that computes; both untracked by Keras.
        self._templates = templates.Templates(expert)

    @property
    def expert(self) -> keras.layers.Layer:
        """The template, as it was given."""
        return self._templates.given

    def build(self, slots_shape):
        if len(slots_shape) < 4 or slots_shape[1] != self.num_experts:
            raise ValueError(
                "Experts expect slots of shape (groups, experts, slots, ..., width) "
                f"with {self.num_experts} experts. Received: slots_shape={slots_shape}."
            )
        template, self._slot_shape = self._templates.build(tuple(slots_shape[3:]))
        if layers.states_of_draws(template):
            self.seed_generator = keras.random.SeedGenerator()
        copies = [template]
        if template is not self.expert and not self.equal_experts:
            others, new_copy = range(self.num_experts - 1), templates.new_copy
            copies += [new_copy(self.expert, self._slot_shape) for _ in others]
        self.stacked = [
            self._stack(name.replace("/", "_"), [copy.weights[i] for copy in copies])
            for i, (name, _) in enumerate(named_weights(template))
        ]
        self._maps = {training: self._find_map(training) for training in (False, True)}
        if template is not self.expert:
            # The stacked weights alone are used.
            layers.release_values(template)
        constraints.check_placement("check_layer", self)

    def _find_map(self, training):
        """Return the function that computes a function of one expert for all."""
        backend = keras.backend.backend()
        if backend == "jax":
            return ops.vectorized_map
        if self._templates.draws[training]:
            # A vectorized map would draw the same numbers for all, or refuse to.
            return _one_by_one
        vectorized_map = ops.vectorized_map
        if backend == "tensorflow":
            import tensorflow as tf

            # Without a loop of TensorFlow's, which not all formats of files hold
            known = {"fallback_to_while_loop": False}
            vectorized_map = functools.partial(tf.vectorized_map, **known)
        # Whether there is one shows only in a call, here of zeros.
        x = ops.zeros((self.num_experts, *self._slot_shape))
        values = [ops.zeros(w.shape, w.dtype) for w in self.stacked]
        try:
            vectorized_map(self._one(training), [x, *values])
        except Exception:
            # There is none for some operations, such as convolutions.
            return _one_by_one
        return ops.vectorized_map

    def _one(self, training, states=()):
        """Return the function of one expert, of its slots and variables."""
        template = self._templates.used
        variables = [*template.weights, *states]

        def one(operands):
            x, *values = operands
            x = reshape(x, (-1, *self._slot_shape))
            # The template reads the values of this expert in place of its own.
            with keras.StatelessScope(list(zip(variables, values, strict=True))):
                return template(x, training=training)

        return one

    def _stack(self, name, variables):
        """Add a weight with the values of one variable of each expert."""
        first = variables[0]
        shape = (self.num_experts, *first.shape)
        known = layers.is_initialized(first)
        if known:
            _check_has_values(self)

        def initial(shape, dtype=None):
            values = [ops.convert_to_tensor(v.value, dtype=dtype) for v in variables]
            return ops.broadcast_to(ops.stack(values), shape)

        weight = self.add_weight(
            shape=shape,
            # Values that exist are assigned: for a sharded weight, Keras compiles the
            # initializer, and they would be constants of the program.
            initializer="zeros" if known else initial,
            dtype=first.dtype,
            trainable=layers.is_created_trainable(self._templates.used, first),
            # The layers in the template do it, each by its own policy.
            autocast=False,
            regularizer=_of_each(first.regularizer, ops.sum),
            constraint=_of_each(first.constraint),
            name=f"stacked_{name}",
        )
        if known:
            values = np.stack([ops.convert_to_numpy(v) for v in variables])
            weight.assign(np.broadcast_to(values, shape))
        weight.trainable = weight.trainable and first.trainable
        return weight

    def takes_rows(self) -> bool:
        """Return whether rows sorted by expert are supported: they are not."""
        return False

    def call(self, slots, training=None):
        # `(E, ...)` values of all variables
        values = [ops.convert_to_tensor(weight) for weight in self.stacked]
        states = []
        if self._templates.draws[bool(training)]:
            states = layers.states_of_draws(self._templates.used)
            # `(E, 2)` states, one for each expert, under 2^30: PyTorch adds the two,
            # and the sum is an int32.
            shape, seed = (self.num_experts, 2), self.seed_generator
            for state in states:
                drawn = keras.random.randint(shape, 0, 1 << 30, seed=seed)
                values.append(ops.cast(drawn, state.dtype))
        map_experts, one = self._maps[bool(training)], self._one(training, states)
        sharded = constraints.is_distributed()
        if keras.backend.backend() == "torch":
            import torch

            if torch.compiler.is_exporting():
                # The program cannot have a vectorized map.
                map_experts = _one_by_one

        def some_experts(*operands):
            y = map_experts(one, list(operands))
            return reshape(y, ops.shape(operands[0]))

        def all_experts(x):
            if states:
                y = some_experts(x, *values)
            else:
                y = chunked_map(some_experts, [x, *values], sharded)
            return ops.cast(y, x.dtype)

        # One vector per slot for `by_expert`: (G, E, C, H * W * D)
        _, num_experts, capacity, *axes = slots.shape
        flat = reshape(slots, (-1, num_experts, capacity, math.prod(axes)))
        outputs = by_expert(all_experts, flat, self.path, sharded)
        return reshape(outputs, (-1, num_experts, capacity, *axes))

    # === Refusals ===

    def enable_lora(self, *args, **kwargs):
        raise ValueError(
            "Experts of any layer take no factors of LoRA. Received: enable_lora on "
            f"{self.path!r}, experts of a `{type(self.expert).__name__}`. "
            "Use `layers.MoE(router, mlp_dim=...)`, whose experts do."
        )

    def check_quantization(self, mode, config=None):
        """Raise the error of `quantize`: it is not supported."""
        raise NotQuantizedError(
            "Experts of any layer are not quantized: leave them out by "
            "`filters=lambda layer: 'experts' not in str(layer.path)`, or use "
            "`layers.MoE(router, mlp_dim=...)`. "
            f"Received: mode={mode!r} for {self.path!r}, experts of a "
            f"`{type(self.expert).__name__}`."
        )

    def quantize(self, mode=None, type_check=True, config=None):
        self.check_quantization(mode, config)


class NotQuantizedError(NotImplementedError, ValueError):
    """A `ValueError` that `keras.Model.quantize` turns into a warning."""


def _check_has_values(layer):
    """Raise if TensorFlow builds the layer in a step, where weights have no values."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    if not tf.executing_eagerly():
        raise ValueError(
            "On TensorFlow, experts of any layer are built before the first step of "
            "`fit`: call the model on a batch, or begin it with `keras.Input`. "
            f"Received: {layer.path!r}, built in one."
        )


def _one_by_one(function, operands):
    """`keras.ops.vectorized_map`, computed in a loop."""
    each = zip(*map(ops.unstack, operands), strict=True)
    return ops.stack([function(list(of_one)) for of_one in each])


def _of_each(function, reduce=None):
    """Return a function of a stacked weight from that of a weight, or `None`."""
    if function is None:
        return None

    def of_stacked(weight):
        values = ops.vectorized_map(function, ops.convert_to_tensor(weight))
        return values if reduce is None else reduce(values)

    return of_stacked
