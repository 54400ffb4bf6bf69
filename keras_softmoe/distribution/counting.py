"""What a model keeps and computes, in bytes, from its configuration alone."""

from pathlib import Path
from typing import NamedTuple

import keras

from keras_softmoe.evaluation.configuration import (
    LIMOE,
    LIVE_SETTINGS,
    complete,
    configuration,
)
from keras_softmoe.evaluation.cost import cost
from keras_softmoe.evaluation.tally import dense, encoder
from keras_softmoe.routers import IdentityRouter, SoftRouter

_FLOAT32 = 4


class MoELayer(NamedTuple):
    """A mixture of experts, as far as its placement goes.

    Attributes:
        path: str, for example `"block_1/moe"`.
        num_experts: int.
        expert_bytes: int, kernels and biases of all experts.
        slot_parameter_bytes: int, `mu` of a soft router, 0 for the others.
        slot_bytes: int, what all slots of one group of images hold, which is what
            travels to the experts.
    """

    path: str
    num_experts: int
    expert_bytes: int
    slot_parameter_bytes: int
    slot_bytes: int


class Counted(NamedTuple):
    """A model, as far as its placement goes.

    Attributes:
        name: str.
        parameters: int, numbers in all weights.
        expert_parameters: int, those in kernels and biases of experts.
        weight_bytes: int, of all weights.
        dense_kernel_bytes: int, of the kernels that `shard_dense` cuts.
        hidden_dim: int, the axis along which it cuts them.
        moe_layers: tuple of `MoELayer`.
        group_images: int, images (or pairs) that are routed together.
        activation_bytes: int, what the backward pass of a group needs of the forward
            pass, slots at the experts included.
        shared_bytes: int, of the weights that images and captions use in turn, 0 where
            there are images only.
        embedding_bytes: int, of the embedding of one image or caption that a
            contrastive loss compares, 0 without one.
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


def count(model, num_classes=None, **changes):
    """Count a model, without building it, for a placement.

    Args:
        model: preset, backbone, task or dict of arguments, as in `evaluation.cost`.
        num_classes: as in `evaluation.cost`.
        **changes: as in `evaluation.cost`.

    Returns:
        `Counted`.

    Raises:
        ValueError: as `evaluation.cost`, or if a group is the whole batch.
    """
    total = cost(model, num_classes, **changes)
    kind, config, classes, _ = configuration(model)
    settings = {name: changes.pop(name) for name in LIVE_SETTINGS if name in changes}
    a = complete(kind, {**config, **changes}, settings)
    if a.group_images is None:
        raise ValueError(
            "A group that is the whole batch cannot be divided among devices. Received:"
            f" group_images={a.group_images}. Pass `group_images=`, the images that are"
            " routed together."
        )
    policy = keras.dtype_policies.get(a.dtype or keras.config.dtype_policy())
    a.variable_bytes = _itemsize(policy.variable_dtype)
    a.compute_bytes = _itemsize(policy.compute_dtype)
    a.is_limoe = kind == LIMOE
    a.tokens_of = _tokens_of(a)
    a.num_classes = classes if num_classes is None else num_classes
    expert = dense(a.hidden_dim, a.mlp_dim) + dense(a.mlp_dim, a.hidden_dim)
    moe_layers = tuple(
        _moe_layer(a, block, router, expert.weights)
        for block, router in zip(sorted(a.moe_layers), a.routers, strict=True)
    )
    expert_parameters = sum(r.num_experts for r in a.routers) * expert.weights
    # Of all blocks, without what mixes experts
    shared = encoder(a, *a.tokens_of).weights - expert_parameters
    return Counted(
        name=_name(model, config),
        parameters=total.parameters,
        expert_parameters=expert_parameters,
        weight_bytes=total.weight_bytes,
        dense_kernel_bytes=a.variable_bytes * _dense_kernels(a),
        hidden_dim=a.hidden_dim,
        moe_layers=moe_layers,
        group_images=a.group_images,
        activation_bytes=_activations(a),
        shared_bytes=a.variable_bytes * shared if a.is_limoe else 0,
        # In float32 whatever the dtype of computation
        embedding_bytes=_FLOAT32 * a.embedding_dim if a.is_limoe else 0,
    )


def _name(model, config):
    if isinstance(model, str | Path):
        return Path(model).name
    return getattr(model, "name", None) or config.get("name") or "model"


def _itemsize(dtype):
    return {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}[dtype]


def _tokens_of(a):
    """Tokens of each modality, which attend to their own kind only."""
    if a.is_limoe:
        return (a.num_patches, a.sequence_length)
    return (a.num_patches + (a.pooling == "token"),)


def _poolings(a):
    return (a.image_pooling, a.text_pooling) if a.is_limoe else (a.pooling,)


def _moe_layer(a, block, router, expert_numbers):
    soft = isinstance(router, SoftRouter)
    slots = _slots(a, router)
    learns = soft and "soft" in (router.dispatch, router.combine)
    return MoELayer(
        path=f"block_{block}/moe",
        num_experts=router.num_experts,
        expert_bytes=a.variable_bytes * router.num_experts * expert_numbers,
        slot_parameter_bytes=_FLOAT32 * a.hidden_dim * slots if learns else 0,
        slot_bytes=a.compute_bytes * a.hidden_dim * slots,
    )


def _slots(a, router):
    """Slots of all experts for one group, in training."""
    group_tokens = a.group_images * sum(a.tokens_of)
    if isinstance(router, SoftRouter):
        return router.num_experts * router.slots_per_expert
    if isinstance(router, IdentityRouter):
        return group_tokens
    return router.num_experts * router.capacity(group_tokens, training=True)


def _dense_kernels(a):
    """Numbers in the kernels that `layouts.DENSE_RULES` name."""
    attention, mlp = 4 * a.hidden_dim**2, 2 * a.hidden_dim * a.mlp_dim
    maps = _poolings(a).count("map")
    embeddings = a.patch_numbers + (a.vocabulary_size if a.is_limoe else 0)
    mlps = a.num_layers - len(a.routers) + maps
    return embeddings * a.hidden_dim + (a.num_layers + maps) * attention + mlps * mlp


# === Activations ===
#
# What XLA was seen to keep from the forward to the backward pass, without
# rematerialization (JAX 0.10 on a CPU, from its buffer assignments). Per token of width
# D, with h heads over S tokens:
#
# - a normalization: input, output and, in float32, the centred input: 3 D; that of
#   queries or keys, whose results take another order of axes: 5 D;
# - attention: query, key, value and context, each also in the order of axes that its
#   product wants: 8 D; logits and exponentials in float32, weights: 3 h S;
# - an MLP, or an expert for each of its slots: before GELU, its tanh, after: 3 H;
# - a slot: what went in and what came out: 2 D;
# - a soft router: logits, dispatch and combine weights in float32: 3 E C; a sparse one:
#   logits, probabilities and scores in float32: 3 E; one-hot weights where they are
#   multiplied: 2 E C.
#
# Left out are what lives during one operation only, embeddings of whole images and
# all that has no token axis.


def _activations(a):
    """Bytes for a group of images (or pairs)."""
    images = a.group_images
    token = 0
    for num_tokens, pooling in zip(a.tokens_of, _poolings(a), strict=True):
        token += images * num_tokens * _blocks(a, num_tokens)
        # After the last normalization, keys and values in both orders
        if pooling == "map":
            token += images * num_tokens * 4 * a.compute_bytes * a.hidden_dim
    patches = images * a.num_patches * a.compute_bytes * a.patch_numbers
    head = images * 3 * _FLOAT32 * (a.num_classes or 0)
    return token + patches + head + sum(_mixture(a, router) for router in a.routers)


def _blocks(a, num_tokens):
    """Bytes for a token, over all blocks, without experts."""
    c, width = a.compute_bytes, a.hidden_dim
    norm = (2 * c + _FLOAT32) * width
    attention = 8 * c * width + (c + 2 * _FLOAT32) * a.num_heads * num_tokens
    # A mask of one byte after attention, and after the MLP
    dropout = 2 * width if a.dropout_rate else 0
    block = 2 * norm + attention + dropout
    if a.use_qk_norm:
        block += 2 * (norm + 2 * c * width)
    num_mlps = a.num_layers - len(a.routers)
    return a.num_layers * block + num_mlps * 3 * c * a.mlp_dim + norm


def _mixture(a, router):
    """Bytes for a group of images in a mixture of experts."""
    c, slots = a.compute_bytes, _slots(a, router)
    group_tokens = a.group_images * sum(a.tokens_of)
    is_soft = isinstance(router, SoftRouter)
    # The rule of `layers.MoE`
    multiplies = is_soft or a.dispatcher == "einsum"
    multiplies = multiplies or (a.dispatcher == "auto" and group_tokens < 64)
    per_slot = 2 * c * a.hidden_dim
    if not a.remat_experts:
        per_slot += 3 * c * a.mlp_dim
    if a.expert_dropout_rate:
        # Masks of one byte; the activations that they leave are kept in any case.
        per_slot += a.mlp_dim * (1 + c * bool(a.remat_experts))
    scores = slots if is_soft else router.num_experts
    per_token = 3 * _FLOAT32 * scores
    if c != _FLOAT32:
        # The router's copy of the tokens, and weights in the dtype of the tokens
        per_token += _FLOAT32 * a.hidden_dim + (2 * c * slots if multiplies else 0)
    elif multiplies and not is_soft:
        per_token += 2 * c * slots
    return slots * per_slot + group_tokens * per_token


# === Optimizers ===


def optimizer_copies(optimizer):
    """How often an optimizer keeps the size of the weights, and what it is called.

    Args:
        optimizer: str or `keras.optimizers.Optimizer`. One that is in use stays as it
            is.

    Returns:
        `(copies, name)`: int and str.

    Raises:
        ValueError: if it is none, or keeps something else than whole copies.
    """
    given = optimizer
    optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "`optimizer` is the name of one or a `keras.optimizers.Optimizer`. "
            f"Received: optimizer={given!r}. One that keeps nothing is 'sgd'."
        )
    # Some treat matrices in another way.
    copies = {_copies_of(optimizer, shape) for shape in ((7,), (7, 5), (7, 5, 3))}
    if len(copies) > 1 or None in copies:
        raise ValueError(
            "`plan` counts optimizers that keep whole copies of all weights, such as "
            f"Adam, SGD or Lion. Received: optimizer={given!r}."
        )
    (copies,) = copies
    moments = "moment" if copies == 1 else "moments"
    return copies, f"{type(optimizer).__name__} with {copies} {moments}"


def _copies_of(optimizer, shape):
    """Variables in the shape of a weight; `None` if there are others."""
    optimizer = type(optimizer).from_config(optimizer.get_config())
    optimizer.build([keras.Variable(keras.ops.zeros(shape), name="weight")])
    shapes = [tuple(v.shape) for v in optimizer.variables if v.shape != ()]
    return len(shapes) if set(shapes) <= {shape} else None
