"""Model without weights in the package: data, preset files, helpers to define it."""

import dataclasses
import functools
import json
from collections.abc import Callable

import keras

from keras_softmoe.architecture import Settings, ViT
from keras_softmoe.architecture.counting import count
from keras_softmoe.checks import is_whole_number

IMAGE_SIZE = 224

_LICENCE = "Apache-2.0"
_LICENCE_OF_RELEASED = (
    "Apache-2.0, of the repository that releases it; none is stated for the checkpoint "
    "itself"
)
# Modules of the classes that files name.
_MODULES = {
    "ViTMoEBackbone": "keras_softmoe.models.vit",
    "LIMoEBackbone": "keras_softmoe.models.limoe",
    "ViTMoEImageClassifier": "keras_softmoe.models.image_classifier",
    "ViTMoEImageClassifierPreprocessor": "keras_softmoe.models.image_preprocessor",
    "ViTMoEImageConverter": "keras_softmoe.models.image_preprocessor",
    "LIMoEImageConverter": "keras_softmoe.models.contrastive_preprocessor",
}
# By the class of the backbone: classes of its image converter, and of KerasHub's task.
_CONVERTER_AND_TASK = {
    "ViTMoEBackbone": ("ViTMoEImageConverter", "ImageClassifier"),
    "LIMoEBackbone": ("LIMoEImageConverter", "ContrastiveTask"),
}


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

    def files(self):
        """Return the files of a preset without weights, a dict from names to texts."""
        backbone = self.config()
        router = keras.saving.serialize_keras_object(backbone["config"]["router"])
        backbone["config"]["router"] = router
        converter = _serialized(
            _CONVERTER_AND_TASK[self.kind.backbone][0],
            {
                **_layer("image_converter"),
                "image_size": self.arguments["image_shape"][:2],
                "scale": 1.0 / 127.5,
                "offset": -1.0,
                "interpolation": "bilinear",
                "antialias": False,
                "crop_to_aspect_ratio": self.release is None or self.release.crop,
                "pad_to_aspect_ratio": False,
                "bounding_box_format": "yxyx",
            },
        )
        files = {
            "config.json": backbone,
            "metadata.json": self.metadata(),
            "image_converter.json": converter,
        }
        if self.kind.backbone == "ViTMoEBackbone":
            # A preprocessor for captions needs a vocabulary from the user.
            own = _layer("preprocessor") | {"image_converter": converter}
            own["config_file"] = "preprocessor.json"
            name = "ViTMoEImageClassifierPreprocessor"
            files["preprocessor.json"] = _serialized(name, own)
        if self.release:
            arguments = {
                "name": f"{self.name}_classifier",
                "trainable": True,
                "backbone": backbone,
                "preprocessor": files["preprocessor.json"],
                "num_classes": self.release.num_classes,
                "activation": None,
                "dropout": 0.0,
                "head_dtype": None,
            }
            files["task.json"] = _serialized("ViTMoEImageClassifier", arguments)
        return {name: json.dumps(c, indent=4) + "\n" for name, c in files.items()}

    def config(self):
        """Return the serialized backbone of an architecture, except its router."""
        arguments = {"name": self.name, "trainable": True, **self.arguments}
        arguments["router"] = self.router and self.router()
        return _serialized(self.kind.backbone, arguments)

    def metadata(self):
        """Return the content of `metadata.json` of a row, a dict."""
        parameters, gflop = self.counts
        published, release = self.published or {}, self.release
        optional = {
            "published": published,
            "settings": self.settings,
            "note": self.note,
            "checkpoint": release and release.checkpoint,
            "accuracy": release and release.accuracy,
        }
        num_classes = release.num_classes if release else published.get("head_classes")
        if num_classes:
            width = self.arguments.get("representation_dim")
            head = ((width or self.arguments["hidden_dim"]) + 1) * num_classes
            optional["parameter_count_with_head"] = parameters + head
        return {
            "parameter_count": parameters,
            "gflop_per_image": round(gflop, 2),
            "tasks": [_CONVERTER_AND_TASK[self.kind.backbone][1]],
            "kind": "convertible" if release else "architecture",
            "description": self._description(),
            "source": self.source,
            "licence": _LICENCE_OF_RELEASED if release else _LICENCE,
            "dense_twin": self.twin,
            **{key: value for key, value in optional.items() if value},
        }

    def _description(self):
        shape = self.architecture().flat()
        height, width, _ = shape["image_shape"]
        parts = [
            self.title,
            f"{shape['hidden_dim']} wide",
            f"{shape['num_layers']} blocks",
            self.experts,
            f"patch {shape['patch_size'][0]} at {height} x {width}",
        ]
        if "sequence_length" in shape:
            parts.append(f"texts of {shape['sequence_length']} tokens")
        if self.release:
            parts.append(self.release.training)
        first, *others = filter(None, parts)
        return f"{first}: {', '.join(others)}."


def _serialized(class_name, config):
    return {
        "module": _MODULES[class_name],
        "class_name": class_name,
        "config": config,
        "registered_name": f"keras_softmoe>{class_name}",
    }


def _layer(name):
    policy = keras.dtype_policies.serialize(keras.DTypePolicy("float32"))
    return {"name": name, "trainable": True, "dtype": policy}


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
