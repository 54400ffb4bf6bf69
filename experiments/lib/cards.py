"""The metadata and the card of a trained preset, and the record of its trainings."""

import json
from pathlib import Path

import keras
import numpy as np

from experiments.lib.runs import processor
from keras_softmoe.catalogue import (
    CONFIG_FILE,
    METADATA_FILE,
    front_matter,
    without_front_matter,
)
from keras_softmoe.files import atomic_file

RECORDS = Path(__file__).parents[1] / "trained"

CARD = "README.md"
# Data of the trainings by the last word of a preset's name, with names for hubs.
_DATASETS = {
    "glyphs": "synthetic-glyphs",
    "letters": "synthetic-letters",
    "shapes": "synthetic-captioned-shapes",
}
# Results of a training that are accuracies, and on what they are.
_MEASURED = {
    "zero_shot_new_of_64": "scenes, new combinations, of 64 names",
    "zero_shot_new_of_16": "scenes, new combinations, of 16 names",
    "zero_shot_seen_of_64": "scenes, seen combinations, of 64 names",
    "fine_tuned": "digits, fine-tuned",
}


def read_metadata(directory):
    """The metadata of a preset directory, an empty dict if there are none."""
    file = Path(directory, METADATA_FILE)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write_metadata(directory, **entries):
    """Add entries to the metadata of a preset directory; returns all."""
    metadata = read_metadata(directory) | entries
    _write(Path(directory, METADATA_FILE), json.dumps(metadata, indent=4))
    return metadata


def read_runs(name):
    """The results of all trainings of a preset, a list of dicts, empty if unknown."""
    file = RECORDS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def write_runs(file, runs):
    """Write the results of all trainings of a preset, one training a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, "[\n" + ",\n".join(map(json.dumps, runs)) + "\n]")


def measured(run):
    """Entries of the metadata with the accuracies of the weights of a training.

    Where one model was measured several times, `accuracy` is the mean and
    `accuracy_std` the standard deviation.
    """
    found = {}
    if "upstream_accuracy" in run:
        # Older trainings have one layout, glyphs that fill the image.
        by_layout = run.get("upstream_accuracy_by_layout")
        name = "both layouts" if by_layout else "center"
        found[f"glyphs, {name}"] = run["upstream_accuracy"]
        for layout, value in (by_layout or {}).items():
            found[f"glyphs, {layout}"] = value
    found |= {name: run[key] for key, name in _MEASURED.items() if key in run}
    for shots, values in run.get("few_shot", {}).get("model", {}).items():
        found[f"digits, few-shot, {shots} of a class"] = values
    return {
        "accuracy": {name: float(np.mean(values)) for name, values in found.items()},
        "accuracy_std": {
            name: float(np.std(values, ddof=1))
            for name, values in found.items()
            if np.size(values) > 1
        },
    }


def write_card(directory, name, text):
    """Write the card of a preset into a directory, with the head that hubs read."""
    _write(Path(directory, CARD), with_front_matter(directory, name, text))


def with_front_matter(directory, name, card):
    """The card with a head that has the metadata of the directory.

    Args:
        directory: path of a preset directory.
        name: str, of the preset, where the directory has another name yet.
        card: str, its card, whose head is replaced if there is one.
    """
    config = json.loads(Path(directory, CONFIG_FILE).read_text(encoding="utf-8"))
    head = front_matter(
        name,
        read_metadata(directory),
        datasets=(_DATASETS[name.rpartition("_")[2]],),
        is_mixture=config["config"]["router"] is not None,
    )
    return head + without_front_matter(card)


def machine():
    """Entries of the metadata that say what a model was trained with."""
    return {"backend": keras.config.backend(), "processor": processor()}


def spread(values, digits=3):
    """Mean ± standard deviation, a str; the value if there is one."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def _write(path, text):
    with atomic_file(path) as file:
        file.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
