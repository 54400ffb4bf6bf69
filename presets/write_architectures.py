"""Write the presets that describe an architecture without weights.

    python presets/write_architectures.py

Their weights were never released (or, for the dense twins, are not ours to ship), so
a preset holds the configuration alone: `from_preset(name, load_weights=False)`. Which
ones there are say `architectures.py` and `limoe_architectures.py`. Nothing is built, so
the largest costs as little as the smallest.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import keras
from architectures import image_architectures
from limoe_architectures import limoe

from keras_softmoe import evaluation, models, presets

PRESETS = Path(__file__).resolve().parent
LICENCE = "Apache-2.0"


class Kind(NamedTuple):
    """What differs with the class of the backbone.

    Attributes:
        task: str, of which KerasHub finds it to be a backbone.
        unit: str, what operations are counted for.
        code: str, how a model is made.
    """

    task: str
    unit: str
    code: str


KINDS = {
    models.ViTMoEBackbone: Kind(
        "ImageClassifier",
        "image",
        """\
model = ksm.models.ViTMoEImageClassifier.from_preset(
    name, load_weights=False, num_classes=1000
)""",
    ),
    models.LIMoEBackbone: Kind(
        "ContrastiveTask",
        "pair of image and caption",
        """\
# T5's vocabulary, which is not in the preset
tokenizer = ksm.models.LIMoETokenizer("spiece.model")
converter = ksm.models.LIMoEImageConverter.from_preset(name)
model = ksm.models.LIMoEContrastive.from_preset(
    name,
    load_weights=False,
    preprocessor=ksm.models.LIMoEPreprocessor(tokenizer, converter),
)""",
    ),
}

# What the papers report of a model that was trained
RESULTS = {
    "imagenet_zero_shot": ("ImageNet in the paper, zero-shot", "{} %"),
    "imagenet_10_shot": ("ImageNet in the paper, 10 shots", "{} %"),
    "coco_text_to_image": ("COCO in the paper, text to image, recall@1", "{} %"),
    "coco_image_to_text": ("COCO in the paper, image to text, recall@1", "{} %"),
    "text_experts": ("experts for text, soft minimum in training", "{}"),
    "image_experts": ("experts for images, soft minimum in training", "{}"),
}


def main():
    for architecture in architectures():
        directory = PRESETS / architecture.name
        directory.mkdir(exist_ok=True)
        for name, text in (preprocessing(architecture) | files(architecture)).items():
            save(directory / name, text)
    print(f"{len(architectures())} presets")


def architectures():
    """All of them, a list of `Architecture`."""
    return [*image_architectures(), *limoe()]


def preprocessing(architecture):
    """The files of the preprocessor."""
    size = architecture.config["image_shape"][:2]
    return _preprocessing(architecture.backbone, size)


@functools.cache
def _preprocessing(backbone, image_size):
    if backbone is models.LIMoEBackbone:
        # A preprocessor for captions has a vocabulary, which the user brings.
        saved = models.LIMoEImageConverter(image_size, name="image_converter")
    else:
        converter = models.ViTMoEImageConverter(image_size, name="image_converter")
        saved = models.ViTMoEImageClassifierPreprocessor(converter, name="preprocessor")
    with tempfile.TemporaryDirectory() as directory:
        saved.save_to_preset(directory)
        return {
            file.name: file.read_text(encoding="utf-8") + "\n"
            for file in Path(directory).iterdir()
        }


def files(architecture):
    """The other files of a preset: their names and texts."""
    about = metadata(architecture)
    return {
        presets.CONFIG_FILE: to_json(config(architecture)),
        presets.METADATA_FILE: to_json(about),
        "README.md": card(architecture, about),
    }


def config(architecture):
    arguments = dict(architecture.config)
    router = keras.saving.serialize_keras_object(arguments.pop("router", None))
    backbone = architecture.backbone
    return {
        "module": backbone.__module__,
        "class_name": backbone.__name__,
        "config": {
            "name": architecture.name,
            "trainable": True,
            **arguments,
            "router": router,
        },
        "registered_name": keras.saving.get_registered_name(backbone),
    }


def metadata(architecture):
    cost = evaluation.cost(architecture.config)
    published = architecture.published or {}
    optional = {
        "published": published,
        "settings": architecture.settings,
        "note": architecture.note,
    }
    if "head_classes" in published:
        with_head = evaluation.cost(architecture.config, published["head_classes"])
        optional["parameter_count_with_head"] = with_head.parameters
    return {
        "parameter_count": cost.parameters,
        "gflop_per_image": round(cost.gflop_per_image, 2),
        "tasks": [KINDS[architecture.backbone].task],
        "kind": "architecture",
        "description": description(architecture),
        "source": architecture.source,
        "licence": LICENCE,
        "dense_twin": architecture.twin,
        **{key: value for key, value in optional.items() if value},
    }


def description(architecture):
    shape = architecture.config
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


def card(architecture, about):
    cost = evaluation.cost(architecture.config)
    kind = KINDS[architecture.backbone]
    rows = [
        ("parameters of the backbone", f"{cost.parameters:,}"),
        (f"GFLOP per {kind.unit}", f"{cost.gflop_per_image:,.1f}"),
        ("weights in float32", f"{cost.weight_bytes / 1e9:,.2f} GB"),
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
        for key, (what, wording) in RESULTS.items()
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
        table(("", ""), rows),
    ]
    if architecture.settings:
        keys = list(architecture.settings[0])
        parts += [
            "The paper trained it with these settings; the first are the preset's:",
            table(keys, [setting.values() for setting in architecture.settings]),
        ]
    if architecture.note:
        parts.append(architecture.note)
    parts.append(f"Source: {architecture.source}. Licence: {LICENCE}.")
    return "\n\n".join(parts) + "\n"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def to_json(content):
    return json.dumps(content, indent=4) + "\n"


def save(file, text):
    aside = file.with_name(f".{file.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


if __name__ == "__main__":
    main()
