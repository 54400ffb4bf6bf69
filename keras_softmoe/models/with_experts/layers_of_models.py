"""Layers of changed models, which are described by their model."""

import functools
from types import SimpleNamespace

import keras

from keras_softmoe.keras_adapter.surgery import (
    forget_calls,
    is_functional,
    sublayers,
)
from keras_softmoe.layers import MoE
from keras_softmoe.models.with_experts.mlp_sites import is_of_keras_hub


@keras.saving.register_keras_serializable(package="keras_softmoe")
class LayerOfModel:
    """Mixin of a layer whose configuration is that of its model, and its index there.

    A graph over a model has the layers of the model in it. The configuration of a layer
    of KerasHub does not say that experts have replaced its MLP, and of ViT, DeiT, Swin
    and MiT no layer could be made from it at all: the graph could not be loaded.

    Attributes:
        described_by: namespace with `model` and `index`, which Keras does not track.
    """

    def get_config(self):
        # Of a file that has the model several times Keras makes one object, if each of
        # them has its number: the first one gets it with the second.
        model = keras.saving.serialize_keras_object(self.described_by.model)
        if "shared_object_id" not in model:
            model = keras.saving.serialize_keras_object(self.described_by.model)
        model.pop("compile_config", None)
        return {"name": self.name, "model": model, "index": self.described_by.index}

    @classmethod
    def from_config(cls, config):
        model = keras.saving.deserialize_keras_object(config["model"])
        layer = list(sublayers(model))[config["index"]][1]
        if not isinstance(layer, LayerOfModel):
            # The first one of a model of KerasHub; one with experts did it itself
            describe_layers(model)
        forget_calls(layer)
        return layer


def describe_layers(model):
    """Let the layers of a model be saved in graphs over it.

    Args:
        model: model with experts, or of KerasHub. The classes of layers of KerasHub in
            its graph, and of all layers around experts, become subclasses.
    """
    all_layers = list(sublayers(model))
    parents = {id(layer): parent for _, layer, parent in all_layers}
    around = set()
    for _, layer, parent in all_layers:
        while isinstance(layer, MoE) and parent is not model:
            around.add(id(parent))
            parent = parents[id(parent)]
    for index, (_, layer, parent) in enumerate(all_layers):
        is_in_graph = is_functional(parent) and is_of_keras_hub(layer)
        if not is_functional(layer) and (is_in_graph or id(layer) in around):
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
