"""Files of an architecture's preset directory in KerasHub's format, and its card."""

import json
import re
from collections.abc import Sequence

import keras

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
# By the class of the backbone: the class of its image converter, and the task of which
# KerasHub finds it to be a backbone.
_CONVERTERS = {
    "ViTMoEBackbone": "ViTMoEImageConverter",
    "LIMoEBackbone": "LIMoEImageConverter",
}
_TASKS = {"ViTMoEBackbone": "ImageClassifier", "LIMoEBackbone": "ContrastiveTask"}


def preset_files(row):
    """Return the files of a preset without weights, a dict from names to texts."""
    about, backbone = metadata(row), config(row)
    router = keras.saving.serialize_keras_object(backbone["config"]["router"])
    backbone["config"]["router"] = router
    converter = _serialized(
        _CONVERTERS[row.kind.backbone],
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
    files = {
        "config.json": backbone,
        "metadata.json": about,
        "image_converter.json": converter,
    }
    if row.kind.backbone == "ViTMoEBackbone":
        # A preprocessor for captions needs a vocabulary from the user.
        name = "preprocessor.json"
        of_images = {"image_converter": converter, "config_file": name}
        files[name] = _serialized(
            "ViTMoEImageClassifierPreprocessor", {**_layer("preprocessor"), **of_images}
        )
    if row.release:
        arguments = {
            "name": f"{row.name}_classifier",
            "trainable": True,
            "backbone": backbone,
            "preprocessor": files["preprocessor.json"],
            "num_classes": row.release.num_classes,
            "activation": None,
            "dropout": 0.0,
            "head_dtype": None,
        }
        files["task.json"] = _serialized("ViTMoEImageClassifier", arguments)
    texts = {name: json.dumps(c, indent=4) + "\n" for name, c in files.items()}
    return texts | {"README.md": card(row, about)}


def config(row):
    """Return the serialized backbone of an architecture, except its router."""
    router = row.router and row.router()
    arguments = {"name": row.name, "trainable": True, **row.arguments, "router": router}
    return _serialized(row.kind.backbone, arguments)


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
        "tasks": [_TASKS[row.kind.backbone]],
        "kind": "convertible" if release else "architecture",
        "description": _description(row),
        "source": row.source,
        "licence": _LICENCE_OF_RELEASED if release else _LICENCE,
        "dense_twin": row.twin,
        **{key: value for key, value in optional.items() if value},
    }


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


# === Model cards ===


_PIPELINES = {
    "ImageClassifier": "image-classification",
    "ContrastiveTask": "zero-shot-image-classification",
}
# Names of the data in the metadata's accuracies: an identifier, and a name to read.
_MEASURED_ON = {
    "glyphs": ("synthetic-glyphs", "synthetic glyphs, new images"),
    "letters": ("synthetic-letters", "synthetic letters, new images"),
    "digits": ("scikit-learn-digits", "handwritten digits of scikit-learn, one half"),
    "scenes": ("synthetic-captioned-shapes", "synthetic scenes of shapes, new images"),
}
# Data by the words of `Release.training`, with the hub's identifiers.
_DATASETS = {"ImageNet-21k": "imagenet-21k", "ILSVRC2012": "imagenet-1k"}

# By the class of the backbone: the input of one count of operations, and the code that
# makes a model.
_UNITS = {"ViTMoEBackbone": "image", "LIMoEBackbone": "pair of image and caption"}
_CODE = {
    "ViTMoEBackbone": """\
model = ksm.models.ViTMoEImageClassifier.from_preset(
    name, load_weights=False, num_classes=1000
)""",
    "LIMoEBackbone": """\
# T5's vocabulary, which is not in the preset
tokenizer = ksm.models.LIMoETokenizer("spiece.model")
converter = ksm.models.ViTMoEImageConverter.from_preset(name)
model = ksm.models.LIMoEContrastive.from_preset(
    name,
    load_weights=False,
    preprocessor=ksm.models.LIMoEPreprocessor(tokenizer, converter),
)""",
}
_CODE_OF_RELEASED = "classifier = ksm.models.ViTMoEImageClassifier.from_preset(name)"
_WEIGHTS = "No weights come with it: load it without, and train."
_WEIGHTS_OF_RELEASED = (
    "The weights are downloaded from the place of their release when the preset is "
    "first loaded, converted, and kept in the directory of Keras "
    "(`~/.keras/keras_softmoe`). Without a network, the error lists the files to fetch "
    "and the call of `ksm.presets.convert` that converts them. The converter is tested "
    "on files of this format with other weights: neither the size of this checkpoint "
    "nor its accuracy after conversion has been measured here."
)


def card(row, about):
    """Return the model card of a preset without weights, Markdown with its head."""
    kind, release = row.kind.backbone, row.release
    with_head = about.get("parameter_count_with_head")
    facts = {
        "parameters of the backbone": f"{about['parameter_count']:,}",
        f"GFLOP per {_UNITS[kind]}": f"{row.counts[1]:,.1f}",
        "weights in float32": f"{4 * about['parameter_count'] / 1e9:,.2f} GB",
        "parameters with the head": with_head and f"{with_head:,}",
        "classes": release and f"{release.num_classes:,}",
        "checkpoint": release and f"`{release.checkpoint}`",
        **{on: f"{100 * x:.1f} %" for on, x in about.get("accuracy", {}).items()},
        **{
            f"paper: {key.replace('_', ' ')}": value
            for key, value in about.get("published", {}).items()
        },
        "dense twin": row.twin and f"`{row.twin}`",
    }
    parts = [
        f"# {row.name}",
        about["description"],
        _WEIGHTS_OF_RELEASED if release else _WEIGHTS,
        f"""```python
import keras_softmoe as ksm

name = "{row.name}"
{_CODE_OF_RELEASED if release else _CODE[kind]}
```""",
        _table(("", ""), [(key, value) for key, value in facts.items() if value]),
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
    training = release.training if release else ""
    datasets = [name for words, name in _DATASETS.items() if words in training]
    head = front_matter(row.name, about, datasets, row.router is not None)
    return head + "\n\n".join(parts) + "\n"


def _table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# === The head: YAML between two lines of dashes ===


def front_matter(
    name: str, metadata: dict, datasets: Sequence[str], is_mixture: bool
) -> str:
    """Return the head of the card of a preset, in the form of Hugging Face's hub.

    `metadata` is the content of `metadata.json`; the accuracies of presets that were
    trained here are its results. `datasets` are the hub's identifiers of its data.
    """
    pipeline = _PIPELINES[metadata["tasks"][0]]
    licence = {"license": "apache-2.0"}
    if metadata["licence"] != "Apache-2.0":
        # Hubs take one word for the name of a licence that is not in their list.
        first, _, _ = metadata["licence"].partition(";")
        word = re.sub(r"[^a-z0-9.]+", "-", first.lower())
        licence = {"license": "other", "license_name": word}
    kinds = ["mixture-of-experts"] if is_mixture else []
    fields = {
        "library_name": "keras-hub",
        **licence,
        "pipeline_tag": pipeline,
        "tags": ["keras", "keras-softmoe", "vision-transformer", *kinds],
        "datasets": list(datasets),
    }
    if metadata["kind"] == "trained":
        results = _results(metadata, pipeline)
        fields["model-index"] = [{"name": name, "results": results}]
    lines = _lines({key: value for key, value in fields.items() if value})
    return "\n".join(["---", *lines, "---", "", ""])


def without_front_matter(card: str) -> str:
    """Return the card that a reader sees, without the head for hubs."""
    return re.sub(r"\A---\n.*?\n---\n+", "", card, flags=re.DOTALL)


def _results(metadata, pipeline):
    """Return the results for each data set, with deviations in the names of metrics."""
    found = {}
    for measure, value in metadata["accuracy"].items():
        data, _, how = measure.partition(", ")
        deviation = metadata["accuracy_std"].get(measure)
        spread = f", mean, standard deviation {deviation:.4f}" if deviation else ""
        name = f"accuracy, {how}{spread}"
        found.setdefault(data, []).append(
            {"type": "accuracy", "name": name, "value": round(value, 4)}
        )
    return [
        {
            "task": {"type": pipeline},
            "dataset": dict(zip(("type", "name"), _MEASURED_ON[data], strict=True)),
            "metrics": metrics,
        }
        for data, metrics in found.items()
    ]


def _lines(fields, indent=""):
    """Yield lines of YAML of a dict. Scalars and lists of str are written as JSON."""
    for key, value in fields.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and isinstance(value[0], dict):
            yield f"{indent}{key}:"
            for item in value:
                first, *others = _lines(item, indent + "  ")
                yield f"{indent}- {first.lstrip()}"
                yield from others
        else:
            yield f"{indent}{key}: {json.dumps(value)}"
