"""Expert parallelism and data parallelism, as distributions of Keras."""

from collections.abc import Sequence

import keras

from keras_softmoe.distribution.batches import EachBatch
from keras_softmoe.distribution.layouts import (
    BATCH_AXIS,
    EXPERT_AXIS,
    ONE_AXIS,
    TWO_AXES,
    JointLayout,
    PlacementError,
    fitted,
    layout_map,
    matching_keys,
    name_in_optimizer,
    reference_name,
    several_match,
    unmatched_rules,
)
from keras_softmoe.distribution.sharding_audit import (
    audit,
    check_equal_weights,
    check_layer,
)
from keras_softmoe.keras_adapter.distributions import backend_distributes
from keras_softmoe.sharding.constraints import num_shards

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
    experts, and all other weights. In a mixture of experts the slots are sent to the
    experts and back, by two all-to-alls forward and two backward; expert weights are
    never sent. Optimizer moments are sharded like their variables.

    Models built under the distribution are checked: an expert variable or moment that
    is replicated on every device, and a rule without a match, are errors, see `audit`.
    In any model layers are checked when they are built, and rules with the first data.
    The tasks of this library are checked as a whole when they are created, and all its
    models, moments included, before each `fit`, `evaluate` or `predict`; for other
    models call `audit(model)`. Use a model under the distribution it was built under:
    elsewhere the experts' weights would be sent.

    Where several processes share a model, all of them call the same methods with the
    same data in the same order (shuffle with a seed), and draw the same initial weights
    (`keras.utils.set_random_seed`). `predict` returns all rows to each of them. Save
    with `save_to_preset`: Keras' `save` supports one process only.

    On JAX a process may have several devices. On PyTorch, from Keras 3.16 on, each has
    one, after `keras.distribution.initialize`, and the mesh has one axis. Data are
    whole batches in each process, of which it takes its rows: `tf.data` datasets, and
    for the tasks of this library arrays, too. For a process with rows of its own, in
    any form, set `auto_shard_dataset=False`.

    Groups of several images must divide among the devices: with `n` devices a batch
    needs at least `n * group_images` images, or all tokens are gathered, with a
    warning. The last batch may have any size.

    Args:
        mesh_shape: `None`, or `(batch, experts)`: a mesh in which the experts are
            sharded over `experts` devices and replicated `batch` times, and the batch
            is sharded over all `batch * experts` devices. For more devices than
            experts, or slow connections between hosts: devices along the second axis
            are neighbours.
        devices: sequence of str, for example `["cpu:0", "cpu:1"]`. Defaults to
            `keras.distribution.list_devices()`.
        shard_dense: bool, whether the kernels of attention, dense MLPs and embeddings
            are sharded as well, along the width of a token by the batch axis. They are
            gathered where needed: for models with a large dense part.
        layouts: optional dict from a regular expression, which must match the whole
            path of a variable, to a tuple of axes of the mesh (`"batch"`, `"expert"`,
            or `None`), one for each axis of the variable: additional rules, or the
            replacement of a rule of this library with the same key.
        auto_shard_dataset: bool, whether several processes share each batch of a
            `tf.data.Dataset`. `False` if each has its own rows, equally many.

    Returns:
        `keras.distribution.ModelParallel`. Use it with `keras.distribution.
        set_distribution(...)` or `with ....scope():` while the model is built, trained
        and used.

    Raises:
        ValueError: if `mesh_shape` does not fit the devices, or a rule is given twice.
            On PyTorch, if processes have not found each other, `devices` are not those
            of all of them, or (before a run) their weights differ.
        NotImplementedError: if the installed Keras does not support it on this backend.

    Under it, building raises `PlacementError` for a number of experts that the
    devices do not divide, before any weight is created.

    Source: V-MoE, section 2 and appendix B ("expert parallelism"); Soft MoE, appendix
    on distributed training; GShard (Lepikhin et al. 2020), section 3.

    Examples:
        >>> # On a machine without accelerators:
        >>> # XLA_FLAGS=--xla_force_host_platform_device_count=8 KERAS_BACKEND=jax
        >>> distribution = ksm.distribution.expert_parallel()
        >>> with distribution.scope():
        ...     model = ksm.models.ViTMoEBackbone.from_preset(
        ...         "soft_moe_tiny_patch4_16e_32_glyphs"
        ...     )
        ...     print(ksm.distribution.audit(model))
    """
    _check_backend("Sharding experts over devices", also_torch=True)
    devices = _check_devices(devices)
    if mesh_shape is None:
        mesh = keras.distribution.DeviceMesh((len(devices),), [BATCH_AXIS], devices)
    else:
        mesh_shape = _check_mesh_shape(mesh_shape, len(devices))
        _check_two_axes()
        mesh = keras.distribution.DeviceMesh(
            mesh_shape, [BATCH_AXIS, EXPERT_AXIS], devices
        )
    return ExpertParallel(
        layout_map(mesh, shard_dense, layouts), auto_shard_dataset=auto_shard_dataset
    )


def data_parallel(
    devices: Sequence | None = None, auto_shard_dataset: bool = True
) -> keras.distribution.DataParallel:
    """Train replicas of a model, one on each device, with a share of each batch.

    As `keras.distribution.DataParallel`, but the last batch may have any size and
    several processes share each batch evenly. Routing is local to each device: no
    tokens are exchanged, provided that the devices divide the number of groups.

    Args:
        devices: sequence of str. Defaults to `keras.distribution.list_devices()`.
        auto_shard_dataset: see `expert_parallel`.

    Returns:
        `keras.distribution.DataParallel`.

    Raises:
        NotImplementedError: if the installed Keras cannot do it on this backend.

    Examples:
        >>> with ksm.distribution.data_parallel().scope():
        ...     model = ksm.models.ViTMoEBackbone.from_preset(
        ...         "vit_tiny_patch4_32_glyphs"
        ...     )
    """
    _check_backend("Training replicas through `keras.distribution`")
    devices = _check_devices(devices)
    mesh = keras.distribution.DeviceMesh((len(devices),), [BATCH_AXIS], devices)
    return ReplicaParallel(mesh, auto_shard_dataset=auto_shard_dataset)


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
        # With the first data, models are built. A model that is built by its first
        # batch calls this again.
        if self.used_keys:
            # Rules for the output of a layer are used later, when it is called
            outputs = {key for key in self.layout_map if key.endswith("/output")}
            problem = unmatched_rules(self.layout_map, self.used_keys | outputs)
            if problem:
                raise PlacementError(problem)
        return super().get_data_layout(data_shape)

    def get_variable_layout(self, variable):
        """Return the `TensorLayout` of a variable, by its path.

        Raises:
            PlacementError: if several rules match the path, or the devices do not
                divide an axis that a rule shards.
        """
        key = self._key(variable.path)
        if key is not None:
            layout = fitted(key, self.layout_map[key], variable)
            if layout is None:
                return self._layout([None] * len(variable.shape), self.device_mesh)
            _check_divided(variable, layout)
            name = name_in_optimizer(variable)
            self._shapes[name], self._layouts[name] = tuple(variable.shape), layout
            return layout
        # Some optimizers do not pass the variable of a moment to Keras.
        reference = self._layouts.get(reference_name(variable, self._shapes))
        return reference or super().get_variable_layout(variable)

    def get_tensor_layout(self, path):
        key = self._key(path)
        return None if key is None else self.layout_map[key]

    def check_divides_experts(self, num_experts):
        """Raise `PlacementError` if the devices do not divide a number of experts."""
        shards = self.num_expert_shards
        if num_experts % shards:
            split = [n for n in range(1, self.num_devices + 1) if num_experts % n == 0]
            split = [n for n in split if self.num_devices % n == 0]
            instead = "start fewer processes"
            if keras.backend.backend() == "jax":
                instead = (
                    "take a mesh that shards them over fewer devices and replicates "
                    "them: `expert_parallel(mesh_shape="
                    f"({self.num_devices // split[-1]}, {split[-1]}))`"
                )
            raise PlacementError(
                f"{num_experts} experts do not divide among {shards} devices. Received:"
                f" num_experts={num_experts}, mesh={self.device_mesh}. Take a multiple "
                f"of {shards} experts, or {instead}."
            )

    def check_layer(self, layer):
        """Raise `PlacementError` if expert variables of a new layer are replicated."""
        check_layer(layer, self)

    def check_model(self, model):
        """Raise `PlacementError` if variables of a model violate the rules."""
        audit(model, self)
        if keras.backend.backend() == "torch":
            # On JAX a replicated variable is one for all processes.
            check_equal_weights(model)

    def _key(self, path):
        """Return the key of the rule that matches a path, `None` without one."""
        keys = matching_keys(self.layout_map, path)
        if len(keys) > 1:
            raise PlacementError(
                f"{several_match(path, keys)} Remove all but one of them, or give "
                "yours the key of the rule that it is meant to replace."
            )
        self.used_keys.update(keys)
        return keys[0] if keys else None

    def _layout(self, axes, mesh):
        return JointLayout(axes, mesh)


class ReplicaParallel(EachBatch, keras.distribution.DataParallel):
    """Distribution of replicas over the axis `"batch"`, see `data_parallel`."""

    batch_axes = BATCH_AXIS

    def get_tensor_layout(self, path):
        # Slots have this layout anyway. `MoE` uses it to warn if groups do not divide
        # among the devices.
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
                f"{shards} devices do not divide an axis of {variable.path!r} that is "
                f"sharded over them. Received: shape={tuple(variable.shape)}, "
                f"axes={layout.axes}, mesh={mesh}. Change the size or the mesh, or "
                "leave `shard_dense` out if the variable is of the dense part."
            )


# === Backend, devices and mesh ===


def _check_backend(feature, also_torch=False):
    """Raise unless Keras distributes models on the backend in use.

    Args:
        feature: str, the beginning of the message, which offers an alternative.
        also_torch: bool, whether PyTorch has the feature, from Keras 3.16 on.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        return
    if backend == "torch" and also_torch and backend_distributes():
        _check_process_group()
        return
    needed = "the JAX backend"
    if backend == "torch" and also_torch:
        needed += ", or on PyTorch Keras 3.16"
    why = "would silently run on one device"
    if backend == "torch" and backend_distributes():
        why = "does it in another way, which is not supported"
    raise NotImplementedError(
        f"{feature} needs {needed}: Keras {keras.__version__} on {backend!r} {why}. "
        "Start Python with KERAS_BACKEND=jax; presets are the same on all backends. "
        f"{_INSTEAD.get(backend, 'Or train on one device')} (shown in the guide "
        f"`placing_experts`). Received: backend={backend!r}."
    )


def _check_process_group():
    """Raise unless the processes of PyTorch have found each other."""
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ValueError(
            "On PyTorch each device has a process of its own, and they have to find "
            "each other first. Received: no process group. Call `keras.distribution."
            'initialize("10.0.0.1:1234", num_processes=2, process_id=0)` in the first '
            "of two processes, with the address of the first, and with `process_id=1` "
            "in the second; or start the program with `torchrun` and call it without "
            "arguments."
        )


def _check_two_axes():
    """Raise unless the backend can shard an axis of a tensor by two axes of a mesh."""
    backend = keras.backend.backend()
    if backend != "jax":
        raise NotImplementedError(
            "A mesh of batch times experts, whose axes together shard the batch, is "
            "supported on JAX only. Shard the experts over all devices instead: leave "
            f"`mesh_shape` out. Received: backend={backend!r}."
        )


def _check_devices(devices):
    """Return the devices to use, a list of str. Defaults to all.

    Raises:
        ValueError: if the list is empty, has a device twice, or is not that of all
            processes on PyTorch.
    """
    if devices is None:
        return keras.distribution.list_devices()
    devices = [devices] if isinstance(devices, str) else list(devices)
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(
            "`devices` must be names of different devices, at least one. See "
            f"`keras.distribution.list_devices()`. Received: devices={devices}."
        )
    known = keras.distribution.list_devices()
    if keras.backend.backend() == "torch" and sorted(devices) != sorted(known):
        raise ValueError(
            "On PyTorch all processes share the experts, each with its device. "
            f"Accepted: {known}. Received: devices={devices}. Leave `devices` out, and "
            "start as many processes as there shall be devices."
        )
    return devices


def _check_mesh_shape(mesh_shape, num_devices):
    """Return the sizes (batch, experts) of a mesh of two axes.

    Raises:
        ValueError: if they are not two positive integers with that product.
    """
    try:
        batch, experts = mesh_shape
    except (TypeError, ValueError):
        batch = experts = 0
    if not all(type(n) is int for n in (batch, experts)):
        batch = experts = 0
    if batch < 1 or experts < 1 or batch * experts != num_devices:
        counts = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        shapes = ", ".join(f"({num_devices // n}, {n})" for n in counts)
        raise ValueError(
            "`mesh_shape` must be a pair (batch, experts) of positive integers whose "
            f"product is the number of devices, {num_devices}. Accepted: "
            f"{shapes}, or `None` for one axis. Received: mesh_shape={mesh_shape!r}."
        )
    return batch, experts
