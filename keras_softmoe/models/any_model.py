"""Experts in the models of other libraries."""

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import keras
import keras_hub

from keras_softmoe.architecture import Mixture, revive_router
from keras_softmoe.backbones import (
    MutableRouting,
    enable_lora,
    quantize,
    recompile_on_change,
    serialized_routers,
    set_trainable_argument,
    trainable_argument,
)
from keras_softmoe.checks import check_bools, check_choice, check_names, quote
from keras_softmoe.keras_adapter.layers import register_parameters
from keras_softmoe.keras_adapter.surgery import (
    attributes_of,
    is_functional,
    renew_parameters,
    replace_sublayer,
    sublayers,
)
from keras_softmoe.models._copies import (
    configuration_of,
    copy_of,
    quantization_of,
    quantize_as,
    task_with,
)
from keras_softmoe.models._expert_banks import make_moe
from keras_softmoe.models._sites import (
    check_blocks,
    check_causal,
    check_free,
    check_model,
    find_sites,
    keeps_outputs,
    places_of,
    sites_at,
)
from keras_softmoe.models.layers_of_models import describe_layers
from keras_softmoe.models.shapes import check_sites, ends, token_shapes
from keras_softmoe.routers import Router

_OTHER_OUTPUTS = (
    "The outputs are not those of the model before it is trained: the router may leave "
    "out tokens, mix them, or scale them by gates that do not sum to one. With "
    "`capacity_factor=None, normalize_gates=True` of a `SoftmaxTokenChoiceRouter`, or "
    'with `start="shared"`, they are.'
)


def add_experts(
    model: keras.Model,
    blocks: Sequence,
    router: Router | Sequence[Router],
    sites: Callable | Sequence | None = None,
    start: str = "copies",
    verbose: int = 1,
    **moe_settings,
) -> keras.Model:
    """Give a model of somebody else experts, which begin as copies of its MLPs.

    The MLPs of some blocks become `layers.MoE` with new routers; all else is copied.
    With room for all choices and gates that sum to one (`normalize_gates=True` and
    `capacity_factor=None`) the new model computes the same at first; see `upcycle` for
    other routers. The model that is passed in stays as it is.

    Known are these families of KerasHub, alone or as the backbone of a task: ViT, DeiT,
    DINOv2 (both kinds of MLP), DINOv3, SigLIP, CLIP, MetaCLIP 2, Swin, MiT, VideoPrism,
    ViTDet (SAM), BERT and others made of `TransformerEncoder` or `TransformerDecoder`.
    In any other model `sites` names the MLPs.

    An MLP of dense layers with biases and an activation of Keras, gated or not, becomes
    a bank of experts like those of `upcycle`, which is fast and takes LoRA and int8.
    Any other is the template of the experts, see `layers.MoE(router, expert=...)`. If
    it computes a token from others, too, as the convolution in MiT's does, whole images
    are routed: with a router of limited capacity, give `group_images`.

    Args:
        model: built `keras.Model` that can be made again from its configuration: a
            backbone or task of KerasHub, a functional model, or a registered one. Its
            weights are copied, so both models are in memory.
        blocks: sequence of int, the MLPs that get experts, counted from 0 in the order
            of the model.
        router: a router from `keras_softmoe.routers`, a template; or a list of them,
            one for each of those blocks.
        sites: the MLPs of a model of an unknown family. A predicate, called with each
            layer; or a sequence with names of layers (`"mlp"`), or paths with `*`
            (`"encoder/block_*/mlp"`). An MLP whose parts a block keeps in several
            places is a tuple of them, in the order of their application:
            `[("dense_1", "activation", "dense_2")]`.
        start: `"copies"`; or `"shared"`, where the MLP is kept as a shared expert and
            the output layers of the others are zero: the model then computes the same
            at first with any router. It takes an MLP that becomes a bank.
        verbose: 0 or 1, whether to print how many MLPs were found and changed, and
            whether the router changes the outputs.
        **moe_settings: other arguments of `layers.MoE`, such as `group_images` and
            `dispatcher`, with its defaults. Only `by_image` is true by default for MLPs
            that compute a token from others, too.

    Returns:
        A `keras_hub.models.Backbone` with the inputs and outputs of the model, which
        has `moe_blocks`, `num_blocks` and `routers`, and `set_routing` as in
        `ViTMoEBackbone`. It is saved as any model, and can be the backbone of a task.
        Of a task, a task of the same class with such a backbone.

    Raises:
        ValueError: if no MLP is found (the message lists layers that might be meant), a
            block does not exist or has experts already, the router does not fit, it or
            `by_image` looks at later tokens in a causal decoder, an MLP needs whole
            images, or the model is one of this library or cannot be copied. Nothing is
            changed then.

    A text model whose inputs have no fixed length routes texts of the length they are
    given; on TensorFlow a compiled step needs a length, so pad texts to one. Padding is
    routed like text, because the blocks of KerasHub do not pass their mask to the MLP.

    Source: Komatsuzaki et al. 2023 (Sparse Upcycling), section 3.

    Examples:
        >>> import keras_hub
        >>> vit = keras_hub.models.ViTBackbone(
        ...     image_shape=(32, 32, 3),
        ...     patch_size=8,
        ...     num_layers=2,
        ...     num_heads=2,
        ...     hidden_dim=16,
        ...     mlp_dim=32,
        ... )
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(
        ...     4, num_selected_experts=2, capacity_factor=None, normalize_gates=True
        ... )
        >>> sparse = ksm.converters.add_experts(vit, blocks=(1,), router=router)
        Experts in 1 of 2 MLPs of 'vi_t_backbone': 1.
        >>> sparse.routers[1].num_experts
        4
    """
    accepted = [name for name in Mixture.names() if name != "shared_mlp_dim"]
    check_names("`add_experts`", moe_settings, [*accepted, "by_image"])
    by_image = moe_settings.get("by_image")
    if by_image is not None:
        check_bools(by_image=by_image)
    check_choice("start", start, ("copies", "shared"))
    check_model(model)
    if isinstance(model, keras_hub.models.Task):
        backbone = add_experts(
            model.backbone, blocks, router, sites, start, verbose, **moe_settings
        )
        return task_with(model, backbone)
    found = find_sites(model, sites)
    blocks = check_blocks(blocks, found)
    routers = check_routers(router, blocks)
    check_free([found[block] for block in blocks])
    for block in blocks:
        check_causal(routers[block], found[block], by_image)
    if sites is not None:
        check_sites(model, [found[block] for block in blocks])
    known = None if sites is None else places_of(model, found)
    sparse = class_with_experts(type(model))(
        copy_of(model), blocks, router, known, start, moe_settings, name=model.name
    )
    if verbose:
        kept = start == "shared" or all(map(keeps_outputs, routers.values()))
        print(
            f"Experts in {len(blocks)} of {len(found)} MLPs of {model.name!r}: "
            f"{', '.join(map(str, blocks))}.",
            *([] if kept else [_OTHER_OUTPUTS]),
        )
    return sparse


def check_routers(router, blocks):
    """Return a dict from blocks to (templates of) their routers."""
    is_list = isinstance(router, list | tuple)
    routers = list(router) if is_list else [router] * len(blocks)
    for one in routers:
        if not isinstance(one, Router):
            raise ValueError(
                "`router` must be a router from `keras_softmoe.routers`, or a list of "
                f"them. Received: router={quote(one)}."
            )
        if one.knows_modalities:
            raise ValueError(
                "A router of two modalities belongs to a `LIMoEBackbone`: here all "
                f"tokens are of one kind. Received: router={quote(one)}. Take "
                "`SoftmaxTokenChoiceRouter`, for example."
            )
    if len(routers) != len(blocks):
        raise ValueError(
            "A list of routers has one for each block with experts. Received: "
            f"{len(routers)} routers for blocks={blocks}. Give as many, or one for all."
        )
    return dict(zip(blocks, routers, strict=True))


# === The model with experts ===


class _EqualToSource(type):
    """Class of classes that are equal to the class of the dense model.

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

    `add_experts` makes it from a copy: this constructor changes the model it is given.
    A model made of a backbone of KerasHub has a subclass of this class and of that of
    the backbone (`class_with_experts`), with its attributes, properties and methods.

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
        num_blocks: int, how many MLPs the model has, with experts or not.
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
        dense_config = configuration_of(model)
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
        inner = _inner_backbones(model, found, held)
        layers, in_graph = _put_experts(model, chosen, routers, held)
        inputs, outputs, attributes = _graph_with(model, in_graph)
        # Not that of the class of the dense model, which would make its layers anew
        keras_hub.models.Backbone.__init__(
            self, inputs=inputs, outputs=outputs, dtype=model.dtype_policy, name=name
        )
        for attribute, value in attributes.items():
            vars(self).setdefault(attribute, value)
        renew_parameters(self)
        register_parameters(self)
        set_trainable_argument(self, trainable)
        # In an object that Keras does not track
        held.layers = layers
        self.held = held
        self.moe_blocks = blocks
        self.num_blocks = len(found)
        for backbone, state in inner:
            _adopt(backbone, state, layers)
        describe_layers(self)

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
        """Layers that `enable_lora` adapts: those of KerasHub, and banks of experts."""
        return [
            *super().default_lora_layer_names(),
            "intermediate_dense",
            "gate_dense",
            "output_dense",
        ]

    def get_config(self):
        policy = self.dtype_policy
        quantization = quantization_of(self)
        config = {
            "name": self.name,
            "trainable": trainable_argument(self),
            # Not KerasHub's map of policies, which its `from_preset` would drop
            "dtype": keras.dtype_policies.serialize(
                getattr(policy, "default_policy", policy)
            ),
            **({"quantization": quantization} if quantization else {}),
            "model": self.held.dense_config,
            "blocks": list(self.moe_blocks),
            "router": serialized_routers(self),
            "sites": self.held.sites,
            "start": self.held.start,
            "moe_settings": {
                **self.held.moe_settings,
                "group_images": self.group_images,
                "by_image": [moe.by_image for moe in self.held.layers.values()],
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
        quantize_as(sparse, quantization)
        return sparse


@functools.cache
def class_with_experts(source):
    """Return the class of the models with experts that are made of another class.

    Args:
        source: subclass of `keras.Model`.

    Returns:
        Subclass of `ModelWithExperts`, and of `source` if that is a class of KerasHub's
        backbones.
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


# `from_preset` of KerasHub looks up classes by their registered names.
for _source in _backbones_of_keras_hub():
    class_with_experts(_source)


# === Changing the dense model ===


def _put_experts(model, sites, routers, held):
    """Put mixtures of experts in the places of MLPs.

    Args:
        model: built model, which is changed.
        sites: dict from blocks to their `Site`.
        routers: dict from blocks to routers.
        held: namespace with `shapes`, `start` and `moe_settings`.

    Returns:
        dict from blocks to `layers.MoE`; dict from the `id` of a layer in the graph of
        a functional model to the one that is to be in its place.
    """
    layers, in_graph = {}, {}
    images = held.moe_settings.get("by_image")
    images = images if isinstance(images, list) else [images] * len(sites)
    sizes = [x.shape[1:] for x in keras.tree.flatten(ends(model)[0])]
    is_fixed = all(None not in size for size in sizes)
    for (block, site), by_image in zip(sites.items(), images, strict=True):
        is_in_graph = is_functional(site.parents[0])
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
        check_causal(routers[block], site, moe.by_image)
        if is_fixed:
            moe.token_shape = shape[1:]
        layers[block] = moe
        for index, (part, parent) in enumerate(
            zip(site.parts, site.parents, strict=True)
        ):
            new = moe
            if index:
                new = keras.layers.Identity(dtype=part.compute_dtype, name=part.name)
            if is_functional(parent):
                in_graph[id(part)] = new
            else:
                replace_sublayer(parent, part, new)
    return layers, in_graph


def _graph_with(model, new):
    """Return the ends of a model and its attributes, after layers were replaced.

    Args:
        model: built model.
        new: dict from the `id` of a layer in the graph to the one in its place.

    Returns:
        Keras tensors of inputs and outputs; dict of attributes.
    """
    is_backbone = isinstance(model, keras_hub.models.Backbone)
    attributes = {
        name: value
        for name, value in attributes_of(model).items()
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
    """Return a functional model with other layers in its graph.

    Args:
        model: functional model.
        new: dict from the `id` of a layer to the one in its place.
    """

    def clone(layer):
        if id(layer) in new:
            return new[id(layer)]
        inside = sublayers(layer) if is_functional(layer) else ()
        if any(id(part) in new for _, part, _ in inside):
            return _with_layers(layer, new)
        return layer

    return keras.models.clone_model(model, clone_function=clone)


# === Backbones inside ===


def _inner_backbones(model, sites, held):
    """Return the backbones inside a model, or in its attributes, that have sites.

    A task's backbone may be made of others, as that of SegFormer of an image encoder.

    Args:
        model: built model, not changed yet.
        sites: list of all sites of it.
        held: namespace of the model.

    Returns:
        List of `(backbone, namespace)`, where `blocks` is a dict from the blocks of the
        model to those of the backbone.
    """
    found = []
    layers = [*attributes_of(model).values(), *(x for _, x, _ in sublayers(model))]
    for layer in {id(x): x for x in layers}.values():
        if not isinstance(layer, keras_hub.models.Backbone) or layer is model:
            continue
        inside = {id(part) for _, part, _ in sublayers(layer)}
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
