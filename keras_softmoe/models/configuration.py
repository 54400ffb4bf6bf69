"""Frozen parts of models and compilation, as configurations describe them."""

import contextlib
import contextvars

import keras

from keras_softmoe.checks import quote
from keras_softmoe.keras_adapter.layers import (
    flatten_layers,
    set_trainable,
    trainable_parts,
)
from keras_softmoe.models.adaptation import has_factors


def set_trainable_argument(model, trainable):
    """Freeze a model according to the argument `trainable` of its constructor.

    Args:
        model: `keras.Model` with all its layers. (Keras applies the argument before
            there are any.)
        trainable: bool; or dict, as `trainable_argument` returns it.

    Raises:
        ValueError: if it is neither.
    """
    flags = trainable.items() if isinstance(trainable, dict) else [("", trainable)]
    if not all(isinstance(p, str) and isinstance(flag, bool) for p, flag in flags):
        raise ValueError(
            "`trainable` must be a bool, or a dict from paths of layers to bools. "
            f"Received: trainable={quote(trainable)}. Pass one of these."
        )
    if trainable is not True:
        set_trainable(model, trainable)


def trainable_argument(model):
    """Return the argument `trainable` that describes the frozen parts of a model.

    Args:
        model: `keras.Model`.

    Returns:
        bool; or, where parts differ, a dict from the paths of layers (`""` for the
        model itself) to bools.
    """
    parts = trainable_parts(model)
    if not parts:
        return model.trainable
    return parts if model.trainable else {"": False, **parts}


def serialized_routers(model):
    """Return the serialized router of a model, or a list if those of blocks differ.

    Args:
        model: `keras.Model` with `routers`; `None` is returned if there are none.
    """
    found = []
    for router in model.routers.values():
        config = keras.saving.serialize_keras_object(router)
        # It is built for the group size of the configuration, which may differ now.
        config.pop("build_config", None)
        found.append(config)
    if has_factors(model):
        # LoRA has frozen them, and files have kernels without LoRA.
        for config in found:
            config["config"]["trainable"] = True
    if all(config == found[0] for config in found):
        return found[0] if found else None
    return found


# === Dtypes and quantization ===
#
# The entry `quantization` repeats what `dtype` says of quantized layers, because
# `keras_hub.models.Backbone.from_preset` overwrites `dtype`, with `None` by default.


def base_config(model, models_inside=()):
    """Return the arguments of all backbones: name, dtype, frozen and quantized parts.

    KerasHub's takes the default dtype for all that is not quantized.

    Args:
        model: `keras_hub.models.Backbone`.
        models_inside: models with configurations of their own.
    """
    dtype = dtype_config(model, models_inside)
    config = {"name": model.name, "trainable": trainable_argument(model)}
    is_quantized = dtype["class_name"] == "DTypePolicyMap"
    return {
        **config,
        "dtype": dtype,
        **({"quantization": dtype} if is_quantized else {}),
    }


def dtype_config(model, models_inside=()):
    """Return the serialized dtype of a backbone, see `base_config`."""
    inside = {id(layer) for part in models_inside for layer in flatten_layers(part)}
    policies = {
        layer.path: own_policy(layer)
        for layer in flatten_layers(model)
        if layer.quantization_mode and id(layer) not in inside
    }
    dtype = getattr(model.dtype_policy, "default_policy", model.dtype_policy)
    if policies:
        dtype = keras.dtype_policies.DTypePolicyMap(dtype.name, policies)
    return keras.dtype_policies.serialize(dtype)


def with_quantization(config):
    """Return arguments of a backbone with the quantized layers in its `dtype`.

    Args:
        config: dict from `base_config` in which `dtype` may have been replaced, by
            `None` or by the dtype of all that is not quantized.
    """
    config = dict(config)
    kept, dtype = config.pop("quantization", None), config.get("dtype")
    if kept is None:
        return config
    kept = keras.dtype_policies.get(kept)
    dtype = kept.default_policy if dtype is None else keras.dtype_policies.get(dtype)
    if not isinstance(dtype, keras.dtype_policies.DTypePolicyMap):
        policies = {
            path: policy.from_config({**policy.get_config(), "source_name": dtype.name})
            for path, policy in kept.items()
        }
        dtype = keras.dtype_policies.DTypePolicyMap(dtype.name, policies)
    return {**config, "dtype": dtype}


def own_policy(layer):
    """Return the dtype policy of a layer, also where it has that of a whole model."""
    policy = layer.dtype_policy
    is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    return policy[layer.path] if is_map else policy


# === Compilation ===

# Whether a preset is being saved.
IN_PRESET = contextvars.ContextVar("configuration_is_for_a_preset", default=False)


@contextlib.contextmanager
def preset_is_saved():
    """Make configurations those of presets, without the state of an optimizer.

    A model with LoRA is compiled when loaded from a preset, not from other files.
    """
    token = IN_PRESET.set(True)
    try:
        yield
    finally:
        IN_PRESET.reset(token)


def with_compilation(model, config):
    """Add `compile=False` to a task's configuration if its file has no optimizer.

    So it is of a task that was never compiled, and with LoRA: the file has the kernels
    with the factors added, and no state for these.
    """
    if model.compiled and (IN_PRESET.get() or not has_factors(model)):
        return config
    return {**config, "compile": False}


def with_optimizer(model, compile_config, **own):
    """Add to a compile configuration whether the optimizer is built.

    With LoRA it is empty, see `with_compilation`. (Not `None`: Keras compiles the clone
    of a compiled model with it.)

    Args:
        model: task.
        compile_config: dict or `None`, from `keras.Model.get_compile_config`.
        **own: arguments of `compile` for `compile_from_config` alone, not for clones.
    """
    if has_factors(model):
        return {}
    if not compile_config:
        return compile_config
    # Among the optimizer's arguments, where Keras ignores it.
    known = {"is_built": model.optimizer.built, "own": own}
    return {**compile_config, "optimizer": {**compile_config["optimizer"], **known}}


def compile_from_config(self, config):
    """Compile a task as `get_compile_config` describes; a method of tasks."""
    optimizer = config["optimizer"]
    arguments = keras.saving.deserialize_keras_object(config)
    self.compile(**{**arguments, **optimizer.get("own", {})})
    if optimizer.get("is_built", True):
        self.optimizer.build(self.trainable_variables)
