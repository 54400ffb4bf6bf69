"""The template of experts: checks, copies and names of any layer."""

import inspect

import keras
from keras import ops

from keras_softmoe.keras_adapter.layers import flatten_layers, states_of_draws


class Templates:
    """The template as it was given and as it is used, which Keras does not track.

    `given` is the user's layer, `used` the built one, which computes each expert with
    its values, and `draws` says for both values of `training` whether it draws numbers.
    """

    def __init__(self, given):
        self.given, self.used, self.draws = given, None, {}

    def build(self, slot_shape):
        """Build the layer to use; return it and the shape of its input.

        With `(1, D)` each slot is a sequence of its own, so that no layer can mix them.
        """
        # All slots as a batch, or each as a sequence of one token
        shapes = [slot_shape] + [(1, *slot_shape)] * (len(slot_shape) == 1)
        errors = []
        for shape in shapes:
            try:
                # A built template keeps its weights, others get new ones.
                template = self.given
                if not template.built:
                    template = new_copy(template, shape)
                probes = [_Probe(template, training) for training in (False, True)]
                inputs = keras.KerasTensor((None, *shape))
                specs = [probe.compute_output_spec(inputs) for probe in probes]
            except Exception as error:
                errors.append(error)
                continue
            for probe, spec in zip(probes, specs, strict=True):
                probe.check(spec, shape)
                # In training, PyTorch may draw without its state.
                draws = bool(probe.changed) or probe.is_training
                draws = draws and bool(states_of_draws(template))
                self.draws[probe.is_training] = draws
            self.used = template
            return template, shape
        raise ValueError(
            f"The template must map slots of shape {slot_shape} to the same shape. "
            f"Received: expert={_described(self.given)}, which raises "
            f"{type(errors[0]).__name__}: {errors[0]}"
        ) from errors[0]


def check_template(expert):
    """Raise unless a layer can be a template, as far as is known before it is built."""
    if not isinstance(expert, keras.layers.Layer):
        raise ValueError(
            f"`expert` must be a layer, the template of experts. Received: {expert=}."
        )
    parameters = inspect.signature(expert.call).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    inputs = [p.name for p in parameters if p.default is p.empty and p.kind in kinds]
    if isinstance(expert, keras.Model) and expert.built:
        inputs = getattr(expert, "inputs", inputs)
    if len(inputs) > 1:
        raise ValueError(
            "An expert has one input, the tokens of its slots. Received: expert="
            f"`{type(expert).__name__}`, which takes {len(inputs)}."
        )
    # Stacked weights are plain kernels: without factors, scales or integers
    for part in flatten_layers(expert):
        kind = f"`{type(part).__name__}` {part.name!r}"
        if getattr(part, "lora_enabled", False):
            raise ValueError(
                "Experts of any layer take no factors of LoRA. Received: expert with "
                f"LoRA in the {kind}. Fold the factors into the kernel first."
            )
        if getattr(part, "quantization_mode", None):
            raise ValueError(
                "Experts of any layer are not quantized. Received: expert with the "
                f"{kind} in {part.quantization_mode!r}. Give the layer from before."
            )
    return expert


def new_copy(expert, shape):
    """Return a copy of a layer with weights of its own, built for `(None, *shape)`."""
    try:
        copy = type(expert).from_config(expert.get_config())
    except Exception as error:
        raise TypeError(
            "A layer that is not built is copied from its configuration, which fails "
            f"here: {error} Build the layer first, or give it a `get_config`."
        ) from error
    # Called and not built, as some layers are built by their first call.
    copy(keras.KerasTensor((None, *shape)))
    return copy


def _described(layer):
    return f"`{type(layer).__name__}` {layer.name!r}"


class _Probe(keras.layers.Layer):
    """A call of a template in which nothing is computed, to check it."""

    def __init__(self, template, is_training):
        super().__init__(name="probe")
        self._templates = Templates(template)
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
        """Raise unless the template maps one slot to `spec`, of the same shape."""
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
                "A loss that a layer adds, as `activity_regularizer` does, would be "
                f"that of one expert. Received: {kind}, which adds one."
            )
        # Each expert has a state of a generator of its own: these may change.
        draws = {id(state) for state in states_of_draws(template)}
        paths = {id(v): v.path for v in template.variables}
        outside = "a random generator outside of it"
        changed = [paths.get(key, outside) for key in self.changed if key not in draws]
        if changed:
            raise ValueError(
                "A weight that a call changes, such as a mean over batches, would need "
                f"one for each expert. Received: {kind}, which changes "
                f"{', '.join(changed)}. `LayerNormalization` has none."
            )
