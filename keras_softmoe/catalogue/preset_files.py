"""Files of an architecture's preset directory, in KerasHub's format."""

import json
from typing import NamedTuple

import keras

from keras_softmoe.catalogue.front_matter import front_matter

_LICENCE = "Apache-2.0"
_LICENCE_OF_RELEASED = (
    "Apache-2.0, of the repository that releases it; none is stated for the checkpoint "
    "itself"
)
_PREPROCESSOR_MODULE = "keras_softmoe.models.image_preprocessor"


class _Kind(NamedTuple):
    """Files and texts that depend on the class of the backbone.

    Attributes:
        module: str, module of the backbone's class.
        converter: pair of str, module and name of the class of its image converter.
        task: str, of which KerasHub finds it to be a backbone.
        unit: str, the input of one count of operations.
        code: str, how a model is made.
    """

    module: str
    converter: tuple
    task: str
    unit: str
    code: str


_KINDS = {
    "ViTMoEBackbone": _Kind(
        "keras_softmoe.models.vit",
        (_PREPROCESSOR_MODULE, "ViTMoEImageConverter"),
        "ImageClassifier",
        "image",
        """\
model = ksm.models.ViTMoEImageClassifier.from_preset(
    name, load_weights=False, num_classes=1000
)""",
    ),
    "LIMoEBackbone": _Kind(
        "keras_softmoe.models.limoe",
        ("keras_softmoe.models.contrastive_preprocessor", "LIMoEImageConverter"),
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

_CODE_OF_RELEASED = "classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)"
_WEIGHTS_OF_RELEASED = (
    "The weights are downloaded from the place of their release when the preset is "
    "first loaded, converted, and kept in the directory of Keras "
    "(`~/.keras/keras_softmoe`). Without a network, the error lists the files to fetch "
    "and the call of `ksm.presets.convert` that converts them. The converter is tested "
    "on files of this format with other weights: neither the size of this checkpoint "
    "nor its accuracy after conversion has been measured here."
)

# Data by the words of `Release.training`, with the hub's identifiers
_DATASETS = {"ImageNet-21k": "imagenet-21k", "ILSVRC2012": "imagenet-1k"}

# Results of trained models in the papers
_RESULTS = {
    "imagenet_zero_shot": ("ImageNet in the paper, zero-shot", "{} %"),
    "imagenet_10_shot": ("ImageNet in the paper, 10 shots", "{} %"),
    "coco_text_to_image": ("COCO in the paper, text to image, recall@1", "{} %"),
    "coco_image_to_text": ("COCO in the paper, image to text, recall@1", "{} %"),
    "text_experts": ("experts for text, soft minimum in training", "{}"),
    "image_experts": ("experts for images, soft minimum in training", "{}"),
}


def preset_files(row):
    """Return all files of a preset without weights.

    Args:
        row: `Row`.

    Returns:
        dict from the name of a file to its text.
    """
    about = metadata(row)
    converter = _image_converter(row)
    backbone = config(row)
    router = keras.saving.serialize_keras_object(backbone["config"]["router"])
    backbone["config"]["router"] = router
    files = {
        "config.json": backbone,
        "metadata.json": about,
        "image_converter.json": converter,
    }
    if row.kind.backbone == "ViTMoEBackbone":
        # A preprocessor for captions needs a vocabulary from the user.
        files["preprocessor.json"] = preprocessor = _serialized(
            _PREPROCESSOR_MODULE,
            "ViTMoEImageClassifierPreprocessor",
            {
                **_layer("preprocessor"),
                "image_converter": converter,
                "config_file": "preprocessor.json",
            },
        )
    if row.release:
        files["task.json"] = _serialized(
            "keras_softmoe.models.image_classifier",
            "ViTMoEImageClassifier",
            {
                "name": f"{row.name}_classifier",
                "trainable": True,
                "backbone": backbone,
                "preprocessor": preprocessor,
                "num_classes": row.release.num_classes,
                "activation": None,
                "dropout": 0.0,
                "head_dtype": None,
            },
        )
    texts = {name: json.dumps(c, indent=4) + "\n" for name, c in files.items()}
    training = row.release.training if row.release else ""
    datasets = [name for words, name in _DATASETS.items() if words in training]
    head = front_matter(row.name, about, datasets, row.router is not None)
    return texts | {"README.md": head + _card(row, about)}


def config(row):
    """Return the serialized backbone of an architecture, except its router."""
    return _serialized(
        _KINDS[row.kind.backbone].module,
        row.kind.backbone,
        {
            "name": row.name,
            "trainable": True,
            **row.arguments,
            "router": row.router and row.router(),
        },
    )


def metadata(row):
    """Return the content of `metadata.json` of a row, a dict."""
    parameters, gflop = row.counts
    published, release = row.published or {}, row.release
    optional = {
        "published": published,
        "settings": row.settings,
        "note": row.note,
        "checkpoint": release and release.checkpoint,
        "accuracy": release and release.accuracy,
    }
    num_classes = release.num_classes if release else published.get("head_classes")
    if num_classes:
        arguments = row.arguments
        width = arguments.get("representation_dim") or arguments["hidden_dim"]
        head = (width + 1) * num_classes
        optional["parameter_count_with_head"] = parameters + head
    return {
        "parameter_count": parameters,
        "gflop_per_image": round(gflop, 2),
        "tasks": [_KINDS[row.kind.backbone].task],
        "kind": "convertible" if release else "architecture",
        "description": _description(row),
        "source": row.source,
        "licence": _LICENCE_OF_RELEASED if release else _LICENCE,
        "dense_twin": row.twin,
        **{key: value for key, value in optional.items() if value},
    }


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


def _image_converter(row):
    return _serialized(
        *_KINDS[row.kind.backbone].converter,
        {
            **_layer("image_converter"),
            "image_size": row.arguments["image_shape"][:2],
            "scale": 1.0 / 127.5,
            "offset": -1.0,
            "interpolation": "bilinear",
            "antialias": False,
            "crop_to_aspect_ratio": row.release is None or row.release.crop,
            "pad_to_aspect_ratio": False,
            "bounding_box_format": "yxyx",
        },
    )


def _description(row):
    shape = row.architecture().flat()
    height, width, _ = shape["image_shape"]
    parts = [
        row.title,
        f"{shape['hidden_dim']} wide",
        f"{shape['num_layers']} blocks",
        row.experts,
        f"patch {shape['patch_size'][0]} at {height} x {width}",
    ]
    if "sequence_length" in shape:
        parts.append(f"texts of {shape['sequence_length']} tokens")
    if row.release:
        parts.append(row.release.training)
    first, *others = filter(None, parts)
    return f"{first}: {', '.join(others)}."


def _card(row, about):
    """Return the model card, Markdown."""
    kind, release = _KINDS[row.kind.backbone], row.release
    rows = [
        ("parameters of the backbone", f"{about['parameter_count']:,}"),
        (f"GFLOP per {kind.unit}", f"{row.counts[1]:,.1f}"),
        ("weights in float32", f"{4 * about['parameter_count'] / 1e9:,.2f} GB"),
    ]
    if release:
        rows += [
            ("parameters with the head", f"{about['parameter_count_with_head']:,}"),
            ("classes", f"{release.num_classes:,}"),
            ("checkpoint", f"`{release.checkpoint}`"),
            *(
                (on, f"{100 * accuracy:.1f} %")
                for on, accuracy in release.accuracy.items()
            ),
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
        (title, wording.format(published[key]))
        for key, (title, wording) in _RESULTS.items()
        if key in published
    ]
    if row.twin:
        rows.append(("dense twin", f"`{row.twin}`"))
    parts = [
        f"# {row.name}",
        about["description"],
        _WEIGHTS_OF_RELEASED
        if release
        else "No weights come with it: load it without, and train.",
        f"""```python
import keras_softmoe as ksm

name = "{row.name}"
{_CODE_OF_RELEASED if release else kind.code}
```""",
        _table(("", ""), rows),
    ]
    if row.settings:
        keys = list(row.settings[0])
        parts += [
            "The paper trained it with these settings; the first are the preset's:",
            _table(keys, [setting.values() for setting in row.settings]),
        ]
    if row.note:
        parts.append(row.note)
    parts.append(f"Source: {row.source}. Licence: {about['licence']}.")
    return "\n\n".join(parts) + "\n"


def _table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
