"""Memory and communication of a model on every mesh of some devices."""

import math
import os
from typing import Any, NamedTuple

from keras_softmoe.checks import check_whole_numbers, is_number, quote
from keras_softmoe.distribution.sizes import model_size, optimizer_copies

# Two tensors are sent in the forward pass, and their gradients in the backward pass:
# slots to the experts, outputs of the experts to the images.
_ALL_TO_ALLS = 4

# Embeddings of captions are gathered for the loss, and again for the metrics, each of
# which also gathers from all devices the most similar image and its similarity.
_GATHERS_OF_PAIRS = 2

_FLOAT32 = 4

# Columns of the table, and their attributes
_COLUMNS = {
    "weights": "weights",
    "moments": "moments",
    "gradients": "gradients",
    "activations": "activations",
    "total": "total",
    "moved in a step": "moved",
}


class Transfer(NamedTuple):
    """A collective operation of a training step.

    Attributes:
        what: str, the tensors: `"block_1/moe: slots"`, for example.
        operation: str, `"all-to-all"`, `"all-gather"` or `"all-reduce"`.
        times: int, number of times in a step.
        bytes: int, size of its result on one device each time, as in the text of the
            compiled program.
        over: int, number of devices that take part in it.
    """

    what: str
    operation: str
    times: int
    bytes: int
    over: int

    @property
    def sent(self):
        """Int, bytes sent by a device in a step, if the devices form a ring."""
        passes = 2 if self.operation == "all-reduce" else 1
        return passes * self.times * self.bytes * (self.over - 1) // self.over


class MeshPlan(NamedTuple):
    """Memory and communication on a mesh. All bytes are those of one device.

    Attributes:
        shape: `(batch, experts)`, the `mesh_shape` of `expert_parallel`. The batch is
            sharded over all devices; experts are sharded over the second axis and
            replicated along the first. `(1, n)` denotes the papers' placement, one axis
            for both (no `mesh_shape`), and `(n, 1)` `data_parallel`.
        weights: int, bytes of the weights.
        moments: int, bytes of the optimizer's moments.
        gradients: int, bytes of the gradients.
        activations: int, bytes that the backward pass needs of the forward pass.
        transfers: tuple of `Transfer`, those of a training step.
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
    def sent(self):
        """Int, bytes sent by a device in a step, if the devices form rings."""
        return sum(transfer.sent for transfer in self.transfers)

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
        parameters: int, numbers in all weights.
        expert_parameters: int, those in kernels and biases of experts.
        devices: int, number of devices.
        memory: float, bytes of each.
        batch_size: int, images (or pairs) of a step, on all devices together.
        optimizer: str, its name and the number of values it keeps for each weight.
        meshes: tuple of `MeshPlan`, all possible ones, starting with the most replicas
            of the experts.
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
        columns = ("mesh", *_COLUMNS, "fits", "largest batch")
        rows = [columns]
        for mesh in self.meshes:
            sizes = (f"{getattr(mesh, name) / 1e9:.2f}" for name in _COLUMNS.values())
            fits = "yes" if mesh.total <= self.memory else "no"
            rows.append((mesh.label, *sizes, fits, f"{mesh.max_batch_size:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(
                cell.rjust(width) if index else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )
        return head + "\n".join(line.rstrip() for line in lines)


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

    Nothing is built: all numbers follow from the configuration. They are those of
    `expert_parallel` (and of `data_parallel`, where all devices have all experts).

    Counted are, on each device:

    - weights, exactly: experts and the slot parameters of soft routers are divided by
      the devices over which experts are sharded, all others are replicated;
    - moments: whole copies of the weights, as many as the optimizer keeps, in the dtype
      of the weights. Single numbers (the step) are left out;
    - gradients: one copy of the weights. All of them are counted as if held at once.
      (On PyTorch Keras' AdamW makes three more copies while it updates the weights,
      which are not counted; `training.Adam` makes none);
    - activations: tensors that the backward pass needs of the forward pass without
      rematerialization, for the images of the device and the slots of its experts, as
      measured for XLA on a CPU (in float32 the estimates were from 7 % less to 37 %
      more; in bfloat16 on a GPU of NVIDIA steps took 57 and 80 % of the whole plan;
      other devices were not measured). Numbers per token of width `D`, with `h` heads
      over `S` tokens: `3 D` for each normalization (`5 D` for those of queries and
      keys), `8 D + 3 h S` for attention, `3 H` for an MLP; per slot of an expert
      `2 D + 3 H` (`2 D` with `remat_experts`, except for one layer at a time); and the
      weights of routers;
    - moved bytes, of a training step, in which each MoE layer sends its slots (`E C D`
      numbers for each group of images in the dtype of computation, `C` being
      `slots_per_expert` of a soft router and the capacity in training of a sparse one)
      four times all-to-all: to the experts, back, and the same for the gradients. The
      gradients of replicated weights are summed over their replicas, in the dtype of
      the weights. Slot parameters are gathered before they are used, by one more sum. A
      LIMoE sums the gradients of weights that both modalities use separately for each
      of them. Its loss gathers the embeddings of all captions on each device (`B W`
      numbers in float32, of width `W`) and sums their gradients; its accuracies gather
      them again, and from each device, for each caption, the most similar image and its
      similarity. Left out are scalars, such as losses and metrics, also those of each
      pair, and the tokens of captions in a LIMoE with `shard_dense`, whose embeddings
      are sharded along their width.

    Args:
        preset: the name or directory of a preset (its backbone is counted), a live
            backbone or task, or a dict of arguments of a backbone, as in
            `evaluation.cost`.
        devices: int, number of devices.
        memory: float, bytes of memory of each device.
        batch_size: int, images (for a LIMoE: pairs) of a step on all devices together.
            Defaults to one group on each device, the smallest batch.
        optimizer: str or `keras.optimizers.Optimizer`. It must keep whole copies of the
            weights, as Adam (two), SGD with momentum or Lion (one) do.
        num_classes: int or `None`, classes of an additional head, see
            `evaluation.cost`.
        shard_dense: bool, whether dense kernels are sharded over the axis of the batch,
            as with `expert_parallel(shard_dense=True)`. They are then gathered in every
            step, and on two axes their gradients are summed whole along one axis and in
            shards along the other.
        **changes: arguments of the backbone to change and settings of its routers, as
            in `from_preset`, for example `dtype="mixed_bfloat16"`.

    Returns:
        `Plan`.

    Raises:
        ValueError: if the model cannot be counted (see `evaluation.cost`), if it routes
            the whole batch as one group, if the batch is not a whole number of groups
            on each device, or an argument is not among the accepted values.

    Source: the placement: V-MoE, figure 1; Soft MoE, section 2.3 ("Distributed
    model").

    Examples:
        >>> plan = ksm.distribution.plan("soft_moe_huge_patch14_256e_224", 64, 80e9)
        >>> print(plan)
        >>> [mesh.shape for mesh in plan.fitting]
    """
    check_whole_numbers(1, devices=devices)
    if not is_number(memory) or memory <= 0:
        raise ValueError(
            "`memory` must be a finite positive number, the bytes of each device. "
            f"Received: memory={quote(memory)}. For 80 GB pass `memory=80e9`."
        )
    copies, name = optimizer_copies(optimizer)
    model = model_size(preset, num_classes, **changes)
    smallest = devices * model.group_images
    if batch_size is None:
        batch_size = smallest
    check_whole_numbers(1, batch_size=batch_size)
    if batch_size % smallest:
        raise ValueError(
            "Each device needs whole groups of images, equally many. `batch_size` must "
            f"be a multiple of {smallest}: {devices} devices times "
            f"{model.group_images} images of a group. Received: "
            f"batch_size={batch_size}."
        )
    groups = batch_size // smallest
    # All devices have the whole of a dense model.
    counts = [moe.num_experts for moe in model.moe_layers] or [1]
    shared = math.gcd(devices, *counts)
    shapes = [
        (devices // experts, experts)
        for experts in range(1, shared + 1)
        if shared % experts == 0
    ]
    if shard_dense:
        width = model.hidden_dim
        shapes = [shape for shape in shapes if width % _dense_shards(shape) == 0]
    meshes = (
        _mesh_plan(model, shape, copies, groups, memory, shard_dense)
        for shape in shapes
    )
    return Plan(
        model.name,
        model.parameters,
        model.expert_parameters,
        devices,
        memory,
        batch_size,
        name,
        tuple(meshes),
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
    # The images of a device have as many slots as its experts.
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
        if experts > 1:
            slots, mu = groups * moe.slot_bytes, moe.slot_parameter_bytes
            yield Transfer(
                f"{moe.path}: slots", "all-to-all", _ALL_TO_ALLS, slots, experts
            )
            if mu:
                # Gathered by a sum, see `sharding.replicate`
                yield Transfer(
                    f"{moe.path}: slot parameters", "all-reduce", 1, mu, experts
                )
        if batch > 1:
            gradient = moe.expert_bytes // experts
            yield Transfer(
                f"{moe.path}: gradients of experts", "all-reduce", 1, gradient, batch
            )
    cut, kernels = _dense_shards(shape), model.dense_kernel_bytes
    if shard_dense and cut > 1:
        yield Transfer("dense kernels", "all-gather", 1, kernels, cut)
    if shard_dense and batch > 1 and experts > 1:
        # XLA first sums over the axis that shards them, and then keeps a shard.
        repeated -= kernels
        yield Transfer("gradients of dense kernels", "all-reduce", 1, kernels, batch)
        yield Transfer(
            "shards of gradients of dense kernels",
            "all-reduce",
            1,
            kernels // batch,
            experts,
        )
    if devices > 1:
        yield Transfer("other gradients", "all-reduce", 1, repeated, devices)
        yield from _of_pairs(model, devices, groups)


def _of_pairs(model, devices, groups):
    """Transfers of a contrastive loss."""
    if not model.embedding_bytes:
        return
    pairs = devices * groups * model.group_images
    embeddings, found = pairs * model.embedding_bytes, devices * pairs * _FLOAT32
    for tensors, operation, times, size in (
        # XLA sums over the devices first, then over the modalities.
        ("gradients of the second modality", "all-reduce", 1, model.shared_bytes),
        ("embeddings", "all-gather", _GATHERS_OF_PAIRS, embeddings),
        ("gradients of embeddings", "all-reduce", 1, embeddings),
        ("most similar images", "all-gather", _GATHERS_OF_PAIRS, found),
    ):
        yield Transfer(f"pairs: {tensors}", operation, times, size, devices)


# === Words ===


def _short(number):
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,}"
