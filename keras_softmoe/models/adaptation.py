"""LoRA and quantization of whole models."""

import warnings

import h5py
import keras
import keras_hub

from keras_softmoe.checks import did_you_mean, quote
from keras_softmoe.keras_adapter.layers import (
    flatten_layers,
    forget_adapted_layers,
    is_quantized_under,
    quick_garbage_collection,
)
from keras_softmoe.layers.expert_bank import (
    ExpertBank,
    merge_lora as merge_lora_of_layer,
)
from keras_softmoe.layers.template_experts import TemplateExperts


def merge_lora(model: keras.Model) -> list:
    """Fold the factors of LoRA into the kernels, in all layers of a model.

    The outputs stay the same, and the layers are ordinary ones again, expert banks and
    those of Keras. Files hold the sum anyway.

    Weights that `enable_lora` froze stay frozen, apart from the kernels that had
    factors. To unfreeze all of them, set `model.trainable = False` and then `True`
    (TensorFlow ignores a value that is set already). Compile the model again before
    further training, and a model of your own around it before any use. Merge before
    you quantize: in int8 and int4 the sums are rounded, which removes small changes.

    Args:
        model: `keras.Model` or `keras.Layer`.

    Returns:
        list of str, the paths of the layers that had factors.

    Examples:
        >>> model = ksm.models.ViTMoEBackbone((32, 32, 3), 8, 1, 2, 32, 64)
        >>> model.enable_lora(
        ...     4
        ... )  # then train it, for example with `fit` of a classifier
        >>> ksm.models.merge_lora(model)
    """
    layers = flatten_layers(model)
    adapted = [layer for layer in layers if getattr(layer, "lora_enabled", False)]
    with quick_garbage_collection():
        for layer in adapted:
            merge_lora_of_layer(layer)
    for layer in layers:
        forget_adapted_layers(layer)
        if adapted and isinstance(layer, keras.Model):
            # On TensorFlow these are compiled with the factors.
            layer.train_function = layer.test_function = layer.predict_function = None
    return [layer.path for layer in adapted]


def enable_lora(self, rank, target_layer_names=None):
    """Freeze the weights, and add factors to some layers; a method of backbones.

    As `keras_hub.models.Backbone.enable_lora`, which passes over names that no layer
    has, and experts that take no factors. `rank` is an int, `target_layer_names` a list
    of str, or `None` for `default_lora_layer_names()`.

    Raises:
        ValueError: if no layer of such a name takes factors, or some have factors
            already. Nothing is frozen then.
    """
    if has_factors(self):
        raise ValueError(
            "The model has factors of LoRA already, which would be frozen now. "
            f"Received: enable_lora for {self.name!r} a second time. Fold them into "
            "the kernels before, with `ksm.models.merge_lora(model)`."
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
            "`target_layer_names` is a list of names of layers that take factors of "
            f"LoRA.{did_you_mean(unknown, accepted)} Received: target_layer_names="
            f"{quote(names)}. Take some of: {', '.join(accepted) or 'none here'}."
        )
    experts = [x.path for x in layers if isinstance(x, TemplateExperts)]
    if experts and target_layer_names is None:
        warnings.warn(
            "Experts of any layer take no factors of LoRA, and are frozen now as all "
            f"other weights are. Received: enable_lora for {', '.join(experts[:8])}. "
            "Train them with `layer.trainable = True`, use `layers.MoE(router, "
            "mlp_dim=...)`, or pass `target_layer_names` without this warning.",
            stacklevel=2,
        )
    keras_hub.models.Backbone.enable_lora(self, rank, names)


def has_factors(model):
    """Whether a layer of a model has factors of LoRA."""
    layers = flatten_layers(model)
    return any(getattr(layer, "lora_enabled", False) for layer in layers)


def quantize(self, mode=None, config=None, filters=None, **kwargs):
    """Quantize the weights, as `keras.Model.quantize`; a method of all models.

    A mode that experts do not support is refused before any layer changes. In int4
    the head of a classifier keeps its precision, unless there are `filters`: it is
    small, and its rounding alone cost 9 to 17 points of accuracy on digits.
    """
    mode_of_config = getattr(config, "mode", None)
    head = getattr(self, "output_dense", None)
    if filters is None and head is not None and "int4" in (mode, mode_of_config):

        def filters(layer):
            return layer is not head

    for layer in flatten_layers(self):
        is_bank = isinstance(layer, ExpertBank | TemplateExperts)
        if is_bank and is_quantized_under(filters, layer):
            layer.check_quantization(mode, config)
    with quick_garbage_collection():
        return keras.Model.quantize(
            self, mode, config=config, filters=filters, **kwargs
        )


def check_lora_file(model, filepath):
    """Raise if experts share their second LoRA factor in a file.

    Args:
        model: `keras_hub.models.Backbone`.
        filepath: str or path, as `save_lora_weights` writes it.

    Raises:
        ValueError: if the file is of an early version, which had one factor for all
            experts.
    """
    # KerasHub counts them like this.
    layers = [x for x in flatten_layers(model) if x is not model and x.weights]
    with h5py.File(filepath, "r") as file:
        for index, layer in enumerate(layers):
            factor = file.get(f"lora/{index}/vars/lora_kernel_b")
            if (
                isinstance(layer, ExpertBank)
                and len(getattr(factor, "shape", "EDH")) < 3
            ):
                raise ValueError(
                    "The file is of an early version, in which all experts share "
                    "the second LoRA factor. Received: shape="
                    f"{tuple(factor.shape)} for {layer.path!r} in '{filepath}', not "
                    "(experts, rank, units). Train the factors again; or, with the "
                    "version that wrote the file, save the model with its merged "
                    "weights (`save_to_preset`), and load that."
                )
