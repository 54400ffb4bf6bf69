"""The accuracies that the metadata of a preset hold."""

import numpy as np

# Metadata entries of presets trained here, and their data sets
_MEASURED = {
    "upstream_accuracy": "glyphs",
    "zero_shot_new_of_64": "scenes, new combinations, of 64 names",
    "zero_shot_new_of_16": "scenes, new combinations, of 16 names",
    "zero_shot_seen_of_64": "scenes, seen combinations, of 64 names",
    "fine_tuned": "digits, fine-tuned",
}


def accuracies(metadata):
    """Dict from data set to accuracy, from 0 to 1: published, or measured by us.

    Of several trainings it is the first one's, whose weights the preset holds. Where
    one model was measured several times, it is the mean.
    """
    if "accuracy" in metadata:
        return metadata["accuracy"]
    first, *_ = metadata.get("runs") or [{}]
    found = {name: first[key] for key, name in _MEASURED.items() if key in first}
    for layout, value in first.get("upstream_accuracy_by_layout", {}).items():
        found[f"glyphs, {layout}"] = value
    for shots, values in first.get("few_shot", {}).get("model", {}).items():
        found[f"digits, few-shot, {shots} of a class"] = values
    return {name: float(np.mean(values)) for name, values in found.items()}
