"""Copies of models of somebody else."""

import keras

from keras_softmoe.keras_adapter.layers import quick_garbage_collection
from keras_softmoe.keras_adapter.surgery import sublayers
from keras_softmoe.models.configuration import own_policy


def copy_of(model):
    """Return a new model with the configuration and the weights of a model.

    Raises:
        ValueError: if it cannot be made from its configuration.
    """
    try:
        config = configuration_of(model)
        # The user's own objects, not those of a file
        copy = keras.saving.deserialize_keras_object(config, safe_mode=False)
        shapes = [[tuple(w.shape) for w in m.weights] for m in (model, copy)]
        reason = None if shapes[0] == shapes[1] else "it has other weights"
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        shapes, reason = None, error
    if reason is not None:
        raise ValueError(
            "The model is copied from its configuration and its weights. Received: a "
            f"`{type(model).__name__}` of which that cannot be done: {reason}. A class "
            "of your own needs `get_config` and "
            "`keras.saving.register_keras_serializable`; merge LoRA factors first, and "
            "add experts before `quantize`."
        ) from (reason if isinstance(reason, Exception) else None)
    copy.set_weights(model.get_weights())
    # Not by their names, which KerasHub derives from that of the model
    pairs = zip(sublayers(model), sublayers(copy), strict=True)
    for old, new in ((model, copy), *((old[1], new[1]) for old, new in pairs)):
        if new.trainable != old.trainable:
            new.trainable = old.trainable
    return copy


def configuration_of(model):
    """Return the serialized form of a model, without its compilation."""
    config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    return config


def task_with(task, backbone):
    """Return a copy of a KerasHub task with another backbone and the same head."""
    copy = type(task).from_config({**task.get_config(), "backbone": backbone})
    heads = []
    for model in (task, copy):
        of_backbone = {id(weight) for weight in model.backbone.weights}
        heads.append([w for w in model.weights if id(w) not in of_backbone])
    for old, new in zip(*heads, strict=True):
        new.assign(old)
    return copy


def quantization_of(model):
    """Return a list with the place among all layers and the policy of quantized ones.

    Not the paths: a model may have several layers of one path, and some names in a
    model of somebody else are new in each copy.
    """
    layers = enumerate(layer for _, layer, _ in sublayers(model))
    return [
        [index, keras.dtype_policies.serialize(own_policy(layer))]
        for index, layer in layers
        if layer.quantization_mode
    ]


def quantize_as(model, quantization):
    """Quantize the layers that `quantization_of` has named in an equal model."""
    layers = [layer for _, layer, _ in sublayers(model)]
    with quick_garbage_collection():
        for index, policy in quantization:
            policy, config = keras.dtype_policies.get(policy), None
            if isinstance(policy, keras.dtype_policies.Int4DTypePolicy):
                size = policy.block_size
                config = keras.quantizers.Int4QuantizationConfig(block_size=size)
            layers[index].quantize(policy.quantization_mode, config=config)
