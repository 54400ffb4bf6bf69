"""The directory of an architecture: the texts of its files, in KerasHub's format."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import keras

_LICENCE = "Apache-2.0"
_PREPROCESSOR_MODULE = "keras_softmoe.models._image_preprocessor"


class _Kind(NamedTuple):
    """What differs with the class of the backbone.

    Attributes:
        module: str, where the backbone's class is.
        converter: pair of str, module and name of the class of its image converter.
        task: str, of which KerasHub finds it to be a backbone.
        unit: str, what operations are counted for.
        code: str, how a model is made.
    """

    module: str
    converter: tuple
    task: str
    unit: str
    code: str


_KINDS = {
    "ViTMoEBackbone": _Kind(
        "keras_softmoe.models._vit_moe_backbone",
        (_PREPROCESSOR_MODULE, "ViTMoEImageConverter"),
        "ImageClassifier",
        "image",
        """\
model = ksm.models.ViTMoEImageClassifier.from_preset(
    name, load_weights=False, num_classes=1000
)""",
    ),
    "LIMoEBackbone": _Kind(
        "keras_softmoe.models._limoe_backbone",
        ("keras_softmoe.models._contrastive_preprocessor", "LIMoEImageConverter"),
        "ContrastiveTask",
        "pair of image and caption",
        """\
# T5's vocabulary, which is not in the preset
tokenizer = ksm.models.LIMoETokenizer("spiece.model")
converter = ksm.models.ViTMoEImageConverter.from_preset(name)
model = ksm.models.LIMoEContrastive.from_preset(
    name,
    load_weights=False,
    preprocessor=ksm.models.LIMoEPreprocessor(tokenizer, converter),
)""",
    ),
}

# What the papers report of a model that was trained
_RESULTS = {
    "imagenet_zero_shot": ("ImageNet in the paper, zero-shot", "{} %"),
    "imagenet_10_shot": ("ImageNet in the paper, 10 shots", "{} %"),
    "coco_text_to_image": ("COCO in the paper, text to image, recall@1", "{} %"),
    "coco_image_to_text": ("COCO in the paper, image to text, recall@1", "{} %"),
    "text_experts": ("experts for text, soft minimum in training", "{}"),
    "image_experts": ("experts for images, soft minimum in training", "{}"),
}


def preset_files(architecture):
    """All files of a preset without weights.

    Args:
        architecture: `Architecture`.

    Returns:
        dict from the name of a file to its text.
    """
    about = metadata(architecture)
    converter = _image_converter(architecture)
    backbone = config(architecture)
    router = keras.saving.serialize_keras_object(backbone["config"]["router"])
    backbone["config"]["router"] = router
    files = {
        "config.json": backbone,
        "metadata.json": about,
        "image_converter.json": converter,
    }
    if architecture.backbone == "ViTMoEBackbone":
        # A preprocessor for captions has a vocabulary, which the user brings.
        files["preprocessor.json"] = _serialized(
            _PREPROCESSOR_MODULE,
            "ViTMoEImageClassifierPreprocessor",
            {
                **_layer("preprocessor"),
                "image_converter": converter,
                "config_file": "preprocessor.json",
            },
        )
    texts = {name: json.dumps(c, indent=4) + "\n" for name, c in files.items()}
    return texts | {"README.md": _card(architecture, about)}


def config(architecture):
    """The serialized backbone of an architecture, a dict with a router as it is."""
    return _serialized(
        _KINDS[architecture.backbone].module,
        architecture.backbone,
        {
            "name": architecture.name,
            "trainable": True,
            **architecture.arguments,
            "router": architecture.router and architecture.router(),
        },
    )


def metadata(architecture):
    """What `metadata.json` says of an architecture, a dict."""
    parameters, gflop = _counts()[architecture.name]
    published = architecture.published or {}
    optional = {
        "published": published,
        "settings": architecture.settings,
        "note": architecture.note,
    }
    if "head_classes" in published:
        arguments = architecture.arguments
        width = arguments.get("representation_dim") or arguments["hidden_dim"]
        head = (width + 1) * published["head_classes"]
        optional["parameter_count_with_head"] = parameters + head
    return {
        "parameter_count": parameters,
        "gflop_per_image": round(gflop, 2),
        "tasks": [_KINDS[architecture.backbone].task],
        "kind": "architecture",
        "description": _description(architecture),
        "source": architecture.source,
        "licence": _LICENCE,
        "dense_twin": architecture.twin,
        **{key: value for key, value in optional.items() if value},
    }


@functools.cache
def _counts():
    """Dict from name to parameters of the backbone and GFLOP.

    `evaluation.cost` counts them, which stands on models; a test compares.
    """
    file = Path(__file__).with_name("counts.json")
    return json.loads(file.read_text(encoding="utf-8"))


def _serialized(module, class_name, config):
    return {
        "module": module,
        "class_name": class_name,
        "config": config,
        "registered_name": f"keras_softmoe>{class_name}",
    }


def _layer(name):
    policy = keras.dtype_policies.serialize(keras.DTypePolicy("float32"))
    return {"name": name, "trainable": True, "dtype": policy}


def _image_converter(architecture):
    return _serialized(
        *_KINDS[architecture.backbone].converter,
        {
            **_layer("image_converter"),
            "image_size": architecture.arguments["image_shape"][:2],
            "scale": 1.0 / 127.5,
            "offset": -1.0,
            "interpolation": "bilinear",
            "antialias": False,
            "crop_to_aspect_ratio": True,
            "pad_to_aspect_ratio": False,
            "bounding_box_format": "yxyx",
        },
    )


def _description(architecture):
    shape = architecture.arguments
    height, width, _ = shape["image_shape"]
    parts = [
        architecture.title,
        f"{shape['hidden_dim']} wide",
        f"{shape['num_layers']} blocks",
        architecture.what,
        f"patch {shape['patch_size']} at {height} x {width}",
    ]
    if "sequence_length" in shape:
        parts.append(f"texts of {shape['sequence_length']} tokens")
    first, *others = filter(None, parts)
    return f"{first}: {', '.join(others)}."


def _card(architecture, about):
    """The model card, Markdown."""
    kind = _KINDS[architecture.backbone]
    rows = [
        ("parameters of the backbone", f"{about['parameter_count']:,}"),
        (f"GFLOP per {kind.unit}", f"{_counts()[architecture.name][1]:,.1f}"),
        ("weights in float32", f"{4 * about['parameter_count'] / 1e9:,.2f} GB"),
    ]
    published = about.get("published", {})
    if "parameters" in published:
        rows.append(
            (
                f"parameters with a head for {published['head_classes']:,} classes",
                f"{about['parameter_count_with_head']:,} "
                f"(paper: {published['parameters']})",
            )
        )
    if "gflop_per_image" in published:
        rows.append(("GFLOP per image in the paper", published["gflop_per_image"]))
    if "row" in published:
        rows.append(("row", published["row"]))
    rows += [
        (what, wording.format(published[key]))
        for key, (what, wording) in _RESULTS.items()
        if key in published
    ]
    if architecture.twin:
        rows.append(("dense twin", f"`{architecture.twin}`"))
    parts = [
        f"# {architecture.name}",
        about["description"],
        "No weights come with it: load it without, and train.",
        f"""```python
import keras_softmoe as ksm

name = "{architecture.name}"
{kind.code}
```""",
        _table(("", ""), rows),
    ]
    if architecture.settings:
        keys = list(architecture.settings[0])
        parts += [
            "The paper trained it with these settings; the first are the preset's:",
            _table(keys, [setting.values() for setting in architecture.settings]),
        ]
    if architecture.note:
        parts.append(architecture.note)
    parts.append(f"Source: {architecture.source}. Licence: {_LICENCE}.")
    return "\n\n".join(parts) + "\n"


def _table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
