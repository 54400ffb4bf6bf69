"""Experts in a model of somebody else."""

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import keras
import keras_hub

from keras_softmoe.architecture import Mixture, revive_router
from keras_softmoe.backbones import (
    MutableRouting,
    quantize,
    recompile_on_change,
    serialized_routers,
    set_trainable_argument,
    trainable_argument,
)
from keras_softmoe.checks import check_bools, check_choice, check_names, quote
from keras_softmoe.keras_adapter.surgery import (
    is_functional,
    renew_parameters,
    replace_sublayer,
    sublayers,
)
from keras_softmoe.models._copies import configuration_of, copy_of, task_with
from keras_softmoe.models._expert_banks import make_moe
from keras_softmoe.models._sites import (
    check_blocks,
    check_causal,
    check_free,
    check_model,
    find_sites,
    places_of,
    sites_at,
)
from keras_softmoe.models.shapes import ends, token_shapes
from keras_softmoe.routers import Router


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
        verbose: 0 or 1, whether to print how many MLPs were found and changed.
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
    known = None if sites is None else places_of(model, found)
    sparse = ModelWithExperts(
        copy_of(model), blocks, router, known, start, moe_settings, name=model.name
    )
    if verbose:
        print(
            f"Experts in {len(blocks)} of {len(found)} MLPs of {model.name!r}: "
            f"{', '.join(map(str, blocks))}."
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


@keras.saving.register_keras_serializable(package="keras_softmoe")
@recompile_on_change
class ModelWithExperts(keras_hub.models.Backbone, MutableRouting):
    """A model of somebody else in which some MLPs are mixtures of experts.

    `add_experts` makes it from a copy: this constructor changes the model it is given.
    Attributes of that model, such as `hidden_dim`, are attributes of this one.

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
        attributes = {k: v for k, v in vars(model).items() if not k.startswith("_")}
        chosen = {block: found[block] for block in blocks}
        parts = [part for site in chosen.values() for part in site.parts]
        old = {id(weight) for part in parts for weight in part.weights}
        dense_weights = [None if id(w) in old else w for w in model.weights]
        shapes = token_shapes(model, chosen)
        inputs, outputs, layers = _with_experts(
            model, chosen, routers, shapes, start, moe_settings
        )
        super().__init__(
            inputs=inputs, outputs=outputs, dtype=model.dtype_policy, name=name
        )
        renew_parameters(self)
        set_trainable_argument(self, trainable)
        # In an object that Keras does not track
        self.held = SimpleNamespace(
            dense_config=dense_config,
            # Those that are not in MLPs with experts
            dense_weights=dense_weights,
            sites=sites,
            shapes=shapes,
            start=start,
            moe_settings=moe_settings,
            layers=layers,
            attributes=attributes,
        )
        self.moe_blocks = blocks
        self.num_blocks = len(found)

    def __getattr__(self, name):
        # PyTorch looks its modules up here.
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        held = vars(self).get("held")
        if held is None or name not in held.attributes:
            raise AttributeError(
                f"A `{type(self).__name__}` has no attribute {name!r}."
            )
        return held.attributes[name]

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

    quantize = quantize

    def default_lora_layer_names(self):
        """Layers that `enable_lora` adapts: those of KerasHub, and banks of experts."""
        return [
            *super().default_lora_layer_names(),
            "intermediate_dense",
            "gate_dense",
            "output_dense",
        ]

    def get_config(self):
        return {
            **super().get_config(),
            "trainable": trainable_argument(self),
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

    @classmethod
    def from_config(cls, config):
        model = config["model"]
        if isinstance(model, dict):
            dtype = config.get("dtype")
            if dtype is not None and "dtype" in model["config"]:
                dtype = keras.dtype_policies.serialize(keras.dtype_policies.get(dtype))
                model = {**model, "config": {**model["config"], "dtype": dtype}}
            model = keras.saving.deserialize_keras_object(model)
        rest = {name: x for name, x in config.items() if name != "dtype"}
        router = revive_router(config["router"])
        return cls(**{**rest, "model": model, "router": router})


def _with_experts(model, sites, routers, shapes, start, moe_settings):
    """Replace MLPs by mixtures of experts.

    Args:
        model: built model, which is changed.
        sites: dict from blocks to their `Site`.
        routers: dict from blocks to routers.
        shapes: dict from blocks to shapes of tokens.
        start: as in `add_experts`.
        moe_settings: dict.

    Returns:
        Keras tensors of inputs and outputs; dict from blocks to `layers.MoE`.
    """
    layers, in_graph = {}, {}
    images = moe_settings.get("by_image")
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
            known = {**moe_settings, "by_image": by_image, "name": name}
            if isinstance(model.dtype_policy, keras.dtype_policies.DTypePolicyMap):
                # From a file of a quantized model: by the paths of its layers
                known["dtype"] = model.dtype_policy
            moe = make_moe(routers[block], site.parts, shapes[block], known, start)
        check_causal(routers[block], site, moe.by_image)
        if is_fixed:
            moe.token_shape = shapes[block][1:]
        layers[block] = moe
        for index, (part, parent) in enumerate(
            zip(site.parts, site.parents, strict=True)
        ):
            new = moe
            if index:
                new = keras.layers.Identity(dtype=part.dtype_policy, name=part.name)
            if is_functional(parent):
                in_graph[id(part)] = new
            else:
                replace_sublayer(parent, part, new)
    if in_graph:
        model = _with_layers(model, in_graph)
    inputs, outputs = ends(model)
    return inputs, outputs, layers


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
