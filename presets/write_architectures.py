"""Write the presets that describe an architecture without weights.

    python presets/write_architectures.py

Their weights were never released (or, for the dense twins, are not ours to ship), so
a preset holds the configuration alone: `from_preset(name, load_weights=False)`. Which
ones there are says `architectures.py`. Nothing is built, so the largest costs as
little as the smallest.
"""

import json
import tempfile
from pathlib import Path

import keras
from architectures import IMAGE_SIZE, architectures

from keras_softmoe import evaluation, models, presets

PRESETS = Path(__file__).resolve().parent
LICENCE = "Apache-2.0"


def main():
    shared = preprocessing()
    for architecture in architectures():
        directory = PRESETS / architecture.name
        directory.mkdir(exist_ok=True)
        for name, text in (shared | files(architecture)).items():
            save(directory / name, text)
    print(f"{len(architectures())} presets")


def preprocessing():
    """The files of the preprocessor, which is the same for all."""
    converter = models.ViTMoEImageConverter(
        image_size=(IMAGE_SIZE, IMAGE_SIZE), name="image_converter"
    )
    with tempfile.TemporaryDirectory() as directory:
        models.ViTMoEImageClassifierPreprocessor(
            converter, name="preprocessor"
        ).save_to_preset(directory)
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
    backbone = models.ViTMoEBackbone
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
        "tasks": ["ImageClassifier"],
        "kind": "architecture",
        "description": description(architecture),
        "source": architecture.source,
        "licence": LICENCE,
        "dense_twin": architecture.twin,
        **{key: value for key, value in optional.items() if value},
    }


def description(architecture):
    shape = architecture.config
    parts = [
        architecture.title,
        f"{shape['hidden_dim']} wide",
        f"{shape['num_layers']} blocks",
        architecture.what,
        f"patch {shape['patch_size']} at {IMAGE_SIZE} x {IMAGE_SIZE}",
    ]
    first, *others = filter(None, parts)
    return f"{first}: {', '.join(others)}."


def card(architecture, about):
    cost = evaluation.cost(architecture.config)
    rows = [
        ("parameters of the backbone", f"{cost.parameters:,}"),
        ("GFLOP per image", f"{cost.gflop_per_image:,.1f}"),
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
    if architecture.twin:
        rows.append(("dense twin", f"`{architecture.twin}`"))
    parts = [
        f"# {architecture.name}",
        about["description"],
        "No weights come with it: load it without, and train.",
        f"""```python
import keras_softmoe as ksm

name = "{architecture.name}"
model = ksm.models.ViTMoEImageClassifier.from_preset(
    name, load_weights=False, num_classes=1000
)
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
