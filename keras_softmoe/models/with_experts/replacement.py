"""Replacement of MLPs by mixtures of experts, in layers and in the graph of a model."""

import contextlib
from types import SimpleNamespace

import keras
import keras_hub

from keras_softmoe.keras_adapter import surgery
from keras_softmoe.models.with_experts.copies import configuration_of
from keras_softmoe.models.with_experts.experts_from_mlps import make_moe
from keras_softmoe.models.with_experts.mlp_sites import check_causal, places_of
from keras_softmoe.models.with_experts.token_shapes import ends


def put_experts(model, sites, routers, held):
    """Replace MLPs by mixtures of experts.

    `sites` and `routers` are dicts from blocks. Returns a dict from blocks to
    `layers.MoE`, and one from the `id` of a layer in the graph of a functional model to
    its replacement.
    """
    layers, in_graph = {}, {}
    images = held.moe_settings.get("by_image")
    images = images if isinstance(images, list) else [images] * len(sites)
    sizes = [x.shape[1:] for x in keras.tree.flatten(ends(model)[0])]
    is_fixed = all(None not in size for size in sizes)
    for (block, site), by_image in zip(sites.items(), images, strict=True):
        is_in_graph = surgery.is_functional(site.parents[0])
        # The names in a graph are unique.
        name = f"{site.parts[0].name}_moe" if is_in_graph else "moe"
        with contextlib.ExitStack() as scopes:
            for part in (site.parents[0].path or "").split("/"):
                if part and not is_in_graph:
                    scopes.enter_context(keras.name_scope(part))
            settings = {**held.moe_settings, "by_image": by_image, "name": name}
            if isinstance(model.dtype_policy, keras.dtype_policies.DTypePolicyMap):
                # From a file of a quantized model: by the paths of its layers
                settings["dtype"] = model.dtype_policy
            shape = held.shapes[block]
            moe = make_moe(routers[block], site.parts, shape, settings, held.start)
        if site.is_causal:
            check_causal(routers[block], site, moe.routes_images)
        if is_fixed:
            moe.token_shape = shape[1:]
        layers[block] = moe
        for index, (part, parent) in enumerate(
            zip(site.parts, site.parents, strict=True)
        ):
            new = moe
            if index:
                new = keras.layers.Identity(dtype=part.compute_dtype, name=part.name)
            if surgery.is_functional(parent):
                in_graph[id(part)] = new
            else:
                surgery.replace_sublayer(parent, part, new)
    return layers, in_graph


def graph_with(model, new):
    """Return the ends of a model and its attributes, after layers were replaced.

    `new` is a dict from the `id` of a layer in the graph to its replacement.
    """
    is_backbone = isinstance(model, keras_hub.models.Backbone)
    attributes = {
        name: value
        for name, value in surgery.attributes_of(model).items()
        if is_backbone or not name.startswith("_")
    }
    if not new:
        return *ends(model), attributes
    # Tensors in attributes, such as the maps of a pyramid, are outputs of the graph.
    tensors = {
        id(x): x
        for x in keras.tree.flatten(attributes)
        if isinstance(x, keras.KerasTensor)
    }
    inputs, outputs = ends(model)
    whole = keras.Model(inputs, [outputs, list(tensors.values())])
    whole = _with_layers(whole, new)
    outputs, made = whole.output
    by_id = {**dict(zip(tensors, made, strict=True)), **new}

    def renewed(value):
        return by_id.get(id(value), value)

    return whole.input, outputs, keras.tree.map_structure(renewed, attributes)


def _with_layers(model, new):
    """Return a functional model with other layers in its graph, see `graph_with`."""

    def clone(layer):
        if id(layer) in new:
            return new[id(layer)]
        inside = surgery.sublayers(layer) if surgery.is_functional(layer) else ()
        if any(id(part) in new for _, part, _ in inside):
            return _with_layers(layer, new)
        return layer

    return keras.models.clone_model(model, clone_function=clone)


def inner_backbones(model, sites, held):
    """Return the backbones inside a model, as SegFormer's has an image encoder.

    Returns `(backbone, namespace)` pairs, where `blocks` is a dict from the blocks of
    the model to those of the backbone.
    """
    found = []
    layers = [
        *surgery.attributes_of(model).values(),
        *(x for _, x, _ in surgery.sublayers(model)),
    ]
    for layer in {id(x): x for x in layers}.values():
        if not isinstance(layer, keras_hub.models.Backbone) or layer is model:
            continue
        inside = {id(part) for _, part, _ in surgery.sublayers(layer)}
        known = [i for i, s in enumerate(sites) if {*map(id, s.parts)} <= inside]
        own = [sites[i] for i in known]
        state = SimpleNamespace(
            **{**vars(held), "dense_config": configuration_of(layer)},
            blocks={block: index for index, block in enumerate(known)},
        )
        state.sites = places_of(layer, own)
        state.dense_weights = [
            w for w in layer.weights if any(w is kept for kept in held.dense_weights)
        ]
        found.append((layer, state))
    return found
