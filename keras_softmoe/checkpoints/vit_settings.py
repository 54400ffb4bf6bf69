"""Settings of a model from names and shapes of its parameters."""

import math
import re
from typing import NamedTuple

from keras_softmoe.checkpoints.checkpoint import CheckpointError
from keras_softmoe.checkpoints.translation import OUR_POSITIONS, count_patches

_BLOCK = r"Encoder/encoderblock_(\d+)/"

# If the format does not have the initial value
_LAYER_SCALE = 1e-5


class ViTSettings(NamedTuple):
    """Vision Transformer described by its parameters: the backbone's arguments, ..."""

    settings: dict
    num_experts: int | None
    slots_per_expert: int | None
    num_classes: int | None


def read_vit_settings(
    shapes, image_shape=None, pooling=None, position_embedding=None, **given
):
    """Return the `ViTSettings` of a model from names and shapes of its parameters.

    `shapes` is a dict from V-MoE's names. `image_shape` defaults to a square with one
    patch for each learned position. `given` are settings that do not follow from the
    parameters; `pooling` and `position_embedding` are chosen where none are learned.
    """
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if empty:
        raise CheckpointError(f"Parameters without values: {', '.join(empty[:5])}.")
    *patch_size, channels, hidden_dim = _shape(shapes, "embedding/kernel", 4)
    blocks = _blocks(shapes)
    first = blocks[0]
    # These checks bound the size of the model by that of the checkpoint.
    query = (hidden_dim, None, None)
    _, num_heads, _ = _shape(first, "SelfAttention/query/kernel", query)
    _shape(first, "SelfAttention/out/kernel", (num_heads, None, hidden_dim))
    mlp_dim, num_experts, slots_per_expert = _mlps(blocks, hidden_dim)
    num_patches = _count_positions(shapes)
    num_registers = 0
    if (name := "registers") in shapes:
        _, num_registers, _ = _shape(shapes, name, (1, None, hidden_dim))
    representation_dim = num_classes = None
    if (name := "pre_logits/kernel") in shapes:
        representation_dim = _shape(shapes, name, (hidden_dim, None))[-1]
    if (name := "head/kernel") in shapes:
        features = representation_dim or hidden_dim
        num_classes = _shape(shapes, name, (features, None))[-1]
    poolings = ("gap", "first")
    if "cls" in shapes:
        poolings = ("token",)
    elif "MapHead/probe" in shapes:
        poolings = ("map",)
    kinds = ("sincos2d", "none") if num_patches is None else ("learned",)
    layer_scale = None
    if "LayerScale_0/scale" in first:
        layer_scale = given.get("layer_scale", _LAYER_SCALE)
    settings = {
        **given,
        "image_shape": _image_shape(image_shape, patch_size, channels, num_patches),
        "patch_size": tuple(patch_size),
        "num_layers": len(blocks),
        "num_heads": num_heads,
        "hidden_dim": hidden_dim,
        "mlp_dim": mlp_dim,
        "moe_layers": tuple(i for i, block in enumerate(blocks) if _is_moe(block)),
        "pooling": _choose("pooling", pooling, poolings),
        "position_embedding": _choose("position_embedding", position_embedding, kinds),
        "use_qk_norm": "SelfAttention/query_ln/scale" in first,
        "num_registers": num_registers,
        "representation_dim": representation_dim,
        "layer_scale": layer_scale,
    }
    return ViTSettings(settings, num_experts, slots_per_expert, num_classes)


def fits_positions(shapes, image_shape) -> bool:
    """Return whether images have as many patches as there are learned positions."""
    *patch_size, _, _ = _shape(shapes, "embedding/kernel", 4)
    return _count_positions(shapes) in (None, count_patches(image_shape, patch_size))


def _count_positions(shapes):
    """Return the number of patches with learned positions, or `None`."""
    if OUR_POSITIONS not in shapes:
        return None
    hidden_dim = _shape(shapes, "embedding/kernel", 4)[-1]
    _, positions, _ = _shape(shapes, OUR_POSITIONS, (1, None, hidden_dim))
    return positions - ("cls" in shapes)


def _image_shape(given, patch_size, channels, num_patches):
    """Return the shape of images: the `given` one, or a square of the positions."""
    height, width = patch_size
    if given is None:
        side = num_patches and math.isqrt(num_patches)
        if not side or side**2 != num_patches:
            raise CheckpointError(
                "The size of the images does not follow from the checkpoint, so "
                "`image_shape=(height, width, channels)` is needed. Received: "
                f"{num_patches or 'no'} learned positions."
            )
        return (side * height, side * width, channels)
    fits = num_patches in (None, count_patches(given, patch_size))
    if not fits or given[2] != channels:
        raise ValueError(
            f"The checkpoint was saved for {num_patches} patches of "
            f"{height} x {width} pixels in {channels} channels; `from_preset(..., "
            "image_shape=...)` resamples its positions after the conversion. Received: "
            f"image_shape={tuple(given)}."
        )
    return tuple(given)


def _mlps(blocks, hidden_dim):
    """Return the width of MLPs, and the numbers of experts and slots, or `None`."""
    mlp_dims, num_experts, slots = set(), None, None
    for block in blocks:
        if _is_moe(block):
            bank = _shape(block, "Moe/Mlp/Dense_0/kernel", (None, hidden_dim, None))
            num_experts = bank[0]
            router = (hidden_dim, num_experts, None)
            if "Moe/Router/mu" in block:
                slots = _shape(block, "Moe/Router/mu", router)[-1]
        else:
            bank = _shape(block, "Mlp/Dense_0/kernel", (hidden_dim, None))
        mlp_dims.add(bank[-1])
    if len(mlp_dims) > 1:
        raise CheckpointError(
            f"All MLPs must be equally wide. Received: {sorted(mlp_dims)}."
        )
    return mlp_dims.pop(), num_experts, slots


def _blocks(shapes):
    """Return a list of dicts, name inside a block -> shape."""
    blocks = {}
    for name, shape in shapes.items():
        if match := re.match(_BLOCK, name):
            blocks.setdefault(match[1], {})[name[match.end() :]] = shape
    numbers = [str(i) for i in range(len(blocks))]
    if not blocks or set(blocks) != set(numbers):
        raise CheckpointError(
            "A Vision Transformer has blocks Encoder/encoderblock_0, _1, ... Received: "
            f"the blocks {', '.join(sorted(blocks)[:50]) or '(none)'}."
        )
    blocks = [blocks[number] for number in numbers]
    for kind in (True, False):
        alike = [block for block in blocks if _is_moe(block) == kind]
        if any(block != alike[0] for block in alike):
            raise CheckpointError(
                "All dense blocks must have the same parameters, and all blocks with "
                "experts as well. Parameters are missing, or this is another model."
            )
    return blocks


def _is_moe(block):
    return any(name.startswith("Moe/") for name in block)


def _shape(shapes, name, expected):
    """Return the shape of a parameter, which must be the `expected` one.

    `expected` is the number of axes, or a tuple of sizes and `None`.
    """
    if isinstance(expected, int):
        expected = (None,) * expected
    shape = shapes.get(name, ())
    if len(shape) != len(expected) or any(
        size not in (None, found) or found == 0
        for size, found in zip(expected, shape, strict=True)
    ):
        raise CheckpointError(
            f"The parameters of a Vision Transformer include {name!r} of shape "
            f"{expected}. Received: {shape if name in shapes else 'none of that name'}."
        )
    return shape


def _choose(argument, given, accepted):
    if given is None:
        return accepted[0]
    if given not in accepted:
        raise ValueError(
            f"The checkpoint's parameters are those of {argument}="
            f"{' or '.join(map(repr, accepted))}. Received: {argument}={given!r}."
        )
    return given
