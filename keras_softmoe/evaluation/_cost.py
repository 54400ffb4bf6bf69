"""What a model costs, from its configuration: nothing is built or loaded."""

import os
from typing import NamedTuple

import keras

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.costs import ITEMSIZE, LayerCost, dense
from keras_softmoe.evaluation.configuration import configuration


class Cost(NamedTuple):
    """What a model costs.

    Attributes:
        parameters: int, the numbers in its weights.
        gflop_per_image: float, the operations in the matrix products that predict one
            image, in units of 1e9. A multiply-add counts as two. Of a LIMoE: those
            that encode one pair of image and caption.
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

    Everything follows from the configuration, so the largest preset takes as little
    time and memory as the smallest.

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

    Args:
        model: the name or directory of a preset (its backbone is counted), a
            `ViTMoEBackbone`, a `ViTMoEImageClassifier` (with its head), a
            `LIMoEBackbone`, a `LIMoEContrastive`, or a dict of arguments of one of the
            backbones. Of a live model only the configuration is looked at: LoRA
            matrices, for example, are not seen.
        num_classes: int or `None`, classes of the head that is counted with the
            backbone. A classifier's own, otherwise no head, if `None`. A LIMoE has
            none.
        **changes: arguments of the backbone to change and settings of its routers, as
            in `from_preset`.

    Returns:
        `Cost`.

    Raises:
        ValueError: if the preset is unknown or damaged, or the model, its router, its
            dtype or an argument is of a kind that cannot be counted.

    Source: Soft MoE, section 2.3. Of its table 9 the parameters are met within 0.15 %
    or the table's rounding, the operations within 0.6 %; the parameters of V-MoE table
    8 within 0.1 %. Pairs: LIMoE, appendix D.2.

    Examples:
        >>> ksm.evaluation.cost("soft_moe_huge_patch14_256e_224", num_classes=29593)
        Cost(parameters=54177079209, gflop_per_image=341..., weight_bytes=216708316836)
        >>> name = "vmoe_base_patch16_every2_32e_224"
        >>> ksm.evaluation.cost(name, capacity_factor=0.5).gflop_per_image
        35.1...
    """
    found = configuration(model, num_classes, **changes)
    layers, head = _layers_and_head(found)
    total = layers + head
    weight_bytes = _bytes(found.dtype) * layers.weights
    weight_bytes += ITEMSIZE["float32"] * layers.float32_weights
    if head.weights:
        dtype = found.dtype if found.head_dtype is None else found.head_dtype
        weight_bytes += _bytes(dtype) * head.weights
    return Cost(
        parameters=total.weights + total.float32_weights,
        gflop_per_image=_gflop_per_image(found, total),
        weight_bytes=weight_bytes,
    )


def gflop_per_image(model):
    """As in `Cost`, also of a model that was quantized, whose operations are as many.

    Args:
        model: as in `cost`.
    """
    found = configuration(model)
    layers, head = _layers_and_head(found)
    return _gflop_per_image(found, layers + head)


def _layers_and_head(found):
    """Two `LayerCost`s for a batch of one group; that of no head is empty."""
    batch_size = found.group_images or 1
    layers = found.cost(batch_size)
    if found.num_classes is None:
        return layers, LayerCost()
    _check_num_classes(found)
    return layers, dense(found.feature_dim, found.num_classes, batch_size)


def _gflop_per_image(found, total):
    return 2e-9 * total.products / (found.group_images or 1)


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


def _check_num_classes(found):
    num_classes = found.num_classes
    if found.is_pair:
        raise ValueError(
            "A LIMoE has no head: it tells classes by their names. Received: "
            f"num_classes={num_classes!r}. Leave it out."
        )
    check_whole_numbers(1, num_classes=num_classes)
