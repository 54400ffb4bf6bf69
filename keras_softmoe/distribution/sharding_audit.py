"""Audit of the sharding of a model's variables."""

import math
from typing import NamedTuple

import keras
import numpy as np

from keras_softmoe.architecture.counting import itemsize
from keras_softmoe.checks import received, table
from keras_softmoe.distribution import layouts
from keras_softmoe.distribution.layouts import PlacementError
from keras_softmoe.keras_adapter.data import layout_map_of
from keras_softmoe.keras_adapter.layers import flatten_layers, is_initialized
from keras_softmoe.layers import Experts
from keras_softmoe.layers.template_experts import TemplateExperts
from keras_softmoe.routers import SoftRouter
from keras_softmoe.sharding.constraints import num_shards
from keras_softmoe.sharding.variables import answers_of_all, is_sharded


class Placed(NamedTuple):
    """Sharding of one variable.

    `axes` has, for each axis, the axis of the mesh that shards it by the rules, a tuple
    of several, or `None`; `shard_shape` is the shape of the shard on one device.
    """

    path: str
    shape: tuple
    dtype: str
    axes: tuple
    shard_shape: tuple
    is_expert: bool

    @property
    def bytes_per_device(self):
        """Int, bytes on one device."""
        return math.prod(self.shard_shape) * itemsize(self.dtype)

    @property
    def total_bytes(self):
        """Int, bytes of one copy."""
        return math.prod(self.shape) * itemsize(self.dtype)


class Audit(NamedTuple):
    """Sharding of all variables of a model. Prints as a table.

    Attributes:
        rows: tuple of `Placed`: variables of the model, then of its optimizer.
        problems: tuple of str.
    """

    rows: tuple
    problems: tuple

    @property
    def bytes_per_device(self):
        """Int, bytes on one device."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def total_bytes(self):
        """Int, bytes of one copy of all variables."""
        return sum(row.total_bytes for row in self.rows)

    def __str__(self):
        lines = [("variable", "shape", "layout", "bytes per device", "total")]
        for row in self.rows:
            shape = " x ".join(map(str, row.shape)) or "-"
            sizes = f"{row.bytes_per_device:,}", f"{row.total_bytes:,}"
            names = ("+".join(a) if isinstance(a, tuple) else a for a in row.axes)
            names = ", ".join(name or "-" for name in names)
            layout = names if any(row.axes) else "replicated"
            lines.append((row.path, shape, layout, *sizes))
        sums = f"{self.bytes_per_device:,}", f"{self.total_bytes:,}"
        head, *rows, last = table([*lines, ("sum", "", "", *sums)], left=3).split("\n")
        rule = "-" * max(map(len, (head, *rows, last)))
        problems = (f"PROBLEM: {problem}" for problem in self.problems)
        return "\n".join([head, rule, *rows, rule, last, *problems])


def audit(
    model: keras.Model,
    distribution: keras.distribution.DataParallel
    | keras.distribution.ModelParallel
    | None = None,
) -> Audit:
    """Check the sharding of a model's variables, and raise for violated rules.

    The table lists the bytes on each device. All variables may be replicated on every
    device except the experts': their kernels and biases, the slot parameters of soft
    routers, and the moments of these in an optimizer.

    Args:
        model: `keras.Model` or layer that is built. The optimizer's variables are
            checked if they exist.
        distribution: the `keras.distribution.ModelParallel` or `DataParallel` with the
            rules. Defaults to the active one.

    Returns:
        `Audit`. It has no problems under a `DataParallel`.

    Raises:
        PlacementError: with a list of every variable or moment that is not placed by
            its rule, rule that matches nothing, and path that several rules match.
        ValueError: if no distribution is given or active, or the model is not built.

    Examples:
        >>> with ksm.distribution.expert_parallel(devices=["cpu:0"]).scope():
        ...     model = ksm.models.ViTMoEBackbone.from_preset(name)
        ...     print(ksm.distribution.audit(model))
    """
    if not isinstance(model, keras.Layer) or not model.built:
        raise ValueError(
            f"`model` must be a model or layer that is built. {received(model=model)}"
        )
    if distribution is None:
        distribution = keras.distribution.distribution()
    if distribution is None:
        raise ValueError(
            "`distribution` must be given, or active (`with distribution.scope():`). "
            "Received: distribution=None."
        )
    found = _Findings(distribution)
    for layer in flatten_layers(model):
        found.add_layer(layer)
    moments = getattr(getattr(model, "optimizer", None), "variables", ())
    found.add_variables(model.variables, moments)
    if found.layout_map is not None:
        # Several models may share a distribution, with rules for one of them.
        used = getattr(distribution, "used_keys", ())
        problem = layouts.unmatched_rules(found.layout_map, used, found.paths)
        found.problems += [problem] if problem else []
    return found.audit()


def check_layer(layer, distribution):
    """Raise `PlacementError` if variables of a layer violate the rules."""
    found = _Findings(distribution)
    found.add_layer(layer)
    found.add_variables(layer.variables)
    found.audit()


def check_equal_weights(model):
    """Raise if processes have different values of weights that are replicated."""
    weights = [w for w in model.weights if is_initialized(w) and not is_sharded(w)]
    sums = [keras.ops.sum(keras.ops.cast(w, "float32")) for w in weights]
    first, *others = answers_of_all([keras.ops.convert_to_numpy(x) for x in sums])
    # Two processes may round the same sum of gradients differently.
    near = {"rtol": 1e-3, "atol": 1e-3, "equal_nan": True}
    if not all(len(x) == len(first) and np.allclose(x, first, **near) for x in others):
        raise PlacementError(
            f"All processes must have the same weights of the model {model.name!r}. "
            "Received: sums of weights that differ. Call `keras.utils.set_random_seed` "
            "in each process before it builds the model, or load the same preset."
        )


class _Findings:
    """Rows and problems found so far."""

    def __init__(self, distribution):
        self.distribution = distribution
        # `None` for a distribution that replicates everything by design
        self.layout_map = layout_map_of(distribution)
        self.rows, self.problems = [], []
        # Axis of the experts, by the `id` of the variable
        self.expert_axes = {}
        self.paths = set()

    def add_layer(self, layer):
        self.paths.update((f"{layer.path}/output", f"{layer.name}/output"))
        if isinstance(layer, SoftRouter):
            self.paths.add(f"{layer.path}/mu_of_all_experts")
            if hasattr(layer, "mu"):
                self.expert_axes[id(layer.mu)] = 1
        elif isinstance(layer, Experts | TemplateExperts):
            for variable in layer.weights:
                if len(variable.shape) > 1:
                    self.expert_axes[id(variable)] = 0
            # Tensors whose layout `Experts` looks up when it is called
            for name in ("slots_of_groups", "slots_of_experts"):
                path = f"{layer.path}/{name}"
                self.paths.add(path)
                if self.layout_map is not None and not self._keys(path):
                    self.problems.append(
                        f"No rule lays out {path!r}: every slot would be gathered on "
                        "every device. Use `ksm.distribution.layout_map`."
                    )

    def add_variables(self, variables, moments=()):
        references = {layouts.name_in_optimizer(v): v for v in variables}
        shapes = {name: tuple(v.shape) for name, v in references.items()}
        for variable in variables:
            self._add(variable, variable)
        for moment in moments:
            self._add(moment, references.get(layouts.reference_name(moment, shapes)))

    def _add(self, variable, reference):
        self.paths.add(variable.path)
        layout = None
        if reference is not None and self.layout_map is not None:
            keys = self._keys(reference.path)
            if len(keys) == 1:
                layout = layouts.fitted(keys[0], self.layout_map[keys[0]], reference)
        shape = tuple(variable.shape)
        axes = (None,) * len(shape) if layout is None else tuple(layout.axes)
        shard = _shard_shape(variable, layout)
        expert_axis = self.expert_axes.get(id(reference))
        is_expert = expert_axis is not None
        dtype = keras.backend.standardize_dtype(variable.dtype)
        self.rows.append(Placed(variable.path, shape, dtype, axes, shard, is_expert))
        if self.layout_map is None:
            return
        name = f"{variable.path!r} {shape}"
        shards = getattr(self.distribution, "num_expert_shards", None)
        shards = shards or self.distribution.device_mesh.devices.size
        if is_expert and shards > 1 and shape[expert_axis] == shard[expert_axis]:
            if layout is None:
                why = "no rule matches its path."
            elif axes[expert_axis] is None:
                why = f"its rule, {axes}, does not shard that axis."
            else:
                why = f"it was not made under its rule, {axes}."
            self.problems.append(
                f"{name} belongs to experts and is replicated on every device: {why}"
            )
        elif layout is not None and len(axes) != len(shape):
            self.problems.append(f"{name} has a rule for {len(axes)} axes: {axes}.")
        elif layout is not None:
            shards = _num_shards_of_axes(layout)
            if any(size % n for size, n in zip(shape, shards, strict=True)):
                self.problems.append(
                    f"{name} cannot be sharded into equal parts, {shards} by its "
                    f"rule {axes}."
                )
            elif shard != tuple(s // n for s, n in zip(shape, shards, strict=True)):
                self.problems.append(
                    f"{name} has shards of {shard}, unlike its rule {axes}. "
                    "Build the model, and compile it, under the distribution."
                )

    def _keys(self, path):
        keys = layouts.matching_keys(self.layout_map, path)
        if len(keys) > 1:
            self.problems.append(layouts.several_match(path, keys))
        return keys

    def audit(self):
        """Return the `Audit`, or raise if it has problems."""
        result = Audit(tuple(self.rows), tuple(self.problems))
        if result.problems:
            error = PlacementError(
                "Variables are not placed on the devices by their rules:\n"
                + "\n".join(f"- {problem}" for problem in result.problems)
                + "\nRules must match whole paths, see `[v.path for v in "
                "model.variables]` and `ksm.distribution.layout_map`."
            )
            error.audit = result
            raise error
        return result


def _num_shards_of_axes(layout):
    return [num_shards(layout.device_mesh, axis) for axis in layout.axes]


def _shard_shape(variable, layout):
    """Return the shape of a variable's shard on one device."""
    shape = tuple(variable.shape)
    if not is_initialized(variable):
        # A model built by its first batch creates its values later, by the rule.
        if layout is None or len(layout.axes) != len(shape):
            return shape
        shards = _num_shards_of_axes(layout)
        return tuple(size // n for size, n in zip(shape, shards, strict=True))
    value = variable.value
    if hasattr(value, "sharding"):
        return tuple(value.sharding.shard_shape(shape))
    if hasattr(value, "to_local"):
        return tuple(value.to_local().shape)
    return shape
