"""The cost of a preset, a model or a dict of arguments: no weight gets a value."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_softmoe import catalogue
from keras_softmoe.architecture import (
    BY_NAME,
    Settings,
    TwoTowers,
    ViT,
    counting,
    kind_of,
    moe_layers_of,
    read,
)
from keras_softmoe.checks import check_names, check_whole_numbers
from keras_softmoe.routers.scores import MUTABLE_SETTINGS


class Cost(NamedTuple):
    """Cost of a model.

    Attributes:
        parameters: int, the numbers in its weights.
        gflop_per_image: float, the operations in the matrix products that predict one
            image (text, or pair), in units of 1e9. A multiply-add counts as two.
        weight_bytes: int, the bytes of its weights under its dtype policy.
    """

    parameters: int
    gflop_per_image: float
    weight_bytes: int


def cost(
    model: str | os.PathLike | dict | keras.Model,
    num_classes: int | None = None,
    **changes,
) -> Cost:
    """Count the parameters, operations and bytes of a model without its weights.

    Layers are called on shapes only, so the largest preset takes as little time and
    memory as the smallest. The operations are those of the matrix products of a
    prediction, slots and groups full: embeddings, attention, MLPs, experts, logits of
    routers, products that dispatch and combine, pooling and heads. Elementwise
    functions, sorting, and dispatch that moves rows count nothing.

    In layers of other libraries, and in your own, products through Keras count
    (`keras.ops.matmul`, `einsum`, `dot`, `tensordot`, `dot_product_attention`,
    convolutions). A text of any length has `max_sequence_length` or 128 tokens.

    Args:
        model: name or directory of a preset (its backbone is counted), model of this
            library (without LoRA), dict of a backbone's arguments, or any built model.
        num_classes: int, classes of a head, by default those of a classifier or none.
        **changes: changed arguments of backbone and routers, as in `from_preset`.

    Source: Soft MoE, section 2.3 (parameters of its table 9 are met within 0.15 %,
    operations within 0.6 %); V-MoE, table 8 (within 0.1 %); LIMoE, appendix D.2.

    Examples:
        >>> ksm.evaluation.cost("soft_moe_huge_patch14_256e_224", num_classes=29593)
        Cost(parameters=54177079209, gflop_per_image=341..., weight_bytes=216708316836)
        >>> name = "vmoe_base_patch16_every2_32e_224"
        >>> ksm.evaluation.cost(name, capacity_factor=0.5).gflop_per_image
        35.1...
    """
    if _is_of_another_library(model):
        check_names("`cost` of a model of another library", changes, ())
        if num_classes is not None:
            raise ValueError(
                "A head is counted where it is. Received: num_classes="
                f"{num_classes!r} for a `{type(model).__name__}`."
            )
        numbers, operations = model.count_params(), gflop_per_image(model)
        sizes = (math.prod(w.shape) * counting.itemsize(w.dtype) for w in model.weights)
        return Cost(numbers, operations, sum(sizes))
    model = described(model, num_classes, **changes)
    weights, products = _counts(model)
    return Cost(
        parameters=sum(weight.numbers for weight in weights),
        gflop_per_image=2e-9 * products,
        weight_bytes=sum(weight.bytes for weight in weights),
    )


def gflop_per_image(model):
    """Return the figure of `Cost`, also for a quantized model, whose is the same."""
    if not _is_of_another_library(model):
        return 2e-9 * _counts(described(model), dtype="float32")[1]
    # On first use, since `models` imports KerasHub.
    from keras_softmoe.models.with_experts.token_shapes import example_inputs

    batch = max([moe.group_images or 1 for moe in moe_layers_of(model)], default=1)
    inputs = example_inputs(model, batch)
    return 2e-9 * counting.count_products(model, [model], inputs) / batch


def _is_of_another_library(model):
    """Return whether products are counted in calls: also of the segmenter's decoder."""
    backbone = getattr(model, "backbone", model)
    has_record = isinstance(getattr(backbone, "architecture", None), Settings)
    is_known = has_record and (backbone is model or _has_known_head(model))
    return isinstance(model, keras.Model) and model.built and not is_known


def _has_known_head(model):
    classes = map(keras.saving.get_registered_name, type(model).__mro__)
    return not set(_TASKS).isdisjoint(classes)


def _counts(model, dtype=None):
    """Return the weights of a `Described` model, and the products of one image."""
    found = model.architecture
    is_pair = isinstance(found, TwoTowers)
    weights, products = [], 0
    for tower in found.towers.values() if is_pair else [found]:
        variable = dtype or _variable_dtype(tower.dtype)
        counts = counting.count(tower.replace(dtype=variable))
        weights += counts.weights
        products += counts.products / tower.group_size
    # Heads: a classifier's, or projections
    heads = []
    if is_pair:
        dims = found.projection_dims.items()
        heads = [(found.towers[m].output_dim, dim) for m, dim in dims if dim]
        numbers = 1 + (found.logit_bias is not None)
        weights.append(counting.Weight("contrastive_scale", numbers, "float32"))
    if model.num_classes is not None:
        num_classes = model.num_classes
        if not isinstance(found, ViT):
            raise ValueError(
                f"A `{found.backbone}` has no head for classes, only a "
                f"`ViTMoEBackbone` has. Received: num_classes={num_classes!r}."
            )
        check_whole_numbers(1, num_classes=num_classes)
        heads = [(found.output_dim, num_classes)]
    for width, units in heads:
        variable = dtype or _variable_dtype(model.head_dtype)
        weights.append(counting.Weight("head", (width + 1) * units, variable))
        products += width * units
    return weights, products


def _variable_dtype(dtype):
    """Return the dtype of weights under a dtype or policy, `None` for the global."""
    policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())
    is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    if is_map or policy.quantization_mode or "float" not in policy.variable_dtype:
        raise ValueError(
            "`cost` counts models in one float dtype, before they are quantized. "
            f"Received: dtype={dtype!r}. Sum the sizes of `model.weights` instead."
        )
    return policy.variable_dtype


_TASKS = (
    "keras_softmoe>ViTMoEImageClassifier",
    "keras_softmoe>LIMoEContrastive",
    "keras_softmoe>TwoTowerContrastive",
)


class Described(NamedTuple):
    """A model: its record of `architecture`, its name and its head."""

    architecture: Settings
    name: str
    num_classes: int | None
    head_dtype: Any


def described(model, num_classes=None, **changes):
    """Describe a preset, model or dict of arguments, see `cost`, after `changes`."""
    routing = {name: changes.pop(name) for name in MUTABLE_SETTINGS if name in changes}
    found, name, classes, head_dtype = _read(model, changes)
    if routing:
        found = _with_routing(found, routing)
    num_classes = classes if num_classes is None else num_classes
    return Described(found, name, num_classes, head_dtype or found.dtype)


def _read(model, changes):
    """Return record and name of a backbone, classes and dtype of a head."""
    if isinstance(model, Mapping):
        arguments = {**model, **changes}
        name = model.get("name") or "model"
        return read(kind_of(model), arguments), name, None, None
    if isinstance(model, str | Path):
        kind, arguments = catalogue.read_config(model)
        if kind not in BY_NAME:
            raise ValueError(
                f"`cost` counts backbones of the classes {', '.join(BY_NAME)}. "
                f"Received: the preset {str(model)!r} of a {kind!r}."
            )
        return read(kind, {**arguments, **changes}), Path(model).name, None, None
    backbone = getattr(model, "backbone", model)
    found = getattr(backbone, "architecture", None)
    num_classes = getattr(model, "num_classes", None)
    is_known = backbone is model or _has_known_head(model)
    if not isinstance(found, Settings) or not is_known:
        raise ValueError(
            "`cost` counts the name or directory of a preset, a backbone of this "
            "library, a `ViTMoEImageClassifier`, a `LIMoEContrastive`, a "
            "`TwoTowerContrastive` or a dict of a backbone's arguments. Received: "
            f"model={model!r}."
        )
    if changes:
        found = found.replace(**changes)
    return found, model.name, num_classes, getattr(model, "head_dtype", None)


def _with_routing(found, routing):
    """Return the same architecture with other settings of its routers."""
    if isinstance(found, TwoTowers):
        raise ValueError(
            "The routers of two towers are set one tower at a time. Received: "
            f"{', '.join(routing)}."
        )
    router = found.router
    if not router:
        raise ValueError(
            f"A dense model has no routers to set. Received: {', '.join(routing)}."
        )
    is_list = isinstance(router, list | tuple)
    routers = [r.with_settings(**routing) for r in (router if is_list else [router])]
    return found.replace(router=routers if is_list else routers[0])
