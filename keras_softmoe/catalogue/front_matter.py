"""The head of a card that hubs read: YAML between two lines of dashes."""

import json
import re
from collections.abc import Sequence

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
_HEAD = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)


def front_matter(
    name: str, metadata: dict, datasets: Sequence[str], is_mixture: bool
) -> str:
    """Return the head of the card of a preset, in the form of Hugging Face's hub.

    Args:
        name: str, of the preset.
        metadata: dict, content of `metadata.json`. The accuracies of presets that were
            trained here are its results; those that others published are not.
        datasets: sequence of str, the hub's identifiers of the data of its training.
        is_mixture: bool, whether the model has experts.

    Returns:
        str that ends with an empty line.
    """
    licence = metadata["licence"]
    pipeline = _PIPELINES[metadata["tasks"][0]]
    kinds = ["mixture-of-experts"] if is_mixture else []
    fields = {
        "library_name": "keras-hub",
        **_licence(licence),
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
    return _HEAD.sub("", card)


def _licence(licence):
    if licence == "Apache-2.0":
        return {"license": "apache-2.0"}
    # Hubs take a name of one word for a licence that is not in their list.
    name = re.sub(r"[^a-z0-9.]+", "-", licence.partition(";")[0].lower())
    return {"license": "other", "license_name": name}


def _results(metadata, pipeline):
    """Results for each data set, with deviations in the names of metrics."""
    found = {}
    for measure, value in metadata["accuracy"].items():
        data, _, how = measure.partition(", ")
        deviation = metadata["accuracy_std"].get(measure)
        spread = f", mean, standard deviation {deviation:.4f}" if deviation else ""
        found.setdefault(data, []).append(
            {
                "type": "accuracy",
                "name": f"accuracy, {how}{spread}",
                "value": round(value, 4),
            }
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
    """Lines of YAML of a dict; scalars and lists of texts are JSON, which is YAML."""
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
