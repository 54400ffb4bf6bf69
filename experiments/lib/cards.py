"""Trained presets: their weights, metadata and cards, and the record of trainings."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import h5py
import keras
import numpy as np

from experiments.lib.runs import finish, processor, result_file
from keras_softmoe.catalogue import (
    CONFIG_FILE,
    METADATA_FILE,
    PRESET_MARKS,
)
from keras_softmoe.files import atomic_directory, atomic_file

RECORDS = Path(__file__).parents[1] / "trained.json"

CARD = "README.md"
# Data of the trainings by the last word of a preset's name, with names for hubs.
_DATASETS = {
    "icons": "icons-of-open-sets",
    "letters": "synthetic-letters",
}
_PIPELINES = {
    "ImageClassifier": "image-classification",
    "ContrastiveTask": "zero-shot-image-classification",
}
# Names of the data in the metadata's accuracies: an identifier, and a name to read.
_MEASURED_ON = {
    "icons": ("icons-of-open-sets", "icons of open sets, never seen"),
    "letters": ("synthetic-letters", "synthetic letters, new images"),
    "digits": ("scikit-learn-digits", "handwritten digits of scikit-learn, one half"),
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


def read_runs(name, file=RECORDS):
    """The results of all trainings of a preset, a list of dicts, empty if unknown."""
    return _read_records(file).get(name, [])


def write_runs(file, name, runs):
    """Write the results of all trainings of a preset, one training a line."""
    found = _read_records(file) | {name: runs}
    parts = []
    for preset in sorted(found):
        lines = ",\n".join(map(json.dumps, found[preset]))
        parts.append(f"{json.dumps(preset)}: [\n{lines}\n]")
    _write(file, "{\n" + ",\n".join(parts) + "\n}")


def _read_records(file):
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def means(found):
    """Entries of the metadata with accuracies.

    Where one model was measured several times, `accuracy` is the mean and
    `accuracy_std` the standard deviation.

    Args:
        found: dict from what was measured to a float or a list of floats.
    """
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
        _DATASETS[name.rpartition("_")[2]],
        is_mixture=config["config"]["router"] is not None,
    )
    return head + without_front_matter(card)


def front_matter(name, metadata, dataset, is_mixture):
    """Return the head of a card, YAML between dashes, as hubs read it.

    `metadata` is the content of `metadata.json`, `dataset` the hub's identifier.
    """
    pipeline = _PIPELINES[metadata["tasks"][0]]
    kinds = ["mixture-of-experts"] if is_mixture else []
    fields = {
        "library_name": "keras-hub",
        "license": "apache-2.0",
        "pipeline_tag": pipeline,
        "tags": ["keras", "keras-softmoe", "vision-transformer", *kinds],
        "datasets": [dataset],
        "model-index": [{"name": name, "results": _results(metadata, pipeline)}],
    }
    lines = _lines(fields)
    return "\n".join(["---", *lines, "---", "", ""])


def without_front_matter(card):
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


# === From finished trainings to presets ===


def save_weights(task, work, name):
    """Save a trained task where `publish` finds it, and return that directory.

    Args:
        task: trained task.
        work: path of the working directory.
        name: str, of the run.
    """
    directory = _weights(work, name)
    with atomic_directory(directory, PRESET_MARKS) as aside:
        task.save_to_preset(str(aside))
    return directory


def in_half_precision(file):
    """Rewrite a file of weights in float16, in half the space.

    Keras reads them into variables of any dtype.
    """
    with atomic_file(file) as aside:
        with h5py.File(file) as old, h5py.File(aside, "w") as new:
            new.attrs.update(old.attrs)
            old.visititems(partial(_copy_in_half, new))


def _copy_in_half(new, name, item):
    if isinstance(item, h5py.Dataset):
        dtype = "float16" if item.dtype.kind == "f" else item.dtype
        copied = new.create_dataset(name, data=item[()], dtype=dtype)
    else:
        copied = new.require_group(name)
    copied.attrs.update(item.attrs)


def publish(trainings, work, directory, records, describe):
    """Write the weights of the first training, and what is known of all finished ones.

    Nothing is written unless the first is finished.

    Args:
        trainings: sequence of `Run`, of which the first gives the weights.
        work: path of the working directory, which holds what is finished.
        directory: path of the preset, which is replaced in one step.
        records: path of the file of all results.
        describe: callable from the directory to fill and a list of dicts, the results
            of each finished training, that writes metadata and card.
    """
    first, *others = trainings
    if not result_file(work, first.name).exists():
        print(f"{directory.name}: the first seed is missing, nothing is written yet")
        return
    runs = []
    for run in [first, *(r for r in others if result_file(work, r.name).exists())]:
        finished = finish(run, work)
        minutes = round(finished["times"]["training_seconds"] / 60, 1)
        runs.append({"seed": run.seed, "minutes": minutes, **finished["results"]})
    with atomic_directory(directory, PRESET_MARKS) as aside:
        shutil.copytree(_weights(work, first.name), aside, dirs_exist_ok=True)
        describe(aside, runs)
    write_runs(records, directory.name, runs)
    print(f"{directory.name}: weights, metadata and card written")


def _weights(work, name):
    return Path(work, "presets", name)
