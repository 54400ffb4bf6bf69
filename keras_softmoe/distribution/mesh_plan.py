"""Memory and communication of a model on every mesh of some devices."""

import math
import os
from typing import Any, NamedTuple

from keras_softmoe.checks import check_numbers, check_whole_numbers, received, table
from keras_softmoe.distribution.sizes import model_size, optimizer_copies

_SIZES = ("weights", "moments", "gradients", "activations", "total", "moved")


class Transfer(NamedTuple):
    """A collective operation of a training step."""

    # For example "block_1/moe: slots"
    what: str
    # "all-to-all", "all-gather" or "all-reduce"
    operation: str
    # In a step, and the bytes of the result on one device each time
    times: int
    bytes: int
    # Number of devices that take part in it
    over: int


class MeshPlan(NamedTuple):
    """Memory and communication on a mesh, in bytes on one device.

    Attributes:
        shape: `(batch, experts)`, the `mesh_shape` of `expert_parallel`. The batch is
            sharded over all devices, experts over the second axis. `(1, n)` is the
            papers' placement (no `mesh_shape`), and `(n, 1)` `data_parallel`.
        weights, moments, gradients, activations: int.
        transfers: tuple of `Transfer`, all of a training step.
        max_batch_size: int, the largest global batch that fits, 0 if none does.
    """

    shape: tuple
    weights: int
    moments: int
    gradients: int
    activations: int
    transfers: tuple
    max_batch_size: int

    @property
    def total(self):
        """Int, bytes of weights, moments, gradients and activations."""
        return self.weights + self.moments + self.gradients + self.activations

    @property
    def moved(self):
        """Int, bytes of the results of all collective operations of a step."""
        return sum(transfer.times * transfer.bytes for transfer in self.transfers)

    @property
    def label(self):
        """Str, name of the mesh in the table."""
        batch, experts = self.shape
        if experts == 1:
            return f"{batch}, data parallel"
        return f"{experts}, one axis" if batch == 1 else f"{batch} x {experts}"


class Plan(NamedTuple):
    """Plan of a model on some devices. Prints as a table.

    Attributes:
        name: str, of the model.
        parameters, expert_parameters: int, numbers in all weights, and in experts'.
        devices: int, number of devices.
        memory: float, bytes of each.
        batch_size: int, images (or pairs) of a step, on all devices together.
        optimizer: str, its name and the number of values it keeps for each weight.
        meshes: tuple of `MeshPlan`, those with the most replicas of experts first.
    """

    name: str
    parameters: int
    expert_parameters: int
    devices: int
    memory: float
    batch_size: int
    optimizer: str
    meshes: tuple

    @property
    def fitting(self):
        """Tuple of `MeshPlan`, the meshes on which the batch fits."""
        return tuple(mesh for mesh in self.meshes if mesh.total <= self.memory)

    def __str__(self):
        head = (
            f"{self.name}: {_short(self.parameters)} parameters, "
            f"{_short(self.expert_parameters)} of them in experts\n"
            f"{self.devices} devices of {self.memory / 1e9:g} GB, batches of "
            f"{self.batch_size}, {self.optimizer}; GB of each device\n"
        )
        rows = [("mesh", *_SIZES[:-1], "moved in a step", "fits", "largest batch")]
        for mesh in self.meshes:
            sizes = (f"{getattr(mesh, name) / 1e9:.2f}" for name in _SIZES)
            fits = "yes" if mesh.total <= self.memory else "no"
            rows.append((mesh.label, *sizes, fits, f"{mesh.max_batch_size:,}"))
        return head + table(rows)


def plan(
    preset: str | os.PathLike,
    devices: int,
    memory: float,
    *,
    batch_size: int | None = None,
    optimizer: Any = "adam",
    num_classes: int | None = None,
    shard_dense: bool = False,
    **changes,
) -> Plan:
    """Plan the training of a model on some devices: memory and communication.

    All numbers follow from the configuration, for `expert_parallel` on each possible
    mesh and for `data_parallel`. Weights and moments are exact, activations estimated
    (from 7 % less to 37 % more than XLA keeps on a CPU, in float32).

    Args:
        preset: name of a preset, model or dict of arguments, as in `evaluation.cost`.
        devices: int, number of devices.
        memory: float, bytes of memory of each device.
        batch_size: int, images (or pairs) of a step on all devices, default one group.
        optimizer: str or optimizer that keeps whole copies of weights: Adam, SGD, Lion.
        num_classes: int or `None`, classes of an additional head.
        shard_dense: bool, as in `expert_parallel`.
        **changes: as in `from_preset`, for example `dtype="mixed_bfloat16"`.

    Raises:
        ValueError: if a model cannot be counted, or a batch has no equal groups.

    Source: the placement: V-MoE, figure 1; Soft MoE, section 2.3.

    Examples:
        >>> plan = ksm.distribution.plan("soft_moe_huge_patch14_256e_224", 64, 80e9)
        >>> print(plan)
        >>> [mesh.shape for mesh in plan.fitting]
    """
    check_whole_numbers(1, devices=devices)
    check_numbers(over=0, memory=memory)
    copies, name = optimizer_copies(optimizer)
    model = model_size(preset, num_classes, **changes)
    smallest = devices * model.group_images
    batch_size = smallest if batch_size is None else batch_size
    check_whole_numbers(1, batch_size=batch_size)
    if batch_size % smallest:
        raise ValueError(
            f"`batch_size` must be a multiple of {smallest}: {devices} devices times "
            f"{model.group_images} images of a group. {received(batch_size=batch_size)}"
        )
    groups = batch_size // smallest
    # All devices have the whole of a dense model.
    counts = [moe.num_experts for moe in model.moe_layers] or [1]
    shared = math.gcd(devices, *counts)
    shapes = [(devices // n, n) for n in range(1, shared + 1) if shared % n == 0]
    if shard_dense:
        shapes = [s for s in shapes if model.hidden_dim % _dense_shards(s) == 0]
    return Plan(
        name=model.name,
        parameters=model.parameters,
        expert_parameters=model.expert_parameters,
        devices=devices,
        memory=memory,
        batch_size=batch_size,
        optimizer=name,
        meshes=tuple(
            _mesh_plan(model, s, copies, groups, memory, shard_dense) for s in shapes
        ),
    )


def _dense_shards(shape):
    """Return the number of devices along the axis that shards dense kernels."""
    batch, experts = shape
    return experts if batch == 1 else batch


def _mesh_plan(model, shape, copies, groups, memory, shard_dense):
    batch, experts = shape
    of_experts = sum(m.expert_bytes + m.slot_parameter_bytes for m in model.moe_layers)
    of_dense = model.dense_kernel_bytes if shard_dense else 0
    weights = model.weight_bytes - of_experts - of_dense
    weights += of_experts // experts + of_dense // _dense_shards(shape)
    kept = (2 + copies) * weights
    # A device has one share of the images, and its experts the same number of slots.
    fitting = max(0, int((memory - kept) // model.activation_bytes))
    return MeshPlan(
        shape,
        weights=weights,
        moments=copies * weights,
        gradients=weights,
        activations=groups * model.activation_bytes,
        transfers=tuple(_transfers(model, shape, groups, shard_dense)),
        max_batch_size=fitting * batch * experts * model.group_images,
    )


def _transfers(model, shape, groups, shard_dense):
    batch, experts = shape
    devices = batch * experts
    repeated = model.weight_bytes
    for moe in model.moe_layers:
        repeated -= moe.expert_bytes
        slots, mu = groups * moe.slot_bytes, moe.slot_parameter_bytes
        if experts > 1:
            # Slots to the experts, outputs to the images, and the gradients of both.
            yield Transfer(f"{moe.path}: slots", "all-to-all", 4, slots, experts)
        if experts > 1 and mu:
            # Gathered by a sum, see `sharding.replicate`.
            what = f"{moe.path}: slot parameters"
            yield Transfer(what, "all-reduce", 1, mu, experts)
        if batch > 1:
            what, size = f"{moe.path}: gradients of experts", moe.expert_bytes
            yield Transfer(what, "all-reduce", 1, size // experts, batch)
    shards, kernels = _dense_shards(shape), model.dense_kernel_bytes
    if shard_dense and shards > 1:
        yield Transfer("dense kernels", "all-gather", 1, kernels, shards)
    if shard_dense and batch > 1 and experts > 1:
        # XLA first sums over the axis that shards them, and then keeps a shard.
        repeated -= kernels
        what = "gradients of dense kernels"
        yield Transfer(what, "all-reduce", 1, kernels, batch)
        yield Transfer(f"shards of {what}", "all-reduce", 1, kernels // batch, experts)
    if devices > 1:
        yield Transfer("other gradients", "all-reduce", 1, repeated, devices)
    if devices > 1 and model.embedding_bytes:
        # A contrastive loss. Embeddings are gathered for the loss and again for the
        # metrics, with the most similar image and its similarity in float32. XLA sums
        # gradients over the devices first, then over the modalities.
        pairs = devices * groups * model.group_images
        embeddings, found = pairs * model.embedding_bytes, 4 * devices * pairs
        for tensors, operation, times, size in (
            ("gradients of the second modality", "all-reduce", 1, model.shared_bytes),
            ("embeddings", "all-gather", 2, embeddings),
            ("gradients of embeddings", "all-reduce", 1, embeddings),
            ("most similar images", "all-gather", 2, found),
        ):
            yield Transfer(f"pairs: {tensors}", operation, times, size, devices)


def _short(number):
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,}"
