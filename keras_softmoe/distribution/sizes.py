"""Sizes of a model in bytes, before it is built."""

from typing import NamedTuple

import keras

from keras_softmoe.architecture import LIMoE, TwoTowers
from keras_softmoe.evaluation import cost
from keras_softmoe.evaluation.architectures import described
from keras_softmoe.layer_cost import ITEMSIZE

_FLOAT32 = ITEMSIZE["float32"]


class MoELayer(NamedTuple):
    """Sizes of a mixture of experts.

    Attributes:
        path: str, for example `"block_1/moe"`.
        num_experts: int.
        expert_bytes: int, kernels and biases of all experts.
        slot_parameter_bytes: int, `mu` of a soft router, 0 for the others.
        slot_bytes: int, of all slots of one group of images, which are sent to the
            experts.
    """

    path: str
    num_experts: int
    expert_bytes: int
    slot_parameter_bytes: int
    slot_bytes: int


class ModelSize(NamedTuple):
    """Sizes that `plan` needs.

    Attributes:
        name: str.
        parameters: int, numbers in all weights.
        expert_parameters: int, those in kernels and biases of experts.
        weight_bytes: int, of all weights.
        dense_kernel_bytes: int, of the kernels that `shard_dense` shards.
        hidden_dim: int, size of the axis along which it shards them.
        moe_layers: tuple of `MoELayer`.
        group_images: int, images (or pairs) that are routed together.
        activation_bytes: int, activations of a group that the backward pass needs,
            slots at the experts included.
        shared_bytes: int, of weights shared by both modalities, 0 without pairs.
        embedding_bytes: int, of the embedding of one image or caption in a contrastive
            loss, 0 without one.
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
    """Return the sizes of a model, without building it.

    The activations are those that XLA keeps from the forward to the backward pass,
    without rematerialization (JAX 0.10 on a CPU, from its buffer assignments), by the
    `cost` of each layer. Left out are temporary tensors of one operation, embeddings of
    whole images and all tensors without a token axis.

    Args:
        model: preset, backbone, task or dict of arguments, as in `evaluation.cost`.
        num_classes: as in `evaluation.cost`.
        **changes: as in `evaluation.cost`.

    Returns:
        `ModelSize`.

    Raises:
        ValueError: as `evaluation.cost`, or if a group is the whole batch.
    """
    total = cost(model, num_classes, **changes)
    found, name, num_classes, _ = described(model, num_classes, **changes)
    if isinstance(found, TwoTowers):
        raise ValueError(
            "Two towers share nothing, and each has its own groups. Received: "
            f"model={model!r}. Plan each tower by itself."
        )
    group_images = found.group_images
    if group_images is None:
        raise ValueError(
            "A group that is the whole batch cannot be divided among devices. Received:"
            f" group_images={group_images}. Pass `group_images=`, the images that are"
            " routed together."
        )
    policy = keras.dtype_policies.get(found.dtype or keras.config.dtype_policy())
    variable = ITEMSIZE[policy.variable_dtype]
    compute = ITEMSIZE[policy.compute_dtype]
    layers = found.cost(training=True)
    activations = (
        compute * layers.kept
        + _FLOAT32 * layers.kept_float32
        + layers.kept_bytes
        # Logits of classes, their exponentials and gradients
        + group_images * 3 * _FLOAT32 * (num_classes or 0)
    )
    expert_parameters = sum(m.expert_weights for m in layers.mixtures)
    shared_bytes = embedding_bytes = 0
    if isinstance(found, LIMoE):
        shared_bytes = variable * (_encoder_weights(found) - expert_parameters)
        # In float32 under any policy
        embedding_bytes = _FLOAT32 * found.embedding_dim
    return ModelSize(
        name=name,
        parameters=total.parameters,
        expert_parameters=expert_parameters,
        weight_bytes=total.weight_bytes,
        dense_kernel_bytes=variable * layers.sharded_kernels,
        hidden_dim=found.hidden_dim,
        moe_layers=tuple(
            MoELayer(
                path=mixture.name,
                num_experts=mixture.num_experts,
                expert_bytes=variable * mixture.expert_weights,
                slot_parameter_bytes=_FLOAT32 * mixture.slot_weights,
                slot_bytes=compute * mixture.slots * mixture.slot_width,
            )
            for mixture in layers.mixtures
        ),
        group_images=group_images,
        activation_bytes=activations,
        shared_bytes=shared_bytes,
        embedding_bytes=embedding_bytes,
    )


def _encoder_weights(limoe):
    """Return the number of weights of the encoder, which both modalities share."""
    tokens = (1, 1, limoe.hidden_dim)
    return limoe.layers().encoder.cost({"image": tokens, "text": tokens}).weights


# === Optimizers ===


def optimizer_copies(optimizer):
    """Return how many copies of the weights an optimizer keeps, and its name.

    Args:
        optimizer: str or `keras.optimizers.Optimizer`. It is not changed.

    Returns:
        `(copies, name)`: int and str.

    Raises:
        ValueError: if it is not an optimizer, or keeps other variables than whole
            copies.
    """
    given = optimizer
    optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "`optimizer` must be the name of one or a `keras.optimizers.Optimizer`. "
            f"Received: optimizer={given!r}. One without moments is 'sgd'."
        )
    # Some treat matrices, or large ones, differently.
    shapes = ((7,), (7, 5), (7, 5, 3), (200, 150))
    copies = {_copies_of(optimizer, shape) for shape in shapes}
    if len(copies) > 1 or None in copies:
        raise ValueError(
            "`plan` counts optimizers that keep whole copies of all weights, such as "
            f"Adam, SGD or Lion. Received: optimizer={given!r}."
        )
    (copies,) = copies
    moments = "moment" if copies == 1 else "moments"
    return copies, f"{type(optimizer).__name__} with {copies} {moments}"


def _copies_of(optimizer, shape):
    """Return the number of variables of the shape; `None` if others exist."""
    optimizer = type(optimizer).from_config(optimizer.get_config())
    optimizer.build([keras.Variable(keras.ops.zeros(shape), name="weight")])
    shapes = [tuple(v.shape) for v in optimizer.variables if v.shape != ()]
    return len(shapes) if set(shapes) <= {shape} else None
