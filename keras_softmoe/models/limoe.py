"""One sparse tower for images and text: LIMoE, its dense twins, and pruning."""

from collections.abc import Sequence

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe.architecture import LIMoE
from keras_softmoe.checks import check_choice
from keras_softmoe.models.arguments import check_pairs, offer_names
from keras_softmoe.models.backbone import (
    MoEBackbone,
    SingleModality,
    check_size,
    normalized,
)
from keras_softmoe.routers import LIMoERouter, Router
from keras_softmoe.types import DType

PRUNING_METHODS = ("router_pred", "router_drop")


@keras.saving.register_keras_serializable(package="keras_softmoe")
@offer_names
class LIMoEBackbone(MoEBackbone, SingleModality):
    """One Transformer for images and text, some of whose blocks mix experts.

    Patches and text tokens are embedded apart and then pass through the same blocks.
    They never attend to each other, but compete for the slots of the same experts. With
    `moe_layers=()` it is a dense one-tower model.

    Args:
        image_shape: `(height, width, channels)` of the images, in pixels. This and all
            arguments that are not listed here are those of `ViTMoEBackbone`.
        vocabulary_size: int, number of different text tokens.
        sequence_length: int, tokens of a text, padding included.
        moe_layers: as in `ViTMoEBackbone`; `moe_blocks(num_layers, 2)` in the paper.
        router: as in `ViTMoEBackbone`; a `routers.LIMoERouter` in the paper.
        embedding_dim: int, width of the embeddings.
        image_pooling: how patches become one vector: `"gap"` (their mean), `"gmp"`
            (maximum), `"first"`, `"last"` or `"map"` (attention pooling).
        text_pooling: the same for text tokens.
        logit_scale: float, initial value of the learned scale of similarities.
        logit_bias: float, initial value of a learned bias (sigmoid: -10), or `None`.
        mask_padding: bool, whether padding (id 0) has no part in attention, slots,
            losses of routers and pooling. In the paper it is like any other token.
        group_images: int or `None`, pairs of image and text that are routed together.

    Returns, when called on a dict of `"images"` `(B, height, width, channels)` in
        `[-1, 1]` and `"token_ids"` `(B, sequence_length)` int32: dict of
        `"image_sequence_output"` `(B, S_image, D)` and `"text_sequence_output"`
        `(B, sequence_length, D)`, the normalized tokens; `"image_embedding"` and
        `"text_embedding"` `(B, embedding_dim)` float32 of length one; `"logit_scale"`
        `(B,)` and, if there is one, `"logit_bias"` `(B,)`, equal in all rows.

    Raises:
        ValueError: if an argument is not among the accepted values.

    Source: LIMoE, section 2 and appendices A and E.5 (groups of 32 pairs).

    Examples:
        >>> router = ksm.routers.LIMoERouter(num_experts=8)
        >>> backbone = ksm.models.LIMoEBackbone(
        ...     (32, 32, 3), 8, 500, 16, 2, 2, 32, 64, moe_layers=(1,), router=router
        ... )
        >>> token_ids = np.ones((2, 16), "int32")
        >>> pairs = {"images": np.zeros((2, 32, 32, 3)), "token_ids": token_ids}
        >>> backbone(pairs)["image_embedding"].shape
        (2, 512)
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        patch_size: int | Sequence[int],
        vocabulary_size: int,
        sequence_length: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        mlp_dim: int,
        moe_layers: tuple = (),
        router: Router | Sequence[Router] | None = None,
        embedding_dim: int = 512,
        image_pooling: str = "gap",
        text_pooling: str = "gap",
        logit_scale: float = 10.0,
        logit_bias: float | None = None,
        mask_padding: bool = False,
        use_qk_norm: bool = False,
        dropout_rate: float = 0.0,
        group_images: int | None = 32,
        dispatcher: str = "auto",
        equal_experts: bool = False,
        expert_dropout_rate: float = 0.0,
        remat_experts: bool = False,
        dispatch_dtype: str | None = None,
        shared_mlp_dim: int | None = None,
        expert_mlp_dim: int | None = None,
        dtype: DType = None,
        name: str | None = None,
        trainable: bool = True,
    ):
        architecture = LIMoE.of_arguments(locals())

        # === Layers ===
        layers = architecture.layers()
        check_size(architecture, name)

        # === Functional Model ===
        def encode(inputs, training=None):
            """Return the outputs of the modalities in the inputs."""
            tokens, masks = layers.encode(inputs, training)
            outputs = {f"{m}_sequence_output": x for m, x in tokens.items()}
            for modality, x in tokens.items():
                vectors = layers.embed(modality, x, masks.get(modality))
                outputs[f"{modality}_embedding"] = normalized(vectors)
            return outputs

        images = keras.Input(shape=architecture.image_shape, name="images")
        token_ids = keras.Input((sequence_length,), dtype="int32", name="token_ids")
        outputs = encode({"image": images, "text": token_ids})
        outputs |= layers.scale(outputs["image_embedding"])
        inputs = {"images": images, "token_ids": token_ids}
        super().__init__(architecture, inputs, outputs, name, trainable)
        self._encode = encode

    def route(
        self, images: ArrayLike | None = None, token_ids: ArrayLike | None = None
    ) -> dict:
        """Return the decisions of the routers for a batch of pairs, or one modality.

        Args:
            images: optional `(B, height, width, channels)` float array in `[-1, 1]`.
            token_ids: optional `(B, sequence_length)` int array.

        Returns:
            dict from blocks to `routers.Decision`; a pair has the image's tokens first.

        Examples:
            >>> decisions = backbone.route(pairs["images"], pairs["token_ids"])
            >>> decisions[1].summary["load"].shape  # (G, E)
        """
        check_pairs(self, images, token_ids)
        inputs = {"image": images, "text": token_ids}
        inputs = {name: x for name, x in inputs.items() if x is not None}
        return self.decisions_of(lambda: self._encode(inputs, training=False))


# === Pruning ===


def prune_experts(
    model: keras.Model, usage: dict, num_experts: int, method: str = "router_pred"
) -> keras.Model:
    """Return a smaller backbone with the experts that a modality uses most.

    It encodes images alone or text alone. The model itself does not change.

    Args:
        model: `LIMoEBackbone` with `routers.LIMoERouter`s, or a task that has one.
        usage: dict from each MoE block to an `(E,)` array, how many tokens of the
            modality each expert was chosen for, as measured on data by
            `analysis.analyze`, or during training by `analysis.RoutingMonitor`.
        num_experts: int, experts with the most tokens to keep in each block.
        method: `"router_pred"`: probabilities are still distributed among all experts,
            tokens choose among the kept ones. `"router_drop"`: the probabilities of the
            kept ones add up to one, so gates are larger than in training.

    Returns:
        `LIMoEBackbone` with `num_experts` experts in each MoE block, and no losses.

    Raises:
        ValueError: if `num_experts` is less than a token chooses or more than a block
            has, usage is missing, or the model has other routers, LoRA or is quantized.

    Source: LIMoE, appendix E.4 and figure 14.

    Examples:
        >>> statistics = ksm.analysis.analyze(limoe, captions=captions).modalities
        >>> usage = {layer: s.routed["text"] for layer, s in statistics.items()}
        >>> pruned = ksm.models.prune_experts(limoe, usage, num_experts=4)
        >>> text_model = ksm.models.LIMoEContrastive(pruned, limoe.preprocessor)
        >>> text_model.encode_text(captions).shape
        (8, 128)
    """
    backbone = getattr(model, "backbone", model)
    check_choice("method", method, PRUNING_METHODS)
    _check(backbone, usage, num_experts)
    kept = {
        layer: _most_used(usage[layer], router.num_experts, num_experts)
        for layer, router in backbone.routers.items()
    }
    routers = [
        keras.saving.serialize_keras_object(_pruned(router, kept[layer], method))
        for layer, router in backbone.routers.items()
    ]
    pruned = LIMoEBackbone.from_config(
        {**backbone.get_config(), "router": routers, "name": f"{backbone.name}_pruned"}
    )
    for index, block in enumerate(pruned.blocks):
        _copy(backbone.blocks[index], block, kept.get(index), method)
    rest = [
        [layer for layer in b.layers if layer not in b.blocks and layer.weights]
        for b in (backbone, pruned)
    ]
    for old, new in zip(*rest, strict=True):
        new.set_weights(old.get_weights())
    return pruned


def _pruned(router, kept, method):
    """Return a router of the kept experts."""
    config = {**router.get_config(), "num_experts": len(kept), "losses": ()}
    if method == "router_pred":
        config |= {"kept_experts": kept, "num_predicted_experts": router.num_experts}
    else:
        # There are no experts of another modality to keep apart from.
        config |= {"image_experts": None, "text_experts": None}
    return LIMoERouter(**config)


def _copy(old, new, kept, method):
    """Copy the weights of a block, in a mixture only of the kept experts."""
    for source, target in zip(old.weights, new.weights, strict=True):
        value = keras.ops.convert_to_numpy(source)
        if kept is not None and "/experts/" in source.path:
            value = value[kept]
        elif kept is not None and "/router/" in source.path and method == "router_drop":
            value = value[:, kept]
        target.assign(value)


def _most_used(usage, num_experts, count):
    usage = np.asarray(usage)
    if usage.shape != (num_experts,):
        raise ValueError(
            "The usage of a block must be one number for each expert. Received: an "
            f"array of shape {usage.shape} for {num_experts} experts."
        )
    # Stable: the first of equals.
    return sorted(np.argsort(-usage, kind="stable")[:count].tolist())


def _check(backbone, usage, num_experts):
    routers = getattr(backbone, "routers", {})
    kinds = {type(router) for router in routers.values()}
    pruned = any(getattr(r, "kept_experts", None) for r in routers.values())
    if not isinstance(backbone, LIMoEBackbone) or kinds != {LIMoERouter} or pruned:
        raise ValueError(
            "Only a `LIMoEBackbone` with `routers.LIMoERouter`s can be pruned "
            "(not a dense one, and only once). Received: "
            f"{type(backbone).__name__} with routers of "
            f"{sorted(kind.__name__ for kind in kinds)}."
        )
    most = min(router.num_experts for router in routers.values())
    least = max(router.num_selected_experts for router in routers.values())
    if not least <= num_experts <= most:
        raise ValueError(
            f"`num_experts` must be from {least}, the experts that a token chooses, to "
            f"{most}, the experts of a block. Received: num_experts={num_experts}."
        )
    missing = sorted(set(routers) - set(usage))
    if missing:
        raise ValueError(
            f"The usage of blocks {missing} is missing. Received: {sorted(usage)}."
        )
    experts = [block.moe.experts for block in backbone.blocks if block.moe]
    banks = [bank for layer in experts for bank in layer.banks]
    if any(bank.quantization_mode or bank.lora_enabled for bank in banks):
        raise ValueError(
            "Quantized experts and those with LoRA weights cannot be pruned. Received: "
            f"model={backbone.name!r}."
        )
