"""Layers as PyTorch modules: names of weights, dtypes, `train()`, and quick calls."""

import functools
import warnings

import keras
import torch
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import AutocastScope
from keras.src.backend.torch.layer import TorchLayer

from keras_softmoe.keras_adapter.surgery import named_weights


class Weights(torch.nn.Module):
    """The weights of a layer with all its parts, as parameters of a PyTorch module.

    They are looked up whenever PyTorch asks, since LoRA, quantization and `build`
    change them. Would be replaced by: Keras registering modules, and weights by name.
    """

    def __init__(self, layer):
        super().__init__()
        # Past `__setattr__`, which would make the layer a part of this module.
        vars(self)["layer"] = layer

    @property
    def _parameters(self):
        parts = self.layer._modules.values()
        elsewhere = {id(p) for x in parts if x is not self for p in x.parameters()}
        return {
            name: weight._value
            for name, weight in named_weights(self.layer)
            if weight._value is not None and id(weight._value) not in elsewhere
        }

    @_parameters.setter
    def _parameters(self, value):
        pass

    # Keras adds new weights by path if they are missing, and removes others.
    def __contains__(self, path):
        return True

    def pop(self, path):
        pass

    def named_modules(self, *args, **kwargs):
        # Called by all methods that list parameters
        layer = self.layer
        if not (layer.built or getattr(type(layer).build, "_is_default", False)):
            warnings.warn(
                f"The layer {layer.name!r} has no weights before it is built: an "
                "optimizer that is given its parameters now will not train them. Call "
                "it once, or `layer.build(shape)`, before the optimizer is made.",
                stacklevel=2,
            )
        return super().named_modules(*args, **kwargs)

    def train(self, mode=True):
        for part in self.layer._flatten_layers():
            vars(part).update(training=mode, _is_set_to_train=mode)
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        policy = self.layer.dtype_policy
        kept = getattr(torch, policy.variable_dtype, None)
        for parameter in self._parameters.values():
            example = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            dtype = fn(example).dtype
            if dtype not in (parameter.dtype, kept):
                name = str(dtype).removeprefix("torch.")
                mixed = f" or 'mixed_{name}'" if name.endswith("float16") else ""
                raise ValueError(
                    "A Keras layer computes in the dtype of its policy, which `.to`, "
                    f"`.half` and `.double` do not change. Received: {dtype} for the "
                    f"layer {self.layer.name!r} of dtype={policy.name!r}. Create it "
                    f"with `dtype={name!r}`{mixed}; `.to(device)` moves it."
                )

        def moved(x):
            y = fn(x)
            # Routers are in float32 under every policy.
            return y if y.dtype == x.dtype else x.to(y.device)

        return super()._apply(moved, recurse)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        # Keras has the parameters, too: they are filled and not replaced.
        metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


_OF_KERAS = keras.Layer | Weights | torch.nn.ParameterDict


def register(cls):
    """Let layers of a class, and those around them, list their weights as `Weights`.

    Keras lists the weights of each layer once, by paths: of two weights of equal paths
    one is lost, and LoRA factors are missing. Would be replaced by: as for `Weights`.
    """
    track = TorchLayer._track_variables

    @functools.wraps(track)
    def track_variables(layer):
        if not any(isinstance(part, cls) for part in layer._flatten_layers()):
            track(layer)
            return
        # KerasHub sets it past PyTorch.
        vars(layer).pop("_torch_params", None)
        for name, part in list(layer._modules.items()):
            if isinstance(part, Weights | torch.nn.ParameterDict):
                del layer._modules[name]
            elif all(isinstance(x, _OF_KERAS) for x in part.modules()):
                # Still an attribute, but its weights are listed once
                vars(layer)[name] = layer._modules.pop(name)
        layer._modules["_torch_params"] = Weights(layer)

    TorchLayer._track_variables = track_variables


def is_in_training_mode(layer):
    """Return whether a layer is called without `training` after `.train()`.

    Would be replaced by: Keras taking `training` from PyTorch's flag.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    context = global_state.get_global_attribute("current_call_ctx")
    layers = [layer, context.entry_layer] if context else [layer]
    return any(vars(x).get("_is_set_to_train") for x in layers) and (
        context is None or context.get_value("training") is None
    )


# === Calls of layers inside of other layers ===


def quick(keras_call):
    """Return `Layer.__call__` without the steps that change nothing inside of a call.

    PyTorch runs each call as it comes, and the steps of Keras (conversions, signatures,
    scopes, masks, modules) cost ten times the operators of a small layer. They are left
    out for a built layer that is called with tensors, unless there is a mask to pass
    on, a hook, a distribution, a quantized kernel or rematerialization.
    Would be replaced by: a `Layer.__call__` of Keras that checks for what it needs.
    """

    @functools.wraps(keras_call)
    def call(layer, *args, **kwargs):
        # 1. Is the layer itself one without further steps?
        context = global_state.get_global_attribute("current_call_ctx")
        held, training = vars(layer), kwargs.get("training")
        is_plain = (
            layer.built
            and layer.quantization_mode is None
            and layer._remat_mode is None
            and layer.activity_regularizer is None
            and keras.distribution.distribution() is None
            and layer._call_context_args == {"training"}
            and not held["_forward_hooks"]
            and not held["_forward_pre_hooks"]
            and not held["_backward_hooks"]
            and kwargs.get("mask") is None
            and bool(args)
        )
        for x in kwargs.values():
            # Keras converts arrays, and floats to the dtype of the layer.
            is_tensor = isinstance(x, torch.Tensor) and not x.is_floating_point()
            if not (is_tensor or x is None or isinstance(x, bool | tuple)):
                is_plain = False
        # 2. Tensors: floats in the dtype of the layer, and on the device of Keras
        dtype, tensors = getattr(torch, layer.compute_dtype), []
        for x in args:
            # Keras attaches masks to tensors, which its call passes on.
            has_mask = getattr(x, "_keras_mask", None) is not None
            if has_mask or not isinstance(x, torch.Tensor):
                is_plain = False
            elif context is None:
                x = keras.ops.convert_to_tensor(x)
            if is_plain and layer.autocast and x.dtype != dtype:
                x = x.to(dtype) if x.is_floating_point() else x
            tensors.append(x)
        # 3. `training`: an argument may differ from that of the call around.
        known = context and context.get_value("training")
        differs = training is not None and context and training != known
        if differs or not is_plain:
            return keras_call(layer, *tensors, **kwargs)
        if not layer._call_has_training_arg:
            kwargs.pop("training", None)
        elif known is not None:
            kwargs["training"] = known
        # 4. The dtype of weights in the call, where it is not that of the call around
        scope = global_state.get_global_attribute("autocast_scope")
        if scope is None:
            dtype, scope_dtype = layer.compute_dtype, layer.variable_dtype
        else:
            dtype = layer.compute_dtype if layer.autocast else None
            scope_dtype = scope.dtype
        try:
            if context is None:
                # The outermost call: this also forgets the losses of the last one.
                layer._get_call_context().set_value("training", training)
            if scope_dtype == dtype:
                return layer.call(*tensors, **kwargs)
            with AutocastScope(dtype):
                return layer.call(*tensors, **kwargs)
        finally:
            layer._maybe_reset_call_context()

    return call
