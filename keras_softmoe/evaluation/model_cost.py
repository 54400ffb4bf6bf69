"""The cost of a model from its architecture: nothing is built or loaded."""

import os
from typing import Any, NamedTuple

import keras

from keras_softmoe.architecture import Settings, TwoTowers, ViT
from keras_softmoe.checks import check_names, check_whole_numbers
from keras_softmoe.evaluation.architectures import described
from keras_softmoe.evaluation.traced_cost import traced_products, weight_bytes
from keras_softmoe.layer_cost import ITEMSIZE, LayerCost, dense_cost


class Cost(NamedTuple):
    """Cost of a model.

    Attributes:
        parameters: int, the numbers in its weights.
        gflop_per_image: float, the operations in the matrix products that predict one
            image, in units of 1e9. A multiply-add counts as two. For a text tower: of
            one text; for a LIMoE or two towers: of one pair.
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
    """Count the parameters, operations and bytes of a model without building it.

    All counts follow from the configuration, so the largest preset takes as little time
    and memory as the smallest.

    The operations are those of the matrix products of one prediction: the patch
    embedding; queries, keys and values, their two products and the output of
    attention; MLPs; experts, over all their slots whether filled or not; the logits of
    routers; the dispatch and combine products of soft routers; attention pooling,
    pre-logits and head, or projections to embeddings. Left out are sums and elementwise
    functions: biases, normalizations, softmax, GELU, transport plans and the assignment
    of slots; and, of LIMoE, looking tokens up in the vocabulary and comparing
    embeddings with each other. A sparse router's `"gather"` dispatch moves rows and so
    costs nothing, its `"einsum"` dispatch is two products with one-hot matrices, which
    count. Groups of images are full ones; a group without a size
    (`group_images=None`) is counted as one image.

    For a LIMoE the operations are those of one pair, image and caption encoded
    together, as in training and as its paper compares costs; `group_images` counts
    pairs. Encoded apart, they meet another capacity.

    Any other built `keras.Model` is traced once on shapes: a model of `add_experts`,
    one of KerasHub or of your own. Its layers from this library count as above. In the
    others each product counts that goes through Keras (`keras.ops.matmul`, `einsum`,
    `dot`, `tensordot`, `dot_product_attention` and convolutions), for one input;
    products that a layer computes with functions of a backend do not. A text whose
    length the model leaves open is counted with its `max_sequence_length`, or 128
    tokens. Parameters and bytes are those of its weights as they are.

    Args:
        model: the name or directory of a preset (its backbone is counted), a backbone
            of this library, a `ViTMoEImageClassifier` (with its head), a
            `LIMoEContrastive`, a `TwoTowerContrastive`, or a dict of arguments of one
            of the backbones; or any built `keras.Model`. For a live model of this
            library only the architecture counts: LoRA
            matrices, for example, are ignored.
        num_classes: int or `None`, classes of the head that is counted with the
            backbone. Defaults to those of a classifier, otherwise to no head. Only a
            `ViTMoEBackbone` can have one.
        **changes: arguments of the backbone to change and settings of its routers, as
            in `from_preset`.

    Returns:
        `Cost`.

    Raises:
        ValueError: if the preset is unknown or damaged, or the model, its router, its
            dtype or an argument is of a kind that cannot be counted.

    Source: Soft MoE, section 2.3. Parameters of its table 9 are met within 0.15 % or
    the table's rounding, operations within 0.6 %; parameters of V-MoE, table 8, within
    0.1 %. Pairs: LIMoE, appendix D.2.

    Examples:
        >>> ksm.evaluation.cost("soft_moe_huge_patch14_256e_224", num_classes=29593)
        Cost(parameters=54177079209, gflop_per_image=341..., weight_bytes=216708316836)
        >>> name = "vmoe_base_patch16_every2_32e_224"
        >>> ksm.evaluation.cost(name, capacity_factor=0.5).gflop_per_image
        35.1...
    """
    if _is_of_somebody_else(model):
        check_names("`cost` of a model of another library", changes, ())
        if num_classes is not None:
            raise ValueError(
                "A head is counted where it is. Received: num_classes="
                f"{num_classes!r} for a `{type(model).__name__}`. Leave it out, or "
                "count the task."
            )
        operations = 2e-9 * traced_products(model)
        return Cost(model.count_params(), operations, weight_bytes(model))
    model = described(model, num_classes, **changes)
    parts = _parts(model)
    return Cost(
        parameters=sum(part.cost.parameters for part in parts),
        gflop_per_image=_gflop_per_image(parts),
        weight_bytes=sum(
            _bytes(part.dtype) * part.cost.weights
            + ITEMSIZE["float32"] * part.cost.float32_weights
            for part in parts
            if part.cost.parameters
        ),
    )


def gflop_per_image(model):
    """As in `Cost`, also of a model that was quantized, whose operations are as many.

    Args:
        model: as in `cost`.
    """
    if _is_of_somebody_else(model):
        return 2e-9 * traced_products(model)
    return _gflop_per_image(_parts(described(model)))


def _is_of_somebody_else(model):
    """Whether a model can only be counted by a symbolic call."""
    backbone = getattr(model, "backbone", model)
    has_record = isinstance(getattr(backbone, "architecture", None), Settings)
    return isinstance(model, keras.Model) and model.built and not has_record


class _Part(NamedTuple):
    """A part of a model with one dtype.

    Attributes:
        cost: `layers.LayerCost` for some images.
        images: int, how many.
        dtype: dtype or policy of its weights.
    """

    cost: LayerCost
    images: int
    dtype: Any


def _parts(model):
    """The parts of a `Described` model."""
    found = model.architecture
    encoders, head = [found], LayerCost()
    if isinstance(found, TwoTowers):
        encoders, head = found.towers.values(), found.head_cost()
    if model.num_classes is not None:
        _check_num_classes(model)
        head = dense_cost(found.output_dim, model.num_classes)
    return [
        *(_Part(each.cost(), each.group_size, each.dtype) for each in encoders),
        _Part(head, 1, model.head_dtype),
    ]


def _gflop_per_image(parts):
    return 2e-9 * sum(part.cost.products / part.images for part in parts)


def _bytes(dtype):
    """Bytes of a number in a weight under a dtype or policy, `None` for the global."""
    policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())
    is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    if is_map or policy.quantization_mode or policy.variable_dtype not in ITEMSIZE:
        raise ValueError(
            "`cost` counts models in one float dtype, before they are quantized. "
            f"Received: dtype={dtype!r}. Sum the sizes of `model.weights` instead."
        )
    return ITEMSIZE[policy.variable_dtype]


def _check_num_classes(model):
    num_classes = model.num_classes
    if not isinstance(model.architecture, ViT):
        raise ValueError(
            f"A `{model.architecture.backbone}` has no head for classes, only a "
            f"`ViTMoEBackbone` can have one. Received: num_classes={num_classes!r}. "
            "Leave it out."
        )
    check_whole_numbers(1, num_classes=num_classes)
