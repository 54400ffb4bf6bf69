"""Expert parallelism and data parallelism, as distributions of Keras."""

from collections.abc import Sequence

import keras

from keras_softmoe.distribution._audit import audit, check_layer
from keras_softmoe.distribution._backends import (
    check_backend,
    check_devices,
    check_mesh_shape,
    check_two_axes,
)
from keras_softmoe.distribution._batches import EachBatch
from keras_softmoe.distribution._layouts import (
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
from keras_softmoe.sharding.constraints import num_shards


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
    same data in the same order (shuffle with a seed). `predict` returns all rows to
    each of them. Save with `save_to_preset`: Keras' `save` supports one process only.

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
            `tf.data.Dataset`. `False` if each has its own rows.

    Returns:
        `keras.distribution.ModelParallel`. Use it with `keras.distribution.
        set_distribution(...)` or `with ....scope():` while the model is built, trained
        and used.

    Raises:
        ValueError: if `mesh_shape` does not fit the devices, or a rule is given twice.
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
    check_backend("Sharding experts over devices")
    devices = check_devices(devices)
    if mesh_shape is None:
        mesh = keras.distribution.DeviceMesh((len(devices),), [BATCH_AXIS], devices)
    else:
        mesh_shape = check_mesh_shape(mesh_shape, len(devices))
        check_two_axes()
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
    check_backend("Training replicas through `keras.distribution`")
    devices = check_devices(devices)
    mesh = keras.distribution.DeviceMesh((len(devices),), [BATCH_AXIS], devices)
    return ReplicaParallel(mesh, auto_shard_dataset=auto_shard_dataset)


class ExpertParallel(EachBatch, keras.distribution.ModelParallel):
    """Distribution of experts, see `expert_parallel`.

    Args:
        layout_map: `keras.distribution.LayoutMap` as `layout_map` makes it.
        auto_shard_dataset: see `expert_parallel`.
    """

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
        layout = self._match(variable.path)
        if layout is not None:
            layout = fitted(self._keys(variable.path)[0], layout, variable)
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
        return self._match(path)

    def check_divides_experts(self, num_experts):
        """Raise `PlacementError` if the devices do not divide a number of experts."""
        shards = self.num_expert_shards
        if num_experts % shards:
            split = [n for n in range(1, self.num_devices + 1) if num_experts % n == 0]
            split = [n for n in split if self.num_devices % n == 0]
            raise PlacementError(
                f"{num_experts} experts do not divide among {shards} devices. Received:"
                f" num_experts={num_experts}, mesh={self.device_mesh}. Take a multiple "
                f"of {shards} experts, or a mesh that shards them over fewer devices "
                "and replicates them: `expert_parallel(mesh_shape="
                f"({self.num_devices // split[-1]}, {split[-1]}))`."
            )

    def check_layer(self, layer):
        """Raise `PlacementError` if expert variables of a new layer are replicated."""
        check_layer(layer, self)

    def check_model(self, model):
        """Raise `PlacementError` if variables of a model violate the rules."""
        audit(model, self)

    def _match(self, path):
        keys = self._keys(path)
        self.used_keys.update(keys)
        return self.layout_map[keys[0]] if keys else None

    def _keys(self, path):
        keys = matching_keys(self.layout_map, path)
        if len(keys) > 1:
            raise PlacementError(
                f"{several_match(path, keys)} Remove all but one of them, or give "
                "yours the key of the rule that it is meant to replace."
            )
        return keys

    def _layout(self, axes, mesh):
        return JointLayout(axes, mesh)


class ReplicaParallel(EachBatch, keras.distribution.DataParallel):
    """Distribution of replicas, see `data_parallel`.

    Args:
        device_mesh: `keras.distribution.DeviceMesh` with the one axis `"batch"`.
        auto_shard_dataset: see `expert_parallel`.
    """

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
