"""Frozen parts of models and compilation, as configurations describe them."""

import contextvars

import keras

from keras_softmoe.checks import quote
from keras_softmoe.keras_adapter import layers
from keras_softmoe.models.adaptation import has_factors

_PolicyMap = keras.dtype_policies.DTypePolicyMap


def set_trainable_argument(model, trainable):
    """Freeze a model by the argument `trainable`, a bool or as `trainable_argument`.

    Keras would apply it before there are layers.
    """
    flags = trainable.items() if isinstance(trainable, dict) else [("", trainable)]
    if not all(isinstance(p, str) and isinstance(flag, bool) for p, flag in flags):
        raise ValueError(
            "`trainable` must be a bool, or a dict from paths of layers to bools. "
            f"Received: trainable={quote(trainable)}."
        )
    if trainable is not True:
        layers.set_trainable(model, trainable)


def trainable_argument(model):
    """Return the argument `trainable` that describes the frozen parts of a model.

    It is a bool; or a dict from the paths of layers (`""`: the model) to bools.
    """
    parts = layers.trainable_parts(model)
    if not parts:
        return model.trainable
    return parts if model.trainable else {"": False, **parts}


def serialized_routers(model):
    """Return the serialized router of a model, a list if they differ, or `None`."""
    found = [layers.serialized(router) for router in model.routers.values()]
    if has_factors(model):
        # LoRA has frozen the routers, but files hold kernels without LoRA.
        for config in found:
            config["config"]["trainable"] = True
    is_one = all(config == found[0] for config in found)
    return next(iter(found), None) if is_one else found


# The entry `quantization` repeats the `dtype` of quantized layers, because
# `keras_hub.models.Backbone.from_preset` overwrites `dtype`, with `None` by default.


def base_config(model, models_inside=()):
    """Return the arguments of all backbones: name, dtype, frozen and quantized parts.

    `models_inside` are models with configurations of their own.
    """
    dtype = serialized_dtype(model, models_inside)
    config = {"name": model.name, "trainable": trainable_argument(model)}
    config["dtype"] = dtype
    if dtype["class_name"] == _PolicyMap.__name__:
        config["quantization"] = dtype
    return config


def serialized_dtype(model, models_inside=()):
    """Return the serialized dtype of a model, a map of policies if it is quantized.

    Layers of `models_inside` are left out of the map.
    """
    inside = [layer for part in models_inside for layer in layers.flatten_layers(part)]
    inside = set(map(id, inside))
    policies = {
        layer.path: own_policy(layer)
        for layer in layers.flatten_layers(model)
        if layer.quantization_mode and id(layer) not in inside
    }
    dtype = getattr(model.dtype_policy, "default_policy", model.dtype_policy)
    if policies:
        dtype = _PolicyMap(dtype.name, policies)
    return keras.dtype_policies.serialize(dtype)


def with_quantization(config):
    """Return arguments of a backbone with the quantized layers in its `dtype`.

    `from_preset` may have replaced the `dtype` that `base_config` gave.
    """
    config = dict(config)
    kept, dtype = config.pop("quantization", None), config.get("dtype")
    if kept is None:
        return config
    kept = keras.dtype_policies.get(kept)
    dtype = kept.default_policy if dtype is None else keras.dtype_policies.get(dtype)
    if not isinstance(dtype, _PolicyMap):
        policies = {
            path: policy.from_config({**policy.get_config(), "source_name": dtype.name})
            for path, policy in kept.items()
        }
        dtype = _PolicyMap(dtype.name, policies)
    return {**config, "dtype": dtype}


def own_policy(layer):
    """Return the dtype policy of a layer, also if it has the map of a whole model."""
    policy = layer.dtype_policy
    return policy[layer.path] if isinstance(policy, _PolicyMap) else policy


IN_PRESET = contextvars.ContextVar("configuration_is_for_a_preset", default=False)


def preset_is_saved():
    """Open a scope in which configurations are of presets, without optimizer state."""
    return layers.during(IN_PRESET, True)


def with_compilation(model, config):
    """Add `compile=False` to a task's configuration if its file has no optimizer.

    Tasks with LoRA, whose files hold merged kernels, have none; in a preset they do.
    """
    if model.compiled and (IN_PRESET.get() or not has_factors(model)):
        return config
    return {**config, "compile": False}


def with_optimizer(model, compile_config, **own):
    """Add to a compile configuration whether the optimizer is built.

    `own` are arguments of `compile` for `compile_from_config`, not for clones.
    """
    if has_factors(model):
        return {}
    if not compile_config:
        return compile_config
    # Keras ignores further keys of the optimizer.
    further = {"is_built": model.optimizer.built, "own": own}
    optimizer = {**compile_config["optimizer"], **further}
    return {**compile_config, "optimizer": optimizer}


def compile_from_config(self, config):
    """Compile a task as `get_compile_config` describes; a method of tasks."""
    optimizer = config["optimizer"]
    arguments = keras.saving.deserialize_keras_object(config)
    self.compile(**{**arguments, **optimizer.get("own", {})})
    if optimizer.get("is_built", True):
        self.optimizer.build(self.trainable_variables)
