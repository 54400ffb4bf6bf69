"""Pruning of the experts of a LIMoE that one modality hardly uses."""

import keras
import numpy as np

from keras_softmoe.checks import check_choice
from keras_softmoe.models.limoe import LIMoEBackbone
from keras_softmoe.routers import LIMoERouter

METHODS = ("router_pred", "router_drop")


def prune_experts(
    model: keras.Model, usage: dict, num_experts: int, method: str = "router_pred"
) -> keras.Model:
    """Return a smaller backbone with the experts that a modality uses most.

    It encodes images alone or text alone; text above all uses few experts. The model
    itself does not change.

    Args:
        model: `LIMoEBackbone` with `routers.LIMoERouter`s, or a task that has one.
        usage: dict from each MoE block to an `(E,)` array, how many tokens of the
            modality each expert was chosen for, as measured on data by
            `analysis.analyze`, or during training by `analysis.RoutingMonitor`.
        num_experts: int, experts to keep in each block, those with the most tokens
            (of equals the first).
        method: `"router_pred"`: probabilities are still distributed among all experts,
            tokens choose among the kept ones. `"router_drop"`: the probabilities of the
            kept ones add up to one, so gates are larger than in training.

    Returns:
        `LIMoEBackbone` with `num_experts` experts in each MoE block and none of the
        losses of routers.

    Raises:
        ValueError: if `num_experts` is less than a token chooses or more than a block
            has, the usage of a block is missing, or the model has no such routers, was
            quantized or given LoRA weights.

    Source: LIMoE, appendix E.4. With most experts pruned `"router_pred"` does better
    (figure 14).

    Examples:
        >>> statistics = ksm.analysis.analyze(limoe, captions=captions).modalities
        >>> usage = {layer: s.routed["text"] for layer, s in statistics.items()}
        >>> pruned = ksm.models.prune_experts(limoe, usage, num_experts=4)
        >>> text_model = ksm.models.LIMoEContrastive(pruned, limoe.preprocessor)
        >>> text_model.encode_text(captions).shape
        (8, 128)
    """
    backbone = getattr(model, "backbone", model)
    check_choice("method", method, METHODS)
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
    config = {**router.get_config(), "num_experts": len(kept), "losses": ()}
    if method == "router_pred":
        config |= {"kept_experts": kept, "num_predicted_experts": router.num_experts}
        return LIMoERouter(**config)
    # The kept experts are those of one modality: no others to keep apart from.
    return LIMoERouter(**{**config, "image_experts": None, "text_experts": None})


def _copy(old, new, kept, method):
    if kept is None:
        new.set_weights(old.get_weights())
        return
    for source, target in zip(old.weights, new.weights, strict=True):
        value = keras.ops.convert_to_numpy(source)
        if "/experts/" in source.path:
            value = value[kept]
        elif "/router/" in source.path and method == "router_drop":
            value = value[:, kept]
        target.assign(value)


def _most_used(usage, num_experts, count):
    usage = np.asarray(usage)
    if usage.shape != (num_experts,):
        raise ValueError(
            "The usage of a block has one number for each expert. Received: an array "
            f"of shape {usage.shape} for {num_experts} experts."
        )
    # Stable: of equals the first.
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
            f"The usage of blocks {missing} is missing. Received: usage of blocks "
            f"{sorted(usage)}; measure all MoE blocks, {sorted(routers)}."
        )
    experts = [block.moe.experts for block in backbone.blocks if block.moe]
    banks = [bank for layer in experts for bank in layer.banks]
    if any(bank.quantization_mode or bank.lora_enabled for bank in banks):
        raise ValueError(
            "Quantized experts and those with LoRA weights cannot be pruned. Received: "
            "a model with such experts. Prune the original model first."
        )
