"""The class of models whose MLPs are replaced by experts."""

import copy
import functools
from types import SimpleNamespace

import keras
import keras_hub

from keras_softmoe.architecture import revive_router
from keras_softmoe.keras_adapter.surgery import renew_parameters
from keras_softmoe.models import configuration
from keras_softmoe.models.adaptation import EXPERT_LAYERS, enable_lora, quantize
from keras_softmoe.models.mutable_routing import MutableRouting, recompile_on_change
from keras_softmoe.models.with_experts import copies, replacement
from keras_softmoe.models.with_experts.mlp_sites import (
    check_blocks,
    check_routers,
    find_sites,
    sites_at,
)
from keras_softmoe.models.with_experts.token_shapes import token_shapes


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

    Args:
        model: built `keras.Model`, which becomes a part of this one.
        blocks: sequence of int, as in `add_experts`.
        router: router or list of them.
        sites: `None` for those of a family, or `places_of` all MLPs.
        start: as in `add_experts`.
        moe_settings: dict of further arguments of `layers.MoE`; `by_image` may be a
            list with a bool for each of the blocks.
        name: str or `None`.
        trainable: bool or dict, as in `ViTMoEBackbone`.

    Attributes:
        moe_blocks: tuple of int, the blocks with experts.
        num_blocks: int, number of MLPs in the model, with experts or not.
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
        found = find_sites(model) if sites is None else sites_at(model, sites)
        blocks = check_blocks(blocks, found)
        routers = check_routers(router, blocks)
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
        inner = replacement.inner_backbones(model, found, held)
        layers, in_graph = replacement.put_experts(model, chosen, routers, held)
        inputs, outputs, attributes = replacement.graph_with(model, in_graph)
        # Not that of the class of the dense model, which would create its layers again
        keras_hub.models.Backbone.__init__(
            self, inputs=inputs, outputs=outputs, dtype=model.dtype_policy, name=name
        )
        for attribute, value in attributes.items():
            vars(self).setdefault(attribute, value)
        renew_parameters(self)
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
        policy = self.dtype_policy
        quantization = copies.quantization_of(self)
        config = {
            "name": self.name,
            "trainable": configuration.trainable_argument(self),
            # Not KerasHub's map of policies, which its `from_preset` would drop
            "dtype": keras.dtype_policies.serialize(
                getattr(policy, "default_policy", policy)
            ),
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


# `from_preset` of KerasHub looks up classes by their registered names.
for _source in _backbones_of_keras_hub():
    class_with_experts(_source)
