"""What a checkpoint's names and shapes tell about the model it was saved from."""

import math
import re
from typing import NamedTuple

from keras_softmoe.checkpoints._stream import CheckpointError

_BLOCK = r"Encoder/encoderblock_(\d+)/"


class CheckpointArchitecture(NamedTuple):
    """A Vision Transformer as names and shapes of its parameters describe it.

    Attributes:
        patch_size: `(height, width)` of a patch in pixels.
        channels: int, channels of an image.
        hidden_dim: int, width of a token.
        num_layers: int, number of blocks.
        num_heads: int, number of attention heads.
        mlp_dim: int, hidden width of MLPs and experts.
        moe_layers: tuple of int, the blocks with experts.
        num_experts: int or `None`.
        slots_per_expert: int for a soft router, else `None`.
        has_class_token: bool.
        has_attention_pooling: bool.
        num_patches: int, or `None` if positions are not learned.
        use_qk_norm: bool.
        has_layer_scale: bool.
        num_registers: int, tokens between class token and patches.
        representation_dim: int or `None`, width of the pre-logits.
        num_classes: int or `None`, width of the head.
    """

    patch_size: tuple
    channels: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    moe_layers: tuple
    num_experts: int | None
    slots_per_expert: int | None
    has_class_token: bool
    has_attention_pooling: bool
    num_patches: int | None
    use_qk_norm: bool
    has_layer_scale: bool
    num_registers: int
    representation_dim: int | None
    num_classes: int | None

    def image_shape(self, given=None):
        """Shape of the images: the `given` one, or a square of the learned positions.

        Raises:
            ValueError: if it is needed and not given, or does not fit the positions.
        """
        height, width = self.patch_size
        if given is None:
            side = self.num_patches and math.isqrt(self.num_patches)
            if not side or side**2 != self.num_patches:
                raise ValueError(
                    "The checkpoint does not tell the size of the images: it has "
                    f"{self.num_patches or 'no'} learned positions, which are no "
                    "square. Say it: `image_shape=(height, width, channels)`."
                )
            return (side * height, side * width, self.channels)
        rows, columns = given[0] // height, given[1] // width
        if self.num_patches not in (None, rows * columns) or given[2] != self.channels:
            raise ValueError(
                f"The checkpoint was saved for {self.num_patches} patches of "
                f"{height} x {width} pixels in {self.channels} channels. Received: "
                f"image_shape={tuple(given)}. Convert it for that size; "
                "`from_preset(..., image_shape=...)` then resamples its positions."
            )
        return tuple(given)

    def pooling(self, given=None):
        """How tokens are pooled: `given`, if the parameters leave a choice.

        Raises:
            ValueError: if the parameters say something else than `given`.
        """
        accepted = ("gap", "first")
        if self.has_class_token:
            accepted = ("token",)
        elif self.has_attention_pooling:
            accepted = ("map",)
        return _choose("pooling", given, accepted)

    def position_embedding(self, given=None):
        """The kind of position embedding: `given`, if the parameters leave a choice.

        Raises:
            ValueError: if the parameters say something else than `given`.
        """
        accepted = ("sincos2d", "none") if self.num_patches is None else ("learned",)
        return _choose("position_embedding", given, accepted)


def read_architecture(shapes):
    """Find out the architecture of a model from its parameters.

    Args:
        shapes: dict from V-MoE's name of a parameter to its shape.

    Returns:
        `CheckpointArchitecture`.

    Raises:
        CheckpointError: if these are not the parameters of one model.
    """
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if empty:
        raise CheckpointError(f"Parameters without values: {', '.join(empty[:5])}.")
    *patch_size, channels, hidden_dim = _shape(shapes, "embedding/kernel", 4)
    blocks = _blocks(shapes)
    moe_layers = tuple(i for i, block in enumerate(blocks) if _is_moe(block))
    first = blocks[0]
    # Built from these the model is as large as the checkpoint, not larger.
    _, num_heads, _ = _shape(
        first, "SelfAttention/query/kernel", (hidden_dim, None, None)
    )
    _shape(first, "SelfAttention/out/kernel", (num_heads, None, hidden_dim))
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
            f"All MLPs must be equally wide. Received: the widths {sorted(mlp_dims)}."
        )
    positions, has_class_token = None, "cls" in shapes
    if (name := "Encoder/posembed_input/pos_embedding") in shapes:
        _, positions, _ = _shape(shapes, name, (1, None, hidden_dim))
    num_registers = 0
    if (name := "registers") in shapes:
        _, num_registers, _ = _shape(shapes, name, (1, None, hidden_dim))
    representation_dim = num_classes = None
    if (name := "pre_logits/kernel") in shapes:
        representation_dim = _shape(shapes, name, (hidden_dim, None))[-1]
    if (name := "head/kernel") in shapes:
        features = representation_dim or hidden_dim
        num_classes = _shape(shapes, name, (features, None))[-1]
    return CheckpointArchitecture(
        patch_size=tuple(patch_size),
        channels=channels,
        hidden_dim=hidden_dim,
        num_layers=len(blocks),
        num_heads=num_heads,
        mlp_dim=mlp_dims.pop(),
        moe_layers=moe_layers,
        num_experts=num_experts,
        slots_per_expert=slots,
        has_class_token=has_class_token,
        has_attention_pooling="MapHead/probe" in shapes,
        num_patches=positions and positions - has_class_token,
        use_qk_norm="SelfAttention/query_ln/scale" in first,
        has_layer_scale="LayerScale_0/scale" in first,
        num_registers=num_registers,
        representation_dim=representation_dim,
        num_classes=num_classes,
    )


def _blocks(shapes):
    """Parameters of each block, name inside the block -> shape.

    Raises:
        CheckpointError: unless all blocks are there, and those of a kind are alike.
    """
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
    """Shape of a parameter, which must be the `expected` one where that is known.

    Args:
        shapes: dict from name to shape.
        name: str.
        expected: int, the number of axes, or a tuple of sizes and `None`.
    """
    if isinstance(expected, int):
        expected = (None,) * expected
    shape = shapes.get(name, ())
    if len(shape) != len(expected) or any(
        size not in (None, found) for size, found in zip(expected, shape, strict=True)
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
