"""What a trained preset says about itself: its metadata and its card."""

import json
from pathlib import Path

import keras
import numpy as np

from experiments.lib.runs import processor
from keras_softmoe.catalogue import METADATA_FILE
from keras_softmoe.files import atomic_file


def read_metadata(directory):
    """The metadata of a preset directory, an empty dict if there are none."""
    file = Path(directory, METADATA_FILE)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write_metadata(directory, **entries):
    """Add entries to the metadata of a preset directory; returns all."""
    metadata = read_metadata(directory) | entries
    _write(Path(directory, METADATA_FILE), json.dumps(metadata, indent=4))
    return metadata


def write_card(directory, text):
    """Write the card of a preset directory."""
    _write(Path(directory, "README.md"), text)


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
