"""Model without weights in the package as data, and helpers to define it."""

import dataclasses
import functools
from collections.abc import Callable

from keras_softmoe.architecture import Settings, ViT
from keras_softmoe.architecture.counting import count
from keras_softmoe.checks import is_whole_number

IMAGE_SIZE = 224


@dataclasses.dataclass(frozen=True)
class Release:
    """Checkpoint with the weights of a classifier.

    `checkpoint` is a URL of one file, or the common part of several, `accuracy` a dict
    from data set to published accuracy, and `crop`: images are cropped to squares.
    """

    checkpoint: str
    num_classes: int
    training: str
    accuracy: dict = dataclasses.field(default_factory=dict)
    crop: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """Model whose weights were never released, or are downloaded."""

    name: str
    # The paper's name, number and placement of experts, paper and section or table
    title: str
    experts: str
    source: str
    # Of the backbone, other than its router; callable that returns the router
    arguments: dict
    router: Callable | None = None
    # Name of the preset of the dense twin
    twin: str | None = None
    # The paper's figures, and settings of its trainings
    published: dict | None = None
    settings: list | None = None
    note: str | None = None
    release: Release | None = None
    # Class of the record in `architecture`
    kind: type = ViT

    def architecture(self) -> Settings:
        """Return the description of its layers."""
        router = self.router and self.router()
        return self.kind.of({**self.arguments, "router": router})

    @functools.cached_property
    def counts(self) -> tuple[int, float]:
        """Parameters of the backbone, and GFLOP of one image or pair."""
        found = self.architecture()
        counts = count(found)
        return counts.parameters, 2e-9 * counts.products / found.group_size


def preset_name(family, sizes, model, *marks, image_size=IMAGE_SIZE):
    """Return a preset's name, such as `vit_base_patch16_224`, without empty `marks`."""
    letter, patch = model.split("/")
    parts = [family, sizes[letter][0], f"patch{patch}", *filter(None, marks)]
    return "_".join([*parts, str(image_size)])


def vit(sizes, model, image_size=IMAGE_SIZE):
    """Return the arguments of a Vision Transformer, see `preset_name`."""
    letter, patch = model.split("/")
    _, *size = sizes[letter]
    names = ("hidden_dim", "num_layers", "num_heads", "mlp_dim")
    return {
        "image_shape": (image_size, image_size, 3),
        "patch_size": int(patch),
        **dict(zip(names, size, strict=True)),
    }


def experts(moe_layers, group_images=1):
    """Return the arguments of a backbone for its experts, besides the router."""
    group = {"group_images": group_images} if group_images > 1 else {}
    return {"moe_layers": moe_layers, **group}


def template(router, num_experts, **settings):
    """Return a callable that creates a router of a class with these settings."""
    return functools.partial(router, num_experts, name="router", **settings)


def moe_blocks(num_layers: int, every: int = 1, last: int | None = None) -> tuple:
    """Return the indices of the blocks with experts, as in the papers.

    Blocks are counted from 0, so with `every=2` these are the second, the fourth, ...:
    blocks 1, 3, ... Remaining blocks at the end are dense.

    | paper | placement | call |
    |---|---|---|
    | V-MoE | "Every-2" | `moe_blocks(12, every=2)` |
    | V-MoE | "Last-2": the last 2 of every second block | `moe_blocks(24, 2, last=2)` |
    | Soft MoE | the second half of the blocks | `moe_blocks(12, last=6)` |

    Args:
        num_layers: int, number of encoder blocks.
        every: int, distance between mixtures of experts, from 1 to `num_layers`.
        last: int or `None` (all), number of those blocks to keep, from the end.

    Source: V-MoE, section 3.1 and appendix E.1 (blocks 21 and 23 of 24); Soft MoE,
    sections 2.1 and 3.4. Numbered as in V-MoE's released code.

    Examples:
        >>> ksm.models.moe_blocks(24, every=2, last=2)
        (21, 23)
    """
    _check(num_layers, "num_layers", num_layers)
    _check(num_layers, "every", every, num_layers)
    blocks = tuple(range(every - 1, num_layers, every))
    if last is None:
        return blocks
    _check(num_layers, "last", last, len(blocks))
    return blocks[-last:]


def _check(num_layers, argument, value, largest=None):
    if not is_whole_number(value) or (largest is not None and value > largest):
        upto = "" if largest is None else f" and at most {largest}"
        layers = "" if argument == "num_layers" else f", num_layers={num_layers}"
        raise ValueError(
            f"`{argument}` must be an integer, at least 1{upto}. "
            f"Received: {argument}={value!r}{layers}."
        )


def placed(num_layers, placement):
    """Return the blocks of one of V-MoE's placements of experts, and its description.

    `placement` is `"every2"`, or `"last2"` for the last two of these blocks.
    """
    if placement == "every2":
        return moe_blocks(num_layers, every=2), "every second block"
    number = int(placement.removeprefix("last"))
    layers = moe_blocks(num_layers, every=2, last=number)
    return layers, f"the last {number} of every second block"
