"""Experts in the models of other libraries."""

from collections.abc import Callable, Sequence

import keras
import keras_hub

from keras_softmoe.architecture import Mixture
from keras_softmoe.checks import check_choice, check_names, quote
from keras_softmoe.keras_adapter.surgery import sublayers
from keras_softmoe.layers import MoE, SoftMoE
from keras_softmoe.models.backbone import MoEBackbone
from keras_softmoe.models.with_experts import mlp_sites
from keras_softmoe.models.with_experts.copies import copy_of, task_with
from keras_softmoe.models.with_experts.model import class_with_experts
from keras_softmoe.models.with_experts.token_shapes import check_sites
from keras_softmoe.routers import Router

_OTHER_OUTPUTS = (
    "Until it is trained, its outputs differ from those of the model. They are the "
    "same with `capacity_factor=None, normalize_gates=True` of a "
    '`SoftmaxTokenChoiceRouter`, or with `start="shared"`.'
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
    """Replace MLPs of an existing model with experts initialized from them.

    All else is copied, and the model that is passed in is not changed. The outputs stay
    the same with `capacity_factor=None, normalize_gates=True` of a token choice router.

    Families of KerasHub, alone or in a task: ViT, DeiT, DINOv2, DINOv3, SigLIP, CLIP,
    MetaCLIP 2, Swin, MiT, VideoPrism, ViTDet (SAM), BERT and others made of
    `TransformerEncoder` or `TransformerDecoder`, Llama, Gemma, Qwen, Qwen3 and Mistral.
    An MLP of dense layers with biases and an activation of Keras, or a gated one of
    these decoders, becomes a bank of experts, which supports LoRA and int8; any other
    is the template of the experts (`layers.MoE(router, expert=...)`). Banks of decoders
    have biases of zero, which are not trained.

    Args:
        model: built `keras.Model` that can be created from its configuration: a
            backbone or task of KerasHub, a functional model, or a registered one.
        blocks: sequence of int, the MLPs that get experts, counted from 0.
        router: a router, a template; or a list with one for each of those blocks.
        sites: the MLPs of a model of another family. A predicate, called with each
            layer; or a sequence with names of layers (`"mlp"`), or paths with `*`
            (`"encoder/block_*/mlp"`). The parts of an MLP that a block applies one
            after the other are a tuple.
        start: `"copies"`; or `"shared"`, where the MLP is kept as a shared expert and
            the others begin with output zero, so that the outputs stay the same with
            any router. For MLPs that become a bank.
        verbose: 0 or 1, whether to print the blocks with experts, and whether the
            router changes the outputs.
        **moe_settings: other arguments of `layers.MoE`. `by_image` is true by default
            for MLPs that compute a token from others (MiT's).

    Returns:
        A `keras_hub.models.Backbone` (for a backbone of KerasHub: of a subclass) with
        `moe_blocks`, `num_blocks`, `routers` and `set_routing`. For a task, one of its
        class on such a backbone.

    Raises:
        ValueError: if no MLP is found (the message lists candidates), a block does not
            exist or has experts already, the router does not fit, routing would look at
            later tokens in a causal decoder, or the model cannot be copied.

    Source: Komatsuzaki et al. 2023 (Sparse Upcycling), section 3.

    Examples:
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(
        ...     4, num_selected_experts=2, capacity_factor=None, normalize_gates=True
        ... )
        >>> sparse = ksm.converters.add_experts(vit, blocks=(1,), router=router)
        'vi_t_backbone': experts in 1 of 2 MLPs (block 1).
        >>> sparse.routers[1].num_experts
        4
    """
    accepted = [name for name in Mixture.__annotations__ if name != "shared_mlp_dim"]
    check_names("`add_experts`", moe_settings, [*accepted, "by_image"])
    check_choice("by_image", moe_settings.get("by_image"), (None, False, True))
    check_choice("start", start, ("copies", "shared"))
    if not isinstance(model, keras.Model):
        raise ValueError(
            "`model` must be a `keras.Model`, for example a backbone of KerasHub. "
            f"Received: model={quote(model)}."
        )
    backbone = getattr(model, "backbone", model)
    if isinstance(backbone, MoEBackbone) or hasattr(model, "text_backbone"):
        raise ValueError(
            "Models of this library get experts from `ksm.converters.upcycle`. "
            f"Received: model={quote(model)}."
        )
    if not model.built:
        raise ValueError(
            "A model must be built: call it once on data. Received: a "
            f"`{type(model).__name__}` with built=False."
        )
    if isinstance(model, keras_hub.models.Task):
        arguments = blocks, router, sites, start, verbose
        return task_with(model, add_experts(model.backbone, *arguments, **moe_settings))
    found = mlp_sites.find_sites(model, sites)
    blocks = mlp_sites.check_blocks(blocks, found)
    chosen = [found[block] for block in blocks]
    for site in chosen:
        inside = [x for part in site.parts for _, x, _ in sublayers(part)]
        for layer in (*site.parts, *inside):
            if isinstance(layer, MoE | SoftMoE):
                raise ValueError(
                    "Experts replace MLPs, and not other experts. Received: "
                    f"the site {site.paths[0]!r} with {layer.path!r}."
                )
    places = None
    if sites is not None:
        check_sites(model, chosen)
        places = mlp_sites.places_of(model, found)
    routers = mlp_sites.check_routers(router, blocks)
    sparse = class_with_experts(type(model))(
        copy_of(model), blocks, router, places, start, moe_settings, name=model.name
    )
    if verbose:
        kept = start == "shared" or all(map(mlp_sites.keeps_outputs, routers.values()))
        print(
            f"{model.name!r}: experts in {len(blocks)} of {len(found)} MLPs "
            f"(block{'s' * (len(blocks) > 1)} {', '.join(map(str, blocks))}).",
            *([] if kept else [_OTHER_OUTPUTS]),
        )
    return sparse
