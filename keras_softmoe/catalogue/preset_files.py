"""Files of an architecture's preset directory in KerasHub's format."""

import json

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
    return {name: json.dumps(c, indent=4) + "\n" for name, c in files.items()}


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
