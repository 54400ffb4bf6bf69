"""Layouts of variables and tensors, as rules from paths to axes of the mesh.

The keys of a layout map are regular expressions that must match the whole path of a
variable (examples are in the comments, with shapes of a model of width D). The values
are roles, which `Roles` maps to axes of a mesh: `experts` shards experts, `images` the
batch, and so groups of images, `width` dense kernels. Experts are replicated along
`replicas`. A variable without a rule is replicated on every device.
"""

import re
from typing import NamedTuple

import keras

from keras_softmoe.checks import received

EXPERTS, IMAGES, REPLICAS, WIDTH = "experts", "images", "replicas", "width"

BATCH_AXIS, EXPERT_AXIS = "batch", "expert"

_BANK = r"(.*/)?[^/]*experts[^/]*/(intermediate|gate|output)_dense"
_ROUTER = r"(.*/)?[^/]*router[^/]*"
_EXPERTS = r"(.*/)?[^/]*experts[^/]*"
_STACKED = rf"{_EXPERTS}/stacked_[^/]+"

EXPERT_RULES = {
    # block_1/moe/experts/intermediate_dense/kernel (E, D, H)
    # block_1/moe/experts/output_dense/kernel (E, H, D)
    # my_model/soft_mo_e/moe/experts/intermediate_dense/kernel (E, D, H)
    rf"{_BANK}/kernel": (EXPERTS, None, None),
    # block_1/moe/experts/intermediate_dense/bias (E, 1, H)
    # block_1/moe/experts/output_dense/bias (E, 1, D)
    rf"{_BANK}/bias": (EXPERTS, None, None),
    # After `quantize`:
    # block_1/moe/experts/intermediate_dense/kernel_scale (E, 1, H)
    rf"{_BANK}/kernel_scale": (EXPERTS, None, None),
    # After `enable_lora(rank)`:
    # block_1/moe/experts/intermediate_dense/lora_kernel_a (E, D, rank)
    # block_1/moe/experts/intermediate_dense/lora_kernel_b (E, rank, H)
    rf"{_BANK}/lora_kernel_[ab]": (EXPERTS, None, None),
    # Experts of any layer: weights of any rank, whose other axes are not sharded.
    # block_1/moe/experts/stacked_dense_kernel (E, D, H)
    _STACKED: (EXPERTS,),
    # block_1/moe/router/mu (D, E, C), of a soft router
    rf"{_ROUTER}/mu": (None, EXPERTS, None),
}

# Tensors whose layout the layers look up, see `sharding.constrain`.
TENSOR_RULES = {
    # block_1/moe/experts/slots_of_groups (G, E, C, D)
    rf"{_EXPERTS}/slots_of_groups": (IMAGES, None, None, None),
    # block_1/moe/experts/slots_of_experts (E, G, C, D)
    rf"{_EXPERTS}/slots_of_experts": (EXPERTS, REPLICAS, None, None),
    # block_1/moe/router/mu_of_all_experts (D, E, C)
    rf"{_ROUTER}/mu_of_all_experts": (None, None, None),
}

# Each is sharded along the width of a token. Vectors are too small to shard.
DENSE_RULES = {
    # patch_embedding/projection/kernel (height, width, channels, D)
    r"(.*/)?patch_embedding/projection/kernel": (None, None, None, WIDTH),
    # token_embedding/token_embedding/embeddings (vocabulary, D)
    r"(.*/)?token_embedding/token_embedding/embeddings": (None, WIDTH),
    # block_0/attention/query/kernel (D, heads, D / heads), also in attention_pooling
    r"(.*/)?attention/(query|key|value)/kernel": (WIDTH, None, None),
    # block_0/attention/attention_output/kernel (heads, D / heads, D)
    r"(.*/)?attention/attention_output/kernel": (None, None, WIDTH),
    # block_0/mlp/intermediate_dense/kernel (D, H)
    # block_1/moe/shared_mlp/intermediate_dense/kernel (D, H)
    r"(.*/)?(shared_)?mlp/(intermediate|gate)_dense/kernel": (WIDTH, None),
    # block_0/mlp/output_dense/kernel (H, D)
    r"(.*/)?(shared_)?mlp/output_dense/kernel": (None, WIDTH),
}


class JointLayout(keras.distribution.TensorLayout):
    """Layout whose `axes` may be tuples: several axes of the mesh shard one axis."""

    def __init__(self, axes, device_mesh=None):
        names = [n for a in axes for n in (a if isinstance(a, tuple) else (a,))]
        # Keras checks names, but not tuples of names.
        super().__init__(names, device_mesh)
        self._joint_axes = tuple(axes)

    @property
    def axes(self):
        return self._joint_axes


class Roles(NamedTuple):
    """The axes of a mesh for the roles of the rules."""

    experts: str
    images: str | tuple
    replicas: str | None
    width: str

    def layout(self, axes, device_mesh):
        """Return the `TensorLayout` of axes given by their roles."""
        axes = [None if role is None else getattr(self, role) for role in axes]
        return _layout(axes, device_mesh)


# The papers' placement: one axis shards both the batch and the experts.
ONE_AXIS = Roles(BATCH_AXIS, BATCH_AXIS, None, BATCH_AXIS)

# One axis shards experts, the other replicates them, and both shard the batch.
TWO_AXES = Roles(EXPERT_AXIS, (BATCH_AXIS, EXPERT_AXIS), BATCH_AXIS, BATCH_AXIS)


def layout_map(
    device_mesh: keras.distribution.DeviceMesh,
    shard_dense: bool = False,
    layouts: dict | None = None,
) -> keras.distribution.LayoutMap:
    """Return the layout map of this library's models and layers for a mesh.

    Args:
        device_mesh: `keras.distribution.DeviceMesh` with an axis `"batch"`, which also
            shards the experts, or with `"batch"` and `"expert"`.
        shard_dense: bool, as in `expert_parallel`.
        layouts: optional dict from a regular expression for whole paths to a tuple of
            axes of the mesh: rules that are added, or replace those with the same key.

    Examples:
        >>> mesh = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
        >>> layouts = ksm.distribution.layout_map(mesh)
        >>> layouts["block_1/moe/experts/output_dense/kernel"].axes
        ('batch', None, None)
    """
    roles = TWO_AXES if EXPERT_AXIS in device_mesh.axis_names else ONE_AXIS
    rules = EXPERT_RULES | TENSOR_RULES | (DENSE_RULES if shard_dense else {})
    found = {path: roles.layout(axes, device_mesh) for path, axes in rules.items()}
    for path, axes in _checked(layouts).items():
        # At the end, also if it replaces a rule
        found.pop(path, None)
        found[path] = _layout(axes, device_mesh)
    result = keras.distribution.LayoutMap(device_mesh)
    result.update(found)
    return result


def is_known(path):
    """Return whether a key is a rule of this library, which may match nothing."""
    return path in EXPERT_RULES or path in TENSOR_RULES or path in DENSE_RULES


def _layout(axes, device_mesh):
    is_joint = any(isinstance(axis, tuple) for axis in axes)
    layout = JointLayout if is_joint else keras.distribution.TensorLayout
    return layout(tuple(axes), device_mesh)


def _checked(layouts):
    """Return the rules of a user, a dict, after checks."""
    layouts = {} if layouts is None else layouts
    if not isinstance(layouts, dict):
        raise ValueError(
            "`layouts` must be a dict from a regular expression for whole paths to a "
            f"tuple of axes of the mesh. {received(layouts=layouts)}"
        )
    for path, axes in layouts.items():
        try:
            re.compile(path)
        except (re.error, TypeError) as error:
            raise ValueError(
                "The keys of `layouts` must be regular expressions. Received: "
                f"{path!r}: {error}."
            ) from error
        if not isinstance(axes, tuple | list):
            raise ValueError(
                "A rule of `layouts` must have an axis of the mesh, several, or `None` "
                f"for each axis of the variable. Received: {path!r}: {axes!r}."
            )
    return layouts


class PlacementError(ValueError):
    """Error of variables that are not placed on the devices by their rules.

    Attributes:
        audit: the `Audit` that found it, or `None`.

    Examples:
        >>> distribution = ksm.distribution.expert_parallel()
        >>> try:
        ...     ksm.distribution.audit(classifier, distribution)  # built without it
        ... except ksm.distribution.PlacementError as error:
        ...     print(error)
    """

    audit = None


def matching_keys(layout_map, path):
    """Return the keys of a layout map that match a path; the path alone if a key."""
    # `path in layout_map` is true for every path.
    keys = list(layout_map)
    return [path] if path in keys else [key for key in keys if re.fullmatch(key, path)]


def several_match(path, keys):
    """Return the beginning of the error for several matching rules."""
    return f"Several rules match {path!r}: {', '.join(map(repr, keys))}."


def fitted(key, layout, variable):
    """Return the layout of a variable by a rule, `None` if the rule is not for it.

    A rule of this library for other ranks matches a variable of another library.
    """
    missing = len(variable.shape) - len(layout.axes)
    if key == _STACKED and missing > 0:
        return _layout((*layout.axes, *[None] * missing), layout.device_mesh)
    return None if missing and is_known(key) else layout


def reference_name(moment, shapes):
    """Return the name of the variable to which a moment of an optimizer belongs."""
    own, shape = moment.path.rpartition("/")[2], tuple(moment.shape)
    names = [n for n in shapes if own.startswith(f"{n}_") and shapes[n] == shape]
    return max(names, key=len, default=None)


def name_in_optimizer(variable):
    """Return the prefix of the names of a variable's moments."""
    return variable.path.replace("/", "_")


def unmatched_rules(layout_map, used_keys, paths=()):
    """Return the error for rules of a user that match nothing, if there are any."""
    unmatched = [
        key
        for key in layout_map
        if not (is_known(key) or key in used_keys)
        and not any(matching_keys({key: None}, path) for path in paths)
    ]
    return unmatched and (
        "Nothing has a path that these rules match, which leaves variables replicated: "
        f"{', '.join(map(repr, unmatched))}."
    )
