"""The class of models whose MLPs are replaced by experts, in layers and graphs."""

import contextlib
import copy
import functools
from types import SimpleNamespace

import keras
import keras_hub

from keras_softmoe.architecture import revive_router
from keras_softmoe.keras_adapter import surgery
from keras_softmoe.models import configuration
from keras_softmoe.models.adaptation import EXPERT_LAYERS, enable_lora, quantize
from keras_softmoe.models.mutable_routing import MutableRouting, recompile_on_change
from keras_softmoe.models.with_experts import copies, mlp_sites
from keras_softmoe.models.with_experts.experts_from_mlps import OpenGate, make_moe
from keras_softmoe.models.with_experts.token_shapes import ends, token_shapes


class _EqualToSource(type):
    """Metaclass whose classes are equal to the class of the dense model.

    KerasHub compares classes to find the task, preprocessor or tokenizer of a backbone.
    """

    source = None

    def __eq__(cls, other):
        return other is cls or (other is not None and other is cls.source)

    __hash__ = type.__hash__


@keras.saving.register_keras_serializable(package="keras_softmoe")
@recompile_on_change
class ModelWithExperts(
    keras_hub.models.Backbone, MutableRouting, metaclass=_EqualToSource
):
    """A model of another library in which some MLPs are mixtures of experts.

    `add_experts` creates it from a copy: this constructor changes the model it is
    given. For a backbone of KerasHub `class_with_experts` is a subclass of this class
    and of that of the backbone.

    `sites` are `None` for those of a family, or `places_of` all MLPs; `by_image` in
    `moe_settings` may be a list with a bool for each of the blocks. Other arguments are
    as in `add_experts`. `num_blocks` counts the MLPs, with experts or not.
    """

    further_keys = ("quantization",)

    def __init__(
        self,
        model,
        blocks,
        router,
        sites=None,
        start="copies",
        moe_settings=None,
        name=None,
        trainable=True,
    ):
        dense_config = copies.configuration_of(model)
        found = (
            mlp_sites.find_sites(model)
            if sites is None
            else mlp_sites.sites_at(model, sites)
        )
        blocks = mlp_sites.check_blocks(blocks, found)
        routers = mlp_sites.check_routers(router, blocks)
        moe_settings = dict(moe_settings or {})
        chosen = {block: found[block] for block in blocks}
        parts = [part for site in chosen.values() for part in site.parts]
        old = {id(weight) for part in parts for weight in part.weights}
        held = SimpleNamespace(
            dense_config=dense_config,
            # Those that are not in MLPs with experts
            dense_weights=[None if id(w) in old else w for w in model.weights],
            sites=sites,
            shapes=token_shapes(model, chosen),
            start=start,
            moe_settings=moe_settings,
        )
        tracked = {id(weight) for weight in model.weights}
        inner = _inner_backbones(model, found, held)
        layers, in_graph = _put_experts(model, chosen, routers, held)
        inputs, outputs, attributes = _graph_with(model, in_graph)
        # Not that of the class of the dense model, which would create its layers again
        keras_hub.models.Backbone.__init__(
            self, inputs=inputs, outputs=outputs, dtype=model.dtype_policy, name=name
        )
        own = {id(weight) for weight in self.weights}
        for attribute, value in attributes.items():
            further = value.weights if isinstance(value, keras.Layer) else ()
            further = {id(weight) for weight in further} - own
            if attribute not in vars(self) and further & tracked:
                # SAM's mask decoder: no part of the graph, and tracked by Keras
                setattr(self, attribute, value)
            vars(self).setdefault(attribute, value)
        surgery.renew_parameters(self)
        if trainable is not True:
            configuration.set_trainable_argument(self, trainable)
        # In an object that Keras does not track
        held.layers = layers
        self.held = held
        self.moe_blocks = blocks
        self.num_blocks = len(found)
        for backbone, state in inner:
            _adopt(backbone, state, layers)
        copies.describe_layers(self)

    @property
    def moe_layers(self):
        """Dict from each block with experts to its `layers.MoE`."""
        return self.held.layers

    @property
    def routers(self):
        """Dict from each block with experts to its router."""
        return {block: moe.router for block, moe in self.held.layers.items()}

    @property
    def router(self):
        """The router of the first block with experts."""
        return next(iter(self.routers.values()))

    @property
    def group_images(self):
        """Int, images that are routed together; `None` for the whole batch."""
        return next(iter(self.held.layers.values())).group_images

    enable_lora, quantize = enable_lora, quantize

    def default_lora_layer_names(self):
        """Return names of layers for `enable_lora`: KerasHub's and those of experts."""
        return [*super().default_lora_layer_names(), *EXPERT_LAYERS]

    def get_config(self):
        policy = getattr(self.dtype_policy, "default_policy", self.dtype_policy)
        quantization = copies.quantization_of(self)
        config = {
            "name": self.name,
            "trainable": configuration.trainable_argument(self),
            # Not KerasHub's map of policies, which its `from_preset` would drop
            "dtype": keras.dtype_policies.serialize(policy),
            **({"quantization": quantization} if quantization else {}),
            "model": self.held.dense_config,
            "blocks": list(self.moe_blocks),
            "router": configuration.serialized_routers(self),
            "sites": self.held.sites,
            "start": self.held.start,
            "moe_settings": {
                **self.held.moe_settings,
                "group_images": self.group_images,
                "by_image": [moe.routes_images for moe in self.held.layers.values()],
            },
        }
        # Keras takes parts out of a configuration while it makes an object of it.
        return copy.deepcopy(config)

    @classmethod
    def from_config(cls, config):
        config = copy.deepcopy(config)
        model = config["model"]
        dtype, quantization = config.pop("dtype", None), config.pop("quantization", ())
        if isinstance(model, dict):
            if dtype is not None and "dtype" in model["config"]:
                dtype = keras.dtype_policies.serialize(keras.dtype_policies.get(dtype))
                model["config"]["dtype"] = dtype
            model = keras.saving.deserialize_keras_object(model)
        router = revive_router(config["router"])
        cls = class_with_experts(type(model))
        sparse = cls(**{**config, "model": model, "router": router})
        copies.quantize_as(sparse, quantization)
        return sparse


@functools.cache
def class_with_experts(source):
    """Return the subclass of `ModelWithExperts` for models of a class.

    It is a subclass of `source`, too, if that is a backbone of KerasHub.
    """
    if issubclass(source, ModelWithExperts):
        return source
    if not issubclass(source, keras_hub.models.Backbone):
        return ModelWithExperts
    name = f"{source.__name__}WithExperts"
    doc = f"A `{source.__name__}` in which some MLPs are mixtures of experts."
    members = {"source": source, "__module__": __name__, "__doc__": doc}
    cls = _EqualToSource(name, (ModelWithExperts, source), members)
    # Another process knows the classes of KerasHub only. All others are serialized
    # under the name of the base class, which finds them.
    is_known = source in _backbones_of_keras_hub()
    register = keras.saving.register_keras_serializable(
        package="keras_softmoe", name=name if is_known else ModelWithExperts.__name__
    )
    register(cls)
    if not is_known:
        register(ModelWithExperts)
    return cls


def _backbones_of_keras_hub():
    base = keras_hub.models.Backbone
    known = (x for x in vars(keras_hub.models).values() if isinstance(x, type))
    return [x for x in known if issubclass(x, base) and x is not base]


def _adopt(backbone, held, layers):
    """Make a backbone whose layers have been changed a `ModelWithExperts`."""
    blocks = {b: index for b, index in held.blocks.items() if b in layers}
    if blocks:
        held.layers = {index: layers[block] for block, index in blocks.items()}
        held.shapes = {index: held.shapes[block] for block, index in blocks.items()}
        backbone.__class__ = class_with_experts(type(backbone))
        backbone.held = held
        backbone.moe_blocks = tuple(sorted(held.layers))
        backbone.num_blocks = len(held.blocks)


def _put_experts(model, sites, routers, held):
    """Replace MLPs by mixtures of experts, where `sites` and `routers` are by block.

    Returns a dict from blocks to `layers.MoE`, and one from the `id` of a layer in the
    graph to its replacement.
    """
    layers, in_graph = {}, {}
    images = held.moe_settings.get("by_image")
    images = images if isinstance(images, list) else [images] * len(sites)
    sizes = [x.shape[1:] for x in keras.tree.flatten(ends(model)[0])]
    is_fixed = all(None not in size for size in sizes)
    for (block, site), by_image in zip(sites.items(), images, strict=True):
        is_in_graph = isinstance(site.parents[0], surgery.FUNCTIONAL)
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
            moe = make_moe(routers[block], site, shape, settings, held.start)
        if site.is_causal:
            mlp_sites.check_causal(routers[block], site, moe.routes_images)
        if is_fixed:
            moe.token_shape = shape[1:]
        layers[block] = moe
        pairs = zip(site.parts, site.parents, strict=True)
        for index, (part, parent) in enumerate(pairs):
            new = moe
            if index == 0 and site.gate is not None:
                new = OpenGate(site.gate, name=part.name)
            elif index != (site.gate is not None):
                new = keras.layers.Identity(dtype=part.compute_dtype, name=part.name)
            if isinstance(parent, surgery.FUNCTIONAL):
                in_graph[id(part)] = new
            else:
                surgery.replace_sublayer(parent, part, new)
    return layers, in_graph


def _graph_with(model, new):
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
    held = keras.tree.flatten(attributes)
    tensors = {id(x): x for x in held if isinstance(x, keras.KerasTensor)}
    inputs, outputs = ends(model)
    whole = keras.Model(inputs, [outputs, list(tensors.values())])
    whole = _with_layers(whole, new)
    outputs, made = whole.output
    by_id = {**dict(zip(tensors, made, strict=True)), **new}
    renewed = keras.tree.map_structure(lambda x: by_id.get(id(x), x), attributes)
    return whole.input, outputs, renewed


def _with_layers(model, new):
    """Return a functional model with other layers in its graph, see `_graph_with`."""

    def clone(layer):
        if id(layer) in new:
            return new[id(layer)]
        inside = (
            surgery.sublayers(layer) if isinstance(layer, surgery.FUNCTIONAL) else ()
        )
        if any(id(part) in new for _, part, _ in inside):
            return _with_layers(layer, new)
        return layer

    return keras.models.clone_model(model, clone_function=clone)


def _inner_backbones(model, sites, held):
    """Return the backbones inside a model, as SegFormer's has an image encoder.

    Returns `(backbone, namespace)` pairs, where `blocks` is a dict from the blocks of
    the model to those of the backbone.
    """
    found = []
    inside = (layer for _, layer, _ in surgery.sublayers(model))
    layers = [*surgery.attributes_of(model).values(), *inside]
    for layer in {id(x): x for x in layers}.values():
        if not isinstance(layer, keras_hub.models.Backbone) or layer is model:
            continue
        inside = {id(part) for _, part, _ in surgery.sublayers(layer)}
        known = [i for i, s in enumerate(sites) if {*map(id, s.parts)} <= inside]
        own = [sites[i] for i in known]
        state = SimpleNamespace(
            **{**vars(held), "dense_config": copies.configuration_of(layer)},
            blocks={block: index for index, block in enumerate(known)},
        )
        state.sites = mlp_sites.places_of(layer, own)
        state.dense_weights = [
            w for w in layer.weights if any(w is kept for kept in held.dense_weights)
        ]
        found.append((layer, state))
    return found


# `from_preset` of KerasHub looks up classes by their registered names.
for _source in _backbones_of_keras_hub():
    class_with_experts(_source)
