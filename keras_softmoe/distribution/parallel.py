"""Expert parallelism and data parallelism, as distributions of Keras."""

import math
from collections.abc import Sequence

import keras

from keras_softmoe.checks import received
from keras_softmoe.distribution import layouts as rules, sharding_audit
from keras_softmoe.distribution.layouts import (
    BATCH_AXIS,
    EXPERT_AXIS,
    ONE_AXIS,
    TWO_AXES,
    PlacementError,
    layout_map,
)
from keras_softmoe.keras_adapter import data
from keras_softmoe.sharding.constraints import num_shards
from keras_softmoe.sharding.variables import process_index

_INSTEAD = {
    "tensorflow": (
        "On TensorFlow train replicas of the whole model, with "
        "`tf.distribute.MirroredStrategy` around building, compiling and `fit`"
    ),
    "torch": (
        "On PyTorch train replicas of the whole model, with "
        "`torch.nn.parallel.DistributedDataParallel` around it and a process per device"
    ),
}


def expert_parallel(
    mesh_shape: Sequence[int] | None = None,
    devices: Sequence | None = None,
    shard_dense: bool = False,
    layouts: dict | None = None,
    auto_shard_dataset: bool = True,
) -> keras.distribution.ModelParallel:
    """Shard the experts of mixtures over many devices.

    By default one axis of the mesh shards both the batch and the experts, as in the
    papers: with `n` devices each has `1 / n` of the images and of every layer's
    experts, and all other weights. The slots are sent to the experts and back. A batch
    needs at least `n * group_images` images, or all tokens are gathered.

    Build, compile and use a model under the distribution. Tasks of this library are
    checked before each run; for other models call `audit`. Several processes call the
    same methods with the same data in the same order, and draw the same initial
    weights. On PyTorch (Keras 3.16) each process has one device, and the mesh one axis.

    Args:
        mesh_shape: `None`, or `(batch, experts)`: a mesh in which the experts are
            sharded over `experts` devices, neighbours in `devices`, and replicated
            `batch` times. The batch is sharded over all of them.
        devices: sequence of str (`["cpu:0", ...]`), by default all devices.
        shard_dense: bool, whether the kernels of attention, dense MLPs and embeddings
            are sharded as well, along the width of a token by the batch axis.
        layouts: optional dict of rules, see `layout_map`.
        auto_shard_dataset: bool, whether several processes share each batch of their
            data. `False` if each process has its own rows, the same number in each.

    Returns:
        A distribution for `keras.distribution.set_distribution` or `with ....scope():`.

    Raises:
        ValueError: if `mesh_shape`, `devices` or a rule are not possible.
        NotImplementedError: if the installed Keras does not support it on this backend.

    Source: V-MoE, section 2 and appendix B ("expert parallelism"); Soft MoE, appendix
    on distributed training; GShard (Lepikhin et al. 2020), section 3.

    Examples:
        >>> with ksm.distribution.expert_parallel().scope():
        ...     model = ksm.models.ViTMoEBackbone.from_preset(name)
        ...     print(ksm.distribution.audit(model))
    """
    _check_backend("Sharding experts over devices", also_torch=True)
    devices = _check_devices(devices)
    if mesh_shape is None:
        mesh = keras.distribution.DeviceMesh((len(devices),), [BATCH_AXIS], devices)
    else:
        mesh_shape = _check_mesh_shape(mesh_shape, len(devices))
        backend = keras.backend.backend()
        if backend != "jax":
            raise NotImplementedError(
                "A mesh of batch times experts, whose axes together shard the batch, "
                f"is supported on JAX only. Received: {backend=}, {mesh_shape=}."
            )
        names = [BATCH_AXIS, EXPERT_AXIS]
        mesh = keras.distribution.DeviceMesh(mesh_shape, names, devices)
    return ExpertParallel(layout_map(mesh, shard_dense, layouts), auto_shard_dataset)


def data_parallel(
    devices: Sequence | None = None, auto_shard_dataset: bool = True
) -> keras.distribution.DataParallel:
    """Train replicas of a model, one on each device, with a share of each batch.

    Unlike in `keras.distribution.DataParallel` the last batch may have any size, and
    several processes share each batch evenly.

    Args:
        devices: see `expert_parallel`.
        auto_shard_dataset: see `expert_parallel`.

    Raises:
        NotImplementedError: if the installed Keras cannot do it on this backend.

    Examples:
        >>> with ksm.distribution.data_parallel().scope():
        ...     model = ksm.models.ViTMoEBackbone.from_preset(name)
    """
    _check_backend("Training replicas through `keras.distribution`")
    devices = _check_devices(devices)
    mesh = keras.distribution.DeviceMesh((len(devices),), [BATCH_AXIS], devices)
    return ReplicaParallel(mesh, auto_shard_dataset=auto_shard_dataset)


# === Batches of any size ===


class EachBatch:
    """Mixin of distributions that choose the layout of each batch by its size.

    A batch is sharded if the devices divide its rows, and replicated otherwise. Several
    processes share batches of a `tf.data.Dataset`, unless `auto_shard_dataset=False`.
    """

    # The axes of the mesh that shard a batch.
    batch_axes: str | tuple

    is_asked_for_each_batch = True

    # The number of rows of the next batch, if every process feeds all of them.
    _replicated_rows = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        data.ask_for_each_batch()

    @property
    def num_devices(self):
        """Int, number of devices over which a batch is sharded."""
        return int(self.device_mesh.devices.size)

    @property
    def process_id(self):
        """Int, the index of this process."""
        return process_index()

    def get_data_layout(self, data_shape):
        """Return the `TensorLayout` of data by the shape of this process' array."""
        others = [None] * (len(data_shape) - 1)
        replicated = self._layout([None] * len(data_shape), self.device_mesh)
        if not data_shape or data_shape[0] == self._replicated_rows:
            return replicated
        if data_shape[0] % (self.num_devices // self.num_processes) == 0:
            return self._layout([self.batch_axes, *others], self.device_mesh)
        if self.num_processes == 1:
            return replicated
        # Each device of a process gets all rows of the process.
        devices = self.device_mesh.devices.reshape(self.num_processes, -1)
        names = ["process", "device"]
        mesh = keras.distribution.DeviceMesh(devices.shape, names, devices)
        return self._layout(["process", *others], mesh)

    def distribute_dataset(self, dataset):
        """Return an iterable of this process' rows of all batches."""
        if self.num_processes == 1 or not self.auto_shard_dataset:
            return dataset
        return SharedDataset(dataset, self)


class SharedDataset:
    """Dataset of one process' rows of each batch of a dataset of whole batches."""

    def __init__(self, dataset, distribution):
        self._dataset = dataset
        self._distribution = distribution

    def __iter__(self):
        count, index = self._distribution.num_processes, self._distribution.process_id
        for batch in self._dataset:
            rows = int(keras.tree.flatten(batch)[0].shape[0])
            share = rows // count
            if share * count == rows:
                self._distribution._replicated_rows = None
                start = index * share
                yield keras.tree.map_structure(
                    lambda x, start=start, share=share: x[start : start + share], batch
                )
            else:
                # Keras chooses the layout of a batch right after drawing it.
                self._distribution._replicated_rows = rows
                yield batch
        self._distribution._replicated_rows = None

    def __getattr__(self, name):
        # Cardinality and element specification of the whole dataset.
        return getattr(self._dataset, name)


# === Distributions ===


class ExpertParallel(EachBatch, keras.distribution.ModelParallel):
    """Distribution of experts by a `layout_map`, see `expert_parallel`."""

    def __init__(self, layout_map, auto_shard_dataset=True):
        super().__init__(
            layout_map=layout_map,
            batch_dim_name=BATCH_AXIS,
            auto_shard_dataset=auto_shard_dataset,
        )
        self.layout_map = layout_map
        roles = TWO_AXES if EXPERT_AXIS in self.device_mesh.axis_names else ONE_AXIS
        self.batch_axes = roles.images
        self.num_expert_shards = num_shards(self.device_mesh, roles.experts)
        # Rules that have matched a path of any model under this distribution
        self.used_keys = set()
        # Shapes and layouts of variables, by their `name_in_optimizer`.
        self._shapes, self._layouts = {}, {}

    @property
    def num_model_replicas(self):
        """Int, the number of shards of a batch."""
        return self.num_devices

    def get_data_layout(self, data_shape):
        # With the first data, models are built. (A model that is built by its first
        # batch calls this again.) Rules for the outputs of layers are used later.
        if self.used_keys:
            outputs = {key for key in self.layout_map if key.endswith("/output")}
            problem = rules.unmatched_rules(self.layout_map, self.used_keys | outputs)
            if problem:
                raise PlacementError(problem)
        return super().get_data_layout(data_shape)

    def get_variable_layout(self, variable):
        """Return the `TensorLayout` of a variable, or raise `PlacementError`."""
        key = self._key(variable.path)
        if key is not None:
            layout = rules.fitted(key, self.layout_map[key], variable)
            if layout is None:
                return self._layout([None] * len(variable.shape), self.device_mesh)
            _check_divided(variable, layout)
            name = rules.name_in_optimizer(variable)
            self._shapes[name], self._layouts[name] = tuple(variable.shape), layout
            return layout
        # Some optimizers do not pass the variable of a moment to Keras.
        reference = self._layouts.get(rules.reference_name(variable, self._shapes))
        return reference or super().get_variable_layout(variable)

    def get_tensor_layout(self, path):
        key = self._key(path)
        return None if key is None else self.layout_map[key]

    def check_divides_experts(self, num_experts):
        """Raise `PlacementError` if the devices do not divide a number of experts."""
        shards = self.num_expert_shards
        if num_experts % shards:
            total = self.num_devices
            split = math.gcd(num_experts, total)
            raise PlacementError(
                f"{num_experts} experts do not divide among {shards} devices. Received:"
                f" num_experts={num_experts}, mesh={self.device_mesh}. Use a multiple "
                f"of {shards} experts, or on JAX replicate them: "
                f"`expert_parallel(mesh_shape=({total // split}, {split}))`."
            )

    def check_layer(self, layer):
        """Raise `PlacementError` if expert variables of a new layer are replicated."""
        sharding_audit.check_layer(layer, self)

    def check_model(self, model):
        """Raise `PlacementError` if variables of a model violate the rules."""
        sharding_audit.audit(model, self)
        if keras.backend.backend() == "torch":
            # On JAX a replicated variable is one for all processes.
            sharding_audit.check_equal_weights(model)

    def _key(self, path):
        """Return the key of the rule that matches a path, `None` without one."""
        keys = rules.matching_keys(self.layout_map, path)
        if len(keys) > 1:
            raise PlacementError(
                f"{rules.several_match(path, keys)} To replace a rule, use its key."
            )
        self.used_keys.update(keys)
        return keys[0] if keys else None

    def _layout(self, axes, mesh):
        return rules.JointLayout(axes, mesh)


class ReplicaParallel(EachBatch, keras.distribution.DataParallel):
    """Distribution of replicas over the axis `"batch"`, see `data_parallel`."""

    batch_axes = BATCH_AXIS

    def get_tensor_layout(self, path):
        # Slots have this layout anyway. `MoE` uses it to warn of groups that are split.
        if path.endswith("/slots_of_groups"):
            return self._layout([self.batch_axes, None, None, None], self.device_mesh)
        return super().get_tensor_layout(path)

    def _layout(self, axes, mesh):
        return keras.distribution.TensorLayout(tuple(axes), mesh)


def _check_divided(variable, layout):
    mesh = layout.device_mesh
    if len(layout.axes) != len(variable.shape):
        raise PlacementError(
            f"The rule for {variable.path!r} names {len(layout.axes)} axes, the "
            f"variable has {len(variable.shape)}. Received: axes={layout.axes}, "
            f"shape={tuple(variable.shape)}."
        )
    for size, axis in zip(variable.shape, layout.axes, strict=True):
        shards = num_shards(mesh, axis)
        if size % shards:
            raise PlacementError(
                f"{shards} devices must divide the axis of {variable.path!r} that is "
                f"sharded over them. Received: shape={tuple(variable.shape)}, "
                f"axes={layout.axes}, mesh={mesh}. `shard_dense=False` shards experts "
                "only."
            )


# === Backend, devices and mesh ===


def _check_backend(feature, also_torch=False):
    """Raise unless Keras has a feature on the backend in use."""
    backend = keras.backend.backend()
    if backend == "jax":
        return
    if backend == "torch" and also_torch and data.backend_distributes():
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "On PyTorch each device has a process, and they must find each other "
                "first: start the program with `torchrun` and call "
                "`keras.distribution.initialize()`. Received: no process group."
            )
        return
    needed = "the JAX backend (`KERAS_BACKEND=jax`)"
    if backend == "torch" and also_torch:
        needed += ", or on PyTorch Keras 3.16"
    why = "would silently run on one device"
    if backend == "torch" and data.backend_distributes():
        why = "does it in another way, which is not supported"
    raise NotImplementedError(
        f"{feature} needs {needed}: Keras {keras.__version__} on {backend!r} {why}. "
        f"{_INSTEAD.get(backend, 'Train on one device')} (guide `placing_experts`). "
        f"Received: backend={backend!r}."
    )


def _check_devices(devices):
    """Return the devices to use, a list of str. Defaults to all."""
    if devices is None:
        return keras.distribution.list_devices()
    devices = [devices] if isinstance(devices, str) else list(devices)
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(
            "`devices` must be different ones of `keras.distribution.list_devices()`, "
            f"at least one. {received(devices=devices)}"
        )
    known = keras.distribution.list_devices()
    if keras.backend.backend() == "torch" and sorted(devices) != sorted(known):
        raise ValueError(
            "On PyTorch `devices` must name the devices of all processes. Accepted: "
            f"{known}. {received(devices=devices)}"
        )
    return devices


def _check_mesh_shape(mesh_shape, num_devices):
    """Return the sizes (batch, experts) of a mesh of two axes."""
    try:
        batch, experts = mesh_shape
    except (TypeError, ValueError):
        batch = experts = 0
    is_pair = type(batch) is type(experts) is int and batch > 0
    if not is_pair or batch * experts != num_devices:
        counts = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        shapes = ", ".join(f"({num_devices // n}, {n})" for n in counts)
        raise ValueError(
            "`mesh_shape` must be a pair (batch, experts) of positive integers whose "
            f"product is the number of devices, {num_devices}. Accepted: "
            f"{shapes}, or `None` for one axis. Received: mesh_shape={mesh_shape!r}."
        )
    return batch, experts
