"""LoRA and quantization of whole models."""

import warnings

import keras
import keras_hub

from keras_softmoe.checks import did_you_mean, quote
from keras_softmoe.keras_adapter.layers import (
    flatten_layers,
    forget_adapted_layers,
    is_quantized_under,
    quick_garbage_collection,
)
from keras_softmoe.layers import expert_bank
from keras_softmoe.layers.template_experts import TemplateExperts

# Layers that `enable_lora` adapts by default, besides those of KerasHub
EXPERT_LAYERS = ("intermediate_dense", "gate_dense", "output_dense")


def merge_lora(model: keras.Model) -> list:
    """Fold the factors of LoRA into the kernels, in all layers of a model.

    The outputs stay the same. Weights that `enable_lora` froze stay frozen, apart from
    the kernels that had factors. Compile the model again before further training, and
    merge before you quantize: in int8 the sums are rounded.

    Args:
        model: `keras.Model` or `keras.Layer`.

    Returns:
        list of str, the paths of the layers that had factors.

    Examples:
        >>> model = ksm.models.ViTMoEBackbone((32, 32, 3), 8, 1, 2, 32, 64)
        >>> model.enable_lora(4)  # and train it
        >>> ksm.models.merge_lora(model)
    """
    layers = flatten_layers(model)
    adapted = [layer for layer in layers if getattr(layer, "lora_enabled", False)]
    with quick_garbage_collection():
        for layer in adapted:
            expert_bank.merge_lora(layer)
    for layer in layers:
        forget_adapted_layers(layer)
        if adapted and isinstance(layer, keras.Model):
            # On TensorFlow these are compiled with the factors.
            layer.train_function = layer.test_function = layer.predict_function = None
    return [layer.path for layer in adapted]


def enable_lora(self, rank, target_layer_names=None):
    """Freeze the weights, and add factors to some layers; a method of backbones.

    Raises:
        ValueError: if no such layer takes factors, or some have them. None is frozen.
    """
    if has_factors(self):
        raise ValueError(
            "The model has factors of LoRA already. Received: enable_lora for "
            f"{self.name!r} a second time. Call `ksm.models.merge_lora(model)` first."
        )
    layers = [x for x in flatten_layers(self) if x is not self and x.weights]
    known = self.default_lora_layer_names()
    names = known if target_layer_names is None else target_layer_names
    accepted = [
        x.name
        for x in layers
        if hasattr(x, "enable_lora") and not isinstance(x, TemplateExperts)
    ]
    unknown = [name for name in names if name not in (*accepted, *known)]
    if unknown or not set(names) & set(accepted):
        accepted = list(dict.fromkeys(accepted))
        raise ValueError(
            "`target_layer_names` must be names of layers that have factors of LoRA, "
            f"here {', '.join(accepted) or 'none'}.{did_you_mean(unknown, accepted)} "
            f"Received: target_layer_names={quote(names)}."
        )
    experts = [x.path for x in layers if isinstance(x, TemplateExperts)]
    if experts and target_layer_names is None:
        warnings.warn(
            "Experts of any layer have no factors of LoRA, and are frozen now like all "
            "other weights; `layer.trainable = True` trains them, and "
            "`target_layer_names` avoids this warning. Received: "
            f"enable_lora for {', '.join(experts[:8])}.",
            stacklevel=2,
        )
    keras_hub.models.Backbone.enable_lora(self, rank, names)


def has_factors(model):
    """Return whether a layer of a model has factors of LoRA."""
    layers = flatten_layers(model)
    return any(getattr(layer, "lora_enabled", False) for layer in layers)


def quantize(self, mode=None, config=None, filters=None, **kwargs):
    """Quantize the weights, as `keras.Model.quantize`; a method of all models."""
    head = getattr(self, "output_dense", None)
    is_int4 = "int4" in (mode, getattr(config, "mode", None))
    if filters is None and head is not None and is_int4:

        def filters(layer):
            return layer is not head

    for layer in flatten_layers(self):
        is_bank = isinstance(layer, expert_bank.ExpertBank | TemplateExperts)
        if is_bank and is_quantized_under(filters, layer):
            layer.check_quantization(mode, config)
    with quick_garbage_collection():
        keras.Model.quantize(self, mode, config=config, filters=filters, **kwargs)
