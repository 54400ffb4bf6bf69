"""Sizes of a model in bytes, before it is built."""

import math
import re
from typing import NamedTuple

import keras

from keras_softmoe.architecture import LIMoE, TextTower, TwoTowers, ViT
from keras_softmoe.architecture.counting import count, itemsize
from keras_softmoe.distribution.layouts import DENSE_RULES
from keras_softmoe.evaluation import cost
from keras_softmoe.evaluation.model_cost import described
from keras_softmoe.routers import IdentityRouter

_FLOAT32 = 4


class MoELayer(NamedTuple):
    """Sizes of a mixture of experts: `slot_bytes` of all slots of a group of images."""

    path: str
    num_experts: int
    expert_bytes: int
    slot_parameter_bytes: int
    slot_bytes: int


class ModelSize(NamedTuple):
    """Sizes that `plan` needs.

    `hidden_dim` is the axis along which `shard_dense` shards the dense kernels,
    `activation_bytes` are those of a group, `shared_bytes` of weights shared by both
    modalities, and `embedding_bytes` of an image or caption in a contrastive loss.
    """

    name: str
    parameters: int
    expert_parameters: int
    weight_bytes: int
    dense_kernel_bytes: int
    hidden_dim: int
    moe_layers: tuple
    group_images: int
    activation_bytes: int
    shared_bytes: int
    embedding_bytes: int


def model_size(model, num_classes=None, **changes):
    """Return the `ModelSize` of a model that is not built."""
    total = cost(model, num_classes, **changes)
    found, name, num_classes, _ = described(model, num_classes, **changes)
    if isinstance(found, TwoTowers):
        raise ValueError(
            "Two towers share nothing, and each has its own groups: plan them "
            f"separately. Received: model={model!r}."
        )
    group_images = found.group_images
    if group_images is None:
        raise ValueError(
            "A group that is the whole batch cannot be divided among devices. "
            f"Received: group_images={group_images}."
        )
    policy = keras.dtype_policies.get(found.dtype or keras.config.dtype_policy())
    compute = itemsize(policy.compute_dtype)
    weights = count(found).weights

    def of(pattern, quantity="bytes"):
        """Sum a quantity of the weights whose whole path matches."""
        paths = (w for w in weights if re.fullmatch(pattern, w.path))
        return sum(getattr(weight, quantity) for weight in paths)

    # Slots (or rows) of all experts for a group, by block
    num_tokens, slots = group_images * sum(_tokens_of_modalities(found)), {}
    for index, router in found.routers.items():
        rows = router.num_rows(num_tokens, training=True)
        if rows is None or found.dispatcher == "einsum":
            rows = router.num_experts * router.capacity(num_tokens, training=True)
        slots[index] = rows
    moe_layers = tuple(
        MoELayer(
            path=f"block_{index}/moe",
            num_experts=router.num_experts,
            expert_bytes=of(rf"block_{index}/moe/experts/.*"),
            slot_parameter_bytes=of(rf"block_{index}/moe/router/mu"),
            slot_bytes=compute * slots[index] * found.hidden_dim,
        )
        for index, router in found.routers.items()
    )
    shared_bytes = embedding_bytes = 0
    if isinstance(found, LIMoE):
        shared_bytes = of(r"encoder_norm/.*|block_\d+/(?!moe/(experts|router)/).*")
        # In float32 under any policy
        embedding_bytes = _FLOAT32 * found.embedding_dim
    # Logits of classes, their exponentials and gradients
    logits = group_images * 3 * _FLOAT32 * (num_classes or 0)
    return ModelSize(
        name=name,
        parameters=total.parameters,
        expert_parameters=of(r"block_\d+/moe/experts/.*", "numbers"),
        weight_bytes=total.weight_bytes,
        dense_kernel_bytes=of("|".join(DENSE_RULES)),
        hidden_dim=found.hidden_dim,
        moe_layers=moe_layers,
        group_images=group_images,
        activation_bytes=_activation_bytes(found, slots, compute) + logits,
        shared_bytes=shared_bytes,
        embedding_bytes=embedding_bytes,
    )


def _tokens_of_modalities(found):
    """Return the tokens of one image or text in the blocks, a list."""
    if isinstance(found, TextTower):
        return [found.sequence_length]
    num_tokens = math.prod(found.patch_grid)
    if isinstance(found, LIMoE):
        return [num_tokens, found.sequence_length]
    return [num_tokens + (found.pooling == "token") + found.num_registers]


def _activation_bytes(found, slots, compute):
    """Return the bytes that a group keeps for the backward pass (as XLA does)."""
    group, width, heads = found.group_images, found.hidden_dim, found.num_heads
    # Bytes of a number that is normalized: input and output, and centred in float32
    normalized = 2 * compute + _FLOAT32
    total = all_tokens = 0
    for num_tokens in _tokens_of_modalities(found):
        tokens, pairs = group * num_tokens, group * heads * num_tokens**2
        all_tokens += tokens
        # Of a block: two normalizations; queries, keys, values and context, each also
        # with transposed axes; weights, and in float32 logits and exponentials
        block = tokens * width * (2 * normalized + 8 * compute)
        block += pairs * (compute + 2 * _FLOAT32)
        if found.use_qk_norm:
            # The results of two more are transposed, too.
            block += 2 * tokens * width * (normalized + 2 * compute)
        if found.dropout_rate:
            # Two masks, of one byte for each number
            block += 2 * tokens * width
        if found.layer_scale is not None:
            block += 2 * tokens * width * compute
        # Before an MLP's activation, its tanh or error function, and after
        dense = 3 * compute * tokens * found.mlp_dim
        shared = 3 * compute * tokens * (found.shared_mlp_dim or 0)
        total += found.num_layers * block + tokens * width * normalized
        total += (found.num_layers - len(slots)) * dense + len(slots) * shared
    for index, router in found.routers.items():
        total += _bytes_of_experts(found, router, all_tokens, slots[index], compute)
    poolings = getattr(found, "poolings", {"": getattr(found, "pooling", "")})
    counts = zip(poolings.values(), _tokens_of_modalities(found), strict=True)
    # Keys and values of attention pooling, each also with transposed axes
    pooled = sum(num_tokens for pooling, num_tokens in counts if pooling == "map")
    total += 4 * compute * group * pooled * width
    if isinstance(found, ViT | LIMoE):
        total += compute * group * math.prod(found.image_shape)
    return total


def _bytes_of_experts(found, router, tokens, slots, compute):
    """Return the bytes that the experts of a block keep, and their router."""
    mlp_dim = found.expert_mlp_dim or found.mlp_dim
    mixes, is_half = router.mixes_tokens, compute != _FLOAT32
    # Logits, scores and probabilities of a sparse router; logits and weights of a soft
    logits = tokens * (slots if mixes else router.num_experts)
    total = 3 * _FLOAT32 * logits * (not isinstance(router, IdentityRouter))
    # Inputs and outputs of the experts; recomputed: only what follows dropout
    hidden = bool(found.expert_dropout_rate) if found.remat_experts else 3
    total += slots * compute * (2 * found.hidden_dim + hidden * mlp_dim)
    total += slots * mlp_dim * bool(found.expert_dropout_rate)
    has_slots = router.num_rows(tokens, training=True) is None
    by_product = found.dispatcher == "einsum" or (
        found.dispatcher == "auto" and has_slots and tokens < 64
    )
    # One-hot weights, and copies of a soft router's in half precision
    if is_half if mixes else by_product:
        total += 2 * compute * tokens * slots
    # The router's float32 copy of tokens in half precision
    return total + is_half * _FLOAT32 * tokens * found.hidden_dim


def optimizer_copies(optimizer):
    """Return how many copies of the weights an optimizer keeps, and its name."""
    given = optimizer
    optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "`optimizer` must be the name of one or a `keras.optimizers.Optimizer`. "
            f"Received: optimizer={given!r}. One without moments is 'sgd'."
        )
    # Some treat matrices, or large ones, differently.
    copies = set()
    for shape in ((7,), (7, 5), (7, 5, 3), (200, 150)):
        fresh = type(optimizer).from_config(optimizer.get_config())
        fresh.build([keras.Variable(keras.ops.zeros(shape), name="weight")])
        shapes = [tuple(v.shape) for v in fresh.variables if v.shape != ()]
        copies.add(len(shapes) if set(shapes) <= {shape} else None)
    if len(copies) > 1 or None in copies:
        raise ValueError(
            "`plan` counts optimizers that keep whole copies of all weights, such as "
            f"Adam, SGD or Lion. Received: optimizer={given!r}."
        )
    (copies,) = copies
    moments = "moment" if copies == 1 else "moments"
    return copies, f"{type(optimizer).__name__} with {copies} {moments}"
