"""Experts in the models of other libraries."""

from collections.abc import Callable, Sequence

import keras
import keras_hub

from keras_softmoe.architecture import Mixture
from keras_softmoe.checks import check_bools, check_choice, check_names
from keras_softmoe.models.with_experts.copies import copy_of, task_with
from keras_softmoe.models.with_experts.mlp_sites import (
    check_blocks,
    check_causal,
    check_free,
    check_model,
    check_routers,
    find_sites,
    keeps_outputs,
    places_of,
)
from keras_softmoe.models.with_experts.model import class_with_experts
from keras_softmoe.models.with_experts.token_shapes import check_sites
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
    """Replace MLPs of an existing model with experts initialized from them.

    The MLPs of some blocks become `layers.MoE` with new routers; all else is copied.
    With room for all choices and gates that sum to one (`normalize_gates=True` and
    `capacity_factor=None`) the new model starts with the same outputs; see `upcycle`
    for other routers. The model that is passed in stays as it is.

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
        `ViTMoEBackbone`. Of a backbone of KerasHub it is an instance of its class, with
        all its attributes. It is saved as any model, graphs over it too, and can be the
        backbone of a task. Of a task, a task of the same class with such a backbone.

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
