"""Experts that are copies of any layer, with weights of their own."""

import inspect
import math
from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from keras_softmoe.checks import check_bools, check_whole_numbers
from keras_softmoe.keras_adapter.layers import (
    Layer,
    flatten_layers,
    is_created_trainable,
    is_initialized,
    states_of_draws,
)
from keras_softmoe.layer_cost import LayerCost, cost_of
from keras_softmoe.layers._slots import by_expert
from keras_softmoe.sharding.constraints import check_divides_experts, check_layer


@keras.saving.register_keras_serializable(package="keras_softmoe")
class TemplateExperts(Layer):
    """Experts of any layer, each applied to its own slots.

    The weights of all experts are stacked: `stacked_NAME` is `(E, ...)` for a weight of
    the template. They are computed together, by `keras.ops.vectorized_map`.

    Args:
        num_experts: int, number `E` of experts.
        expert: `keras.layers.Layer`, the template, which is neither changed nor a part
            of this layer. It keeps its own dtype policy. One that is not built is
            cloned from its configuration, and each expert gets initial weights of its
            own (all the same ones if its initializers have a fixed seed). Of one that
            is built, each expert begins with a copy of its weights. (A file has its
            configuration, which it therefore needs in order to be saved.)
        equal_experts: bool, whether all experts start with the same weights.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Maps slots `(G, E, C, D)` to outputs `(G, E, C, D)`: a template gets its slots of
    all groups as `(N, D)`, or as `(N, 1, D)` if it does not accept those. Slots of
    several axes, `(G, E, C, H, W, D)`, are given as `(N, H, W, D)`.

    Raises:
        ValueError: if the template is not a layer, has several inputs or outputs,
            changes the shape of its input, adds losses or has weights that change
            without being trained (such as the statistics of a
            `keras.layers.BatchNormalization`), or has LoRA factors or a quantized
            dtype; or if the slots have another number of experts.

    Examples:
        >>> expert = keras.Sequential(
        ...     [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(16)]
        ... )
        >>> router = ksm.routers.SoftRouter(num_experts=4)
        >>> layer = ksm.layers.MoE(router, expert=expert)
        >>> layer(np.zeros((2, 9, 16))).shape
        (2, 9, 16)
        >>> [tuple(weight.shape) for weight in layer.experts.weights]
        [(4, 16, 64), (4, 64), (4, 64, 16), (4, 16)]
    """

    def __init__(
        self,
        num_experts: int,
        expert: keras.layers.Layer,
        equal_experts: bool = False,
        **kwargs,
    ):
        check_whole_numbers(1, num_experts=num_experts)
        check_bools(equal_experts=equal_experts)
        check_template(expert)
        check_divides_experts(num_experts)
        super().__init__(**kwargs)
        self.num_experts = num_experts
        self.equal_experts = equal_experts
        # `given` is the user's, `used` the one that computes. Not attributes of their
        # own: Keras would track them.
        self._templates = _Templates(expert)

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
        draws = states_of_draws(template)
        if draws:
            self.seed_generator = keras.random.SeedGenerator()
        copies = [template]
        if template is not self.expert and not self.equal_experts:
            others = range(self.num_experts - 1)
            copies += [_new(self.expert, self._slot_shape) for _ in others]
        self._stacked = [
            self._stack(name, [copy.weights[index] for copy in copies])
            for index, name in enumerate(_names(template))
        ]
        self._maps = {training: self._find_map(training) for training in (False, True)}
        check_layer(self)

    def _find_map(self, training):
        """Return the function that computes a function of one expert for all."""
        backend = keras.backend.backend()
        if backend == "jax":
            return ops.vectorized_map
        if self._templates.draws[training]:
            # A vectorized map would draw the same numbers for all, or refuse to.
            return _one_by_one
        if backend == "torch":
            x = ops.zeros((self.num_experts, *self._slot_shape))
            values = [ops.zeros(w.shape, w.dtype) for w in self._stacked]
            try:
                ops.vectorized_map(self._one(training), [x, *values])
            except Exception:
                # It has none for some operations, such as the convolutions of Keras.
                return _one_by_one
        return ops.vectorized_map

    def _one(self, training, states=()):
        """Return the function of one expert: of its slots and the values of variables.

        Args:
            training: bool or `None`.
            states: variables besides the weights.
        """
        template = self._templates.used
        variables = [*template.weights, *states]

        def one(operands):
            x, *values = operands
            x = ops.reshape(x, (-1, *self._slot_shape))
            with keras.StatelessScope(list(zip(variables, values, strict=True))):
                return template(x, training=training)

        return one

    def _stack(self, name, variables):
        """Add a weight with the values of one variable of each expert."""
        first = variables[0]
        shape = (self.num_experts, *first.shape)
        known = is_initialized(first)

        def initial(shape, dtype=None):
            values = [ops.convert_to_tensor(v.value, dtype=dtype) for v in variables]
            return ops.broadcast_to(ops.stack(values), shape)

        weight = self.add_weight(
            shape=shape,
            # Values that exist are assigned: for a sharded weight, Keras compiles the
            # initializer, and they would be constants of the program.
            initializer="zeros" if known else initial,
            dtype=first.dtype,
            trainable=is_created_trainable(self._templates.used, first),
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
        values = [ops.convert_to_tensor(weight) for weight in self._stacked]
        states = []
        if self._templates.draws[bool(training)]:
            states = states_of_draws(self._templates.used)
            values += [self._seeds(state.dtype) for state in states]
        map_experts, one = self._maps[bool(training)], self._one(training, states)

        def all_experts(x):
            y = map_experts(one, [x, *values])
            return ops.cast(ops.reshape(y, ops.shape(x)), x.dtype)

        _, num_experts, capacity, *axes = slots.shape
        flat = ops.reshape(slots, (-1, num_experts, capacity, math.prod(axes)))
        outputs = by_expert(all_experts, flat, self.path)
        return ops.reshape(outputs, (-1, num_experts, capacity, *axes))

    def _seeds(self, dtype):
        """Return `(E, 2)` states of a random generator, one for each expert."""
        # Under 2^30: PyTorch adds the two, and the sum is an int32.
        shape, seed = (self.num_experts, 2), self.seed_generator
        return ops.cast(keras.random.randint(shape, 0, 1 << 30, seed=seed), dtype)

    def compute_output_shape(self, slots_shape):
        return slots_shape

    def cost(self, slots_shape: Sequence[int], training: bool = False) -> LayerCost:
        one = _cost_of_one(self.expert, tuple(slots_shape), training)
        return one._replace(
            weights=self.num_experts * one.weights,
            float32_weights=self.num_experts * one.float32_weights,
            sharded_kernels=0,
        )

    # === Refusals ===

    def enable_lora(self, *args, **kwargs):
        raise ValueError(
            f"Experts of any layer take no factors of LoRA. Received: enable_lora on "
            f"{self.path!r}, experts of a `{type(self.expert).__name__}`. Use "
            "`layers.MoE(router, mlp_dim=...)`, whose experts do."
        )

    def quantize(self, mode=None, type_check=True, config=None):
        raise ValueError(
            f"Experts of any layer are not quantized. Received: mode={mode!r} for "
            f"{self.path!r}, experts of a `{type(self.expert).__name__}`. Leave them "
            "out (`quantize(..., filters=lambda layer: 'experts' not in "
            "str(layer.path))`), or use `layers.MoE(router, mlp_dim=...)`."
        )

    def get_config(self):
        return {
            **super().get_config(),
            "num_experts": self.num_experts,
            "expert": serialized_template(self.expert),
            "equal_experts": self.equal_experts,
        }

    @classmethod
    def from_config(cls, config):
        expert = keras.saving.deserialize_keras_object(config["expert"])
        return cls(**{**config, "expert": expert})


class _Templates:
    """The template as it was given and as it is used, which Keras does not track.

    Attributes:
        given: `keras.layers.Layer`, by the user.
        used: the built one whose variables stand for those of each expert, or `None`.
        draws: dict from bools, whether in training, to whether it draws numbers.
    """

    def __init__(self, given):
        self.given, self.used, self.draws = given, None, {}

    def build(self, slot_shape):
        """Build and check the layer to use.

        Args:
            slot_shape: tuple of int, of a slot.

        Returns:
            The layer, and the shape of one of its inputs without the batch: that of a
            slot, or `(1, D)`, where each slot is a sequence of its own, so that no
            layer can mix them.
        """
        shapes = [slot_shape] + [(1, *slot_shape)] * (len(slot_shape) == 1)
        errors = []
        for shape in shapes:
            try:
                template = self.given if self.given.built else _new(self.given, shape)
                probes = [_Probe(template, training) for training in (False, True)]
                specs = [
                    probe.compute_output_spec(keras.KerasTensor((None, *shape)))
                    for probe in probes
                ]
            except Exception as error:
                errors.append(error)
                continue
            for probe, spec in zip(probes, specs, strict=True):
                probe.check(spec, shape)
                # In training, PyTorch may draw without its state.
                draws = bool(probe.changed) or probe.is_training
                self.draws[probe.is_training] = draws and bool(
                    states_of_draws(template)
                )
            self.used = template
            return template, shape
        raise ValueError(
            f"The template cannot be applied to slots of shape {slot_shape}. Received: "
            f"expert={_described(self.given)}, which raises "
            f"{type(errors[0]).__name__}: {errors[0]}"
        ) from errors[0]


def check_template(expert):
    """Raise unless a layer can be a template, as far as is known before it is built."""
    if not isinstance(expert, keras.layers.Layer):
        raise ValueError(
            "`expert` must be a layer, the template of all experts, for example "
            f"`keras.layers.Dense(width)`. Received: expert={expert!r}."
        )
    inputs = [
        name
        for name, p in inspect.signature(expert.call).parameters.items()
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if isinstance(expert, keras.Model) and expert.built:
        inputs = getattr(expert, "inputs", inputs)
    if len(inputs) > 1:
        raise ValueError(
            f"An expert has one input, the tokens of its slots. Received: expert="
            f"`{type(expert).__name__}`, which takes {len(inputs)}. Wrap it into a "
            "layer with one input."
        )
    for part in flatten_layers(expert):
        kind = f"`{type(part).__name__}` {part.name!r}"
        if getattr(part, "lora_enabled", False):
            raise ValueError(
                f"Experts of any layer take no factors of LoRA. Received: expert with "
                f"LoRA in the {kind}. Fold the factors into the kernel first."
            )
        if getattr(part, "quantization_mode", None):
            raise ValueError(
                "Experts of any layer are not quantized. Received: expert with the "
                f"{kind} in {part.quantization_mode!r}. Give the layer from before."
            )
    return expert


def serialized_template(expert):
    """Return the configuration of a template, which is not built from a file."""
    config = keras.saving.serialize_keras_object(expert)
    config.pop("build_config", None)
    return config


def _new(expert, shape):
    """Return a copy of a layer with weights of its own, built for `(None, *shape)`."""
    copy = type(expert).from_config(expert.get_config())
    # Called and not built, as some layers are built by their first call.
    copy(keras.KerasTensor((None, *shape)))
    return copy


def _described(layer):
    return f"`{type(layer).__name__}` {layer.name!r}"


class _Probe(keras.layers.Layer):
    """A call of a template in which nothing is computed, to see whether it can be one.

    Attributes:
        is_training: bool.
        changed: list of the `id`s of variables with a new value.
        has_losses: bool, whether there are losses.
    """

    def __init__(self, template, is_training):
        super().__init__(name="probe")
        self._templates = _Templates(template)
        self.is_training = is_training
        self.changed, self.has_losses = [], False

    def call(self, inputs):
        template = self._templates.given
        state = [(v, ops.convert_to_tensor(v.value)) for v in template.variables]
        with keras.StatelessScope(state, collect_losses=True) as scope:
            before = dict(scope.state_mapping)
            outputs = template(inputs, training=self.is_training)
        now = scope.state_mapping
        self.changed = [key for key in now if now[key] is not before.get(key)]
        self.has_losses = bool(scope.losses)
        return outputs

    def check(self, spec, shape):
        """Raise unless the template is a function of one slot.

        Args:
            spec: what it returns, `keras.KerasTensor` or a structure of them.
            shape: tuple, the shape of its input without the batch.
        """
        template = self._templates.given
        kind = f"expert={_described(template)}"
        if not isinstance(spec, keras.KerasTensor) or tuple(spec.shape[1:]) != shape:
            is_one = isinstance(spec, keras.KerasTensor)
            found = tuple(spec.shape) if is_one else f"a {type(spec).__name__}"
            raise ValueError(
                "An expert returns one tensor of the shape of its input, as outputs "
                f"take the place of the tokens. Received: {kind}, which maps "
                f"{(None, *shape)} to {found}. End it with a layer of {shape[-1]} "
                "units."
            )
        if self.has_losses:
            raise ValueError(
                "A loss that a layer adds in a call would be that of one expert. "
                f"Received: {kind}, which adds one. Leave it out (`add_loss`, "
                "`activity_regularizer`)."
            )
        draws = {id(state) for state in states_of_draws(template)}
        paths = {id(v): v.path for v in template.variables}
        changed = [
            paths.get(key, "a random generator outside of it")
            for key in self.changed
            if key not in draws
        ]
        if changed:
            raise ValueError(
                "A weight that a call changes, such as a mean over batches, would need "
                f"one for each expert. Received: {kind}, which changes "
                f"{', '.join(changed)}. Take a layer without it, for example "
                "`keras.layers.LayerNormalization`."
            )


def _cost_of_one(expert, shape, training):
    """Return the cost of a template for `(N, ..., D)` slots.

    A layer without a method `cost` is counted if it is built, and its weights are those
    of dense layers and normalizations, which are applied to each slot once.
    """
    parts = [part for part in flatten_layers(expert) if part.weights]
    leaves = [part for part in parts if len(flatten_layers(part)) == 1]
    kinds = keras.layers.Dense | keras.layers.LayerNormalization
    has_cost = hasattr(expert, "cost") or isinstance(expert, keras.Sequential)
    is_counted = leaves and all(isinstance(leaf, kinds) for leaf in leaves)
    if has_cost or not is_counted:
        return cost_of(expert, shape, training)
    total = LayerCost()
    for leaf in leaves:
        width = leaf.weights[0].shape[0]
        total += cost_of(leaf, (*shape[:-1], width), training)
    weights = sum(math.prod(weight.shape) for weight in expert.weights)
    # Not those of a leaf, if other weights belong to the layer itself.
    return total._replace(weights=weights)


def _one_by_one(function, operands):
    """`keras.ops.vectorized_map`, computed in a loop."""
    each = zip(*map(ops.unstack, operands), strict=True)
    return ops.stack([function(list(of_one)) for of_one in each])


def _names(template):
    """Return a name for each weight: its path in the template, without slashes."""
    names = []
    for weight in template.weights:
        name = weight.path.removeprefix(f"{template.path}/").replace("/", "_")
        count = names.count(name)
        names.append(f"{name}_{count}" if count else name)
    return names


def _of_each(function, reduce=None):
    """Return a function of a stacked weight from that of a weight, or `None`."""
    if function is None:
        return None

    def of_stacked(weight):
        values = ops.vectorized_map(function, ops.convert_to_tensor(weight))
        return values if reduce is None else reduce(values)

    return of_stacked
