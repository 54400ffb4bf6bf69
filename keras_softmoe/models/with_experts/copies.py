"""Configurations and copies of models from other libraries, and of their layers."""

import functools
from types import SimpleNamespace

import keras

from keras_softmoe.keras_adapter import surgery
from keras_softmoe.keras_adapter.layers import quick_garbage_collection
from keras_softmoe.layers import MoE
from keras_softmoe.models.configuration import own_policy
from keras_softmoe.models.with_experts.mlp_sites import is_of_keras_hub


def copy_of(model):
    """Return a new model with the configuration and the weights of a model."""
    try:
        config = configuration_of(model)
        # The user's own objects, not those of a file
        copy = keras.saving.deserialize_keras_object(config, safe_mode=False)
        shapes = [[tuple(w.shape) for w in m.weights] for m in (model, copy)]
        if shapes[0] != shapes[1]:
            raise ValueError("it has other weights")
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            "The model is copied from its configuration and its weights. Received: a "
            f"`{type(model).__name__}` that cannot be copied: {error}. A class of your "
            "own needs `get_config` and `keras.saving.register_keras_serializable`; "
            "merge LoRA factors first, and add experts before `quantize`."
        ) from error
    copy.set_weights(model.get_weights())
    for name, part in surgery.attributes_of(model).items():
        # On PyTorch Keras does not know SAM's mask decoder as a part of its backbone.
        if isinstance(part, keras.Layer) and hasattr(copy, name):
            getattr(copy, name).set_weights(part.get_weights())
    # Not by their names, which KerasHub derives from that of the model
    old, new = ([m, *(x for _, x, _ in surgery.sublayers(m))] for m in (model, copy))
    for source, layer in zip(old, new, strict=True):
        if layer.trainable != source.trainable:
            layer.trainable = source.trainable
    return copy


def configuration_of(model):
    """Return the serialized form of a model, without its compilation."""
    config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    return config


def task_with(task, backbone):
    """Return a copy of a KerasHub task with another backbone and the same head."""
    # Not a copy of the preprocessor, whose tokenizer would lack its vocabulary
    parts = {"backbone": backbone, "preprocessor": task.preprocessor}
    copy = type(task).from_config({**task.get_config(), **parts})
    heads = []
    for model in (task, copy):
        of_backbone = {id(weight) for weight in model.backbone.weights}
        heads.append([w for w in model.weights if id(w) not in of_backbone])
    for old, new in zip(*heads, strict=True):
        # Not the array itself, which JAX deletes when the copy is trained
        new.assign(keras.ops.convert_to_numpy(old))
    return copy


def quantization_of(model):
    """Return pairs of index among all layers and policy, of quantized ones."""
    return [
        [index, keras.dtype_policies.serialize(own_policy(layer))]
        for index, (_, layer, _) in enumerate(surgery.sublayers(model))
        if layer.quantization_mode
    ]


def quantize_as(model, quantization):
    """Quantize the layers that `quantization_of` has named in an equal model."""
    layers = [layer for _, layer, _ in surgery.sublayers(model)]
    with quick_garbage_collection():
        for index, policy in quantization:
            policy, config = keras.dtype_policies.get(policy), None
            if isinstance(policy, keras.dtype_policies.Int4DTypePolicy):
                size = policy.block_size
                config = keras.quantizers.Int4QuantizationConfig(block_size=size)
            layers[index].quantize(policy.quantization_mode, config=config)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LayerOfModel:
    """Mixin of a layer whose configuration is that of its model, and its index there.

    So a graph over a model with experts can be loaded. `described_by` is a namespace
    with `model` and `index`, which Keras does not track.
    """

    def get_config(self):
        # Keras creates a model that a file holds several times once, if each of them
        # has its number: the first one gets it with the second.
        model = keras.saving.serialize_keras_object(self.described_by.model)
        if "shared_object_id" not in model:
            model = keras.saving.serialize_keras_object(self.described_by.model)
        model.pop("compile_config", None)
        return {"name": self.name, "model": model, "index": self.described_by.index}

    @classmethod
    def from_config(cls, config):
        model = keras.saving.deserialize_keras_object(config["model"])
        layer = list(surgery.sublayers(model))[config["index"]][1]
        if not isinstance(layer, LayerOfModel):
            # The first one of a model of KerasHub; one with experts did it itself
            describe_layers(model)
        surgery.forget_calls(layer)
        return layer


def describe_layers(model):
    """Let the layers of a model be saved in graphs over it, by subclasses of theirs."""
    all_layers = list(surgery.sublayers(model))
    parents = {id(layer): parent for _, layer, parent in all_layers}
    around = set()
    for _, layer, parent in all_layers:
        while isinstance(layer, MoE) and parent is not model:
            around.add(id(parent))
            parent = parents[id(parent)]
    for index, (_, layer, parent) in enumerate(all_layers):
        is_in_graph = isinstance(parent, surgery.FUNCTIONAL) and is_of_keras_hub(layer)
        if not isinstance(layer, surgery.FUNCTIONAL) and (
            is_in_graph or id(layer) in around
        ):
            layer.described_by = SimpleNamespace(model=model, index=index)
            layer.__class__ = _described_by_model(type(layer))


@functools.cache
def _described_by_model(source):
    """Return the subclass of a class of layers with the mixin above."""
    if issubclass(source, LayerOfModel):
        return source
    members = {"__module__": __name__, "__doc__": source.__doc__}
    cls = type(source.__name__, (LayerOfModel, source), members)
    # All are serialized under the name of the mixin, which any process knows.
    register = keras.saving.register_keras_serializable(
        package="keras_softmoe", name=LayerOfModel.__name__
    )
    register(cls)
    register(LayerOfModel)
    return cls
