"""Layers and variables: flags, lists and initial values."""

import contextlib
import contextvars
import functools
import gc

import keras
import numpy as np


def flatten_layers(model):
    """Return a list of a model or layer and all layers inside it, at any depth.

    Would be replaced by: a public `keras.Layer.flatten_layers()`.
    """
    return list(model._flatten_layers())


class Layer(keras.layers.Layer):
    """Base class of layers whose `trainable` also applies to parts created later.

    Keras freezes the sublayers that exist when `trainable` is set, and none for an
    argument of the constructor. A file has one flag for a layer with all its parts:
    here it also has the flags of parts that differ. On PyTorch its weights are listed
    as in `torch_modules.Weights`. By default the output has the shape of the input.
    Would be replaced by: Keras freezing later sublayers, and saving the flag of each.
    """

    # Names of arguments of the constructor, which `get_config` returns; and those that
    # are layers
    config_arguments: tuple = ()
    layer_arguments: tuple = ()

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if keras.backend.backend() == "torch":
            self._track_variables()

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def keep_arguments(self, scope):
        """Set attributes of `config_arguments` that `locals()` of `__init__` has."""
        for name in self.config_arguments & scope.keys():
            setattr(self, name, scope[name])

    def get_config(self):
        own = {name: getattr(self, name) for name in self.config_arguments}
        own |= {name: serialized(getattr(self, name)) for name in self.layer_arguments}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config):
        parts = {name: config.get(name) for name in cls.layer_arguments}
        if not parts:
            return super().from_config(config)
        return cls(**{**config, **keras.saving.deserialize_keras_object(parts)})

    def _post_build(self):
        super()._post_build()
        if not self.trainable:
            set_trainable(self, False)

    def get_build_config(self):
        config = super().get_build_config()
        parts = trainable_parts(self) if config else {}
        return {**config, "trainable": parts} if parts else config

    def build_from_config(self, config):
        super().build_from_config(config)
        set_trainable(self, (config or {}).get("trainable", {}))


if keras.backend.backend() == "torch":
    from keras_softmoe.keras_adapter import torch_modules

    torch_modules.register(Layer)
    Layer.__call__ = torch_modules.quick(keras.layers.Layer.__call__)


def serialized(layer):
    """Return the configuration of a layer (or `None`) that is built with another.

    Would be replaced by: `serialize_keras_object` with an argument for shapes.
    """
    config = keras.saving.serialize_keras_object(layer)
    if layer is not None:
        # Its own shapes, which may differ from those of the other layer now
        config.pop("build_config", None)
    return config


def is_in_training_mode(layer):
    """Return whether a PyTorch module is in training, but Keras does not know it.

    A call without `training=True` is one of prediction in Keras, even after `train()`.
    Would be replaced by: Keras reading the mode of a module that PyTorch calls.
    """
    is_torch = keras.backend.backend() == "torch"
    return is_torch and torch_modules.is_in_training_mode(layer)


def trainable_parts(layer):
    """Return the `trainable` flags of parts that differ from their layer's.

    It is a dict from paths of names below the layer, without models in it, which have a
    separate configuration. It is empty for a layer with factors of LoRA: they freeze
    the rest, and a file has their sum with the kernels instead.
    Would be replaced by: public lists of the sublayers and weights of a layer.
    """
    found = {}
    for path, part, parent in _parts(layer):
        if getattr(part, "lora_enabled", False):
            return {}
        if parent is not None and part.trainable != parent.trainable:
            found[path] = part.trainable
    return found


def set_trainable(layer, value):
    """Freeze or unfreeze a layer with all its parts.

    Unlike the setter of Keras this also works if `trainable` has the value already:
    parts of the layer may differ, and TensorFlow ignores an unchanged value. `value` is
    a bool, or a dict of changes as of `trainable_parts`, without effect on other paths.
    Would be replaced by: the setter, and public lists as in `trainable_parts`.
    """
    if not isinstance(value, dict):
        for part in layer._flatten_layers():
            part._trainable = value
            for variable in part._trainable_variables:
                variable.trainable = value
        return
    parts = {path: part for path, part, _ in _parts(layer)} if value else {}
    # Layers come before their parts.
    for path in sorted(value):
        part = parts.get(path)
        if isinstance(part, keras.Layer):
            set_trainable(part, value[path])
        elif part is not None:
            part.trainable = value[path]


def _parts(layer, path="", parent=None):
    """Yield `(path, part, parent)` of a layer, all layers in it and their weights."""
    yield path, layer, parent
    prefix = f"{path}/" if path else ""
    for variable in layer._trainable_variables:
        yield prefix + variable.name, variable, layer
    for child in layer._layers:
        # The flag of a layer without weights has no meaning.
        if child.weights and not isinstance(child, keras.Model):
            yield from _parts(child, prefix + child.name, layer)


def only_finds_shapes():
    """Return whether layers are called to find the shapes of outputs only.

    Before a `fit` by several processes Keras does so with the rows of one of them.
    Would be replaced by: a public `keras.is_symbolic()`.
    """
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope

    return in_symbolic_scope()


def is_initialized(variable):
    """Return whether a variable has a value.

    It has none while the first batch builds its model, and on JAX during a step.
    Would be replaced by: a public `keras.Variable.is_initialized`.
    """
    return variable._value is not None


def release_values(layer):
    """Free the memory of the weights of a layer that is called with other values.

    Would be replaced by: a public way to drop the value of a `keras.Variable`.
    """
    for weight in layer.weights:
        weight._value = None
    if keras.backend.backend() == "torch":
        # The modules of layers and of a `keras.Sequential` hold them, too.
        for part in [*layer._flatten_layers(), *layer.modules()]:
            held = getattr(part, "_torch_params", None)
            if held is not None and not isinstance(held, torch_modules.Weights):
                part._torch_params = type(part._torch_params)()


def states_of_draws(layer):
    """Return a list of the variables of random generators in a layer and its parts.

    Would be replaced by: a public list of the seed generators of a layer.
    """
    generators = [g for part in layer._flatten_layers() for g in part._seed_generators]
    return list({id(g.state): g.state for g in generators}.values())


def is_created_trainable(layer, variable):
    """Return whether a weight was created as trainable, even if it is frozen now.

    Would be replaced by: public lists as in `trainable_parts`.
    """
    parts = layer._flatten_layers()
    return any(variable is v for part in parts for v in part._trainable_variables)


_STARTS_AS_ZEROS = contextvars.ContextVar("starts_as_zeros", default=False)


@contextlib.contextmanager
def during(variable, value):
    """Give a context variable a value in this context.

    Would be replaced by: `with variable.set(value)`, from Python 3.14 on.
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def zero_initialization(enabled=True):
    """Let new weights start as zeros in this context, because others will be loaded.

    Drawing initial values would need a multiple of their memory, and compilation.
    Would be replaced by: an option of Keras to build a model without initial values.
    """
    _let_variables_start_as_zeros()
    return during(_STARTS_AS_ZEROS, enabled)


@contextlib.contextmanager
def without_values():
    """Build layers whose weights have shapes, but no values.

    Only shapes can be computed with them, inside of the scope.
    Would be replaced by: a `keras.StatelessScope` whose variables stay without values.
    """
    from keras.src.backend.common import global_state

    waiting = list(global_state.get_global_attribute("uninitialized_variables", []))
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute("uninitialized_variables", waiting)


@functools.cache
def _let_variables_start_as_zeros():
    """Replace the initialization of variables, once, for the context above."""
    initialize = keras.Variable._initialize_with_initializer

    def zeros(shape, dtype):
        # From NumPy, as JAX would compile a program for the zeros of each shape.
        return keras.ops.convert_to_tensor(np.zeros(shape, "float32"), dtype=dtype)

    def initialize_with(variable, initializer):
        # Seeds are integers, and not weights.
        if _STARTS_AS_ZEROS.get() and keras.backend.is_float_dtype(variable.dtype):
            is_distributed = keras.distribution.distribution() is not None
            initializer = keras.initializers.Zeros() if is_distributed else zeros
        initialize(variable, initializer)

    keras.Variable._initialize_with_initializer = initialize_with


# === LoRA and quantization ===


def forget_adapted_layers(layer):
    """Clear KerasHub's list of the layers of a backbone with LoRA factors.

    `enable_lora` fills the list, and the factors of these layers are saved.
    Would be replaced by: a `Backbone.merge_lora` of KerasHub.
    """
    if getattr(layer, "_lora_enabled_layers", None):
        layer._lora_enabled_layers = []


def is_quantized_under(filters, layer):
    """Return whether `Model.quantize(..., filters=filters)` quantizes a layer.

    Would be replaced by: a public `keras.quantizers.should_quantize_layer`.
    """
    from keras.src.quantizers.utils import should_quantize_layer

    return should_quantize_layer(layer, filters)


def lora_update(layer, first, second):
    """Return the update of a kernel by the factors of LoRA, `alpha / rank * A @ B`.

    Would be replaced by: a public property of layers with `enable_lora`.
    """
    return layer.lora_alpha / layer.lora_rank * keras.ops.matmul(first, second)


class QuantizedByExpert:
    """Mixin of an `EinsumDense` on `(E, D, H)` kernels whose experts share nothing.

    From version 3.16 on Keras asks a layer how its products are computed.
    Would be replaced by: a public `EinsumDense.quantization_geometry()`, and the kernel
    as it is stored.
    """

    @property
    def kernel(self):
        """The kernels, `(E, D, H)`, with the update of LoRA.

        In int8 they are the stored integers, as in Keras, without the update of LoRA.
        """
        if not self.built:
            raise AttributeError("An expert bank has a `kernel` once it is built.")
        kernel = self._kernel
        if not self.lora_enabled or self.quantization_mode == "int8":
            return kernel
        # Not in the `compute_dtype`, which would round the kernel in a saved file.
        added = lora_update(self, self.lora_kernel_a, self.lora_kernel_b)
        return keras.ops.cast(kernel + added, kernel.dtype)

    def _quantization_geometry(self):
        from keras.src.quantizers.geometry import EinsumProjectionGeometry

        class Geometry(EinsumProjectionGeometry):
            def rows_columns(self, kernel_shape):
                # Scales have an axis of experts besides.
                return kernel_shape[0] * kernel_shape[1], kernel_shape[2]

            def add_lora_delta(self, inputs, x):
                layer = self.layer
                if not layer.lora_enabled:
                    return x
                update = keras.ops.matmul(inputs, layer.lora_kernel_a)
                update = keras.ops.matmul(update, layer.lora_kernel_b)
                x = x + layer.lora_alpha / layer.lora_rank * update
                return keras.ops.cast(x, layer.compute_dtype)

        return Geometry(self)


@contextlib.contextmanager
def quick_garbage_collection():
    """Let Keras search new objects only when a variable is removed in this context.

    It then collects garbage, which takes a second with millions of other objects.
    Would be replaced by: a single collection after the last layer of a model.
    """
    if gc.get_freeze_count():
        # The user has frozen objects, which our `unfreeze` would unfreeze.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
