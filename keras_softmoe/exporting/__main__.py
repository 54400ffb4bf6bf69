"""Write files for `export_model` in a process with another backend.

python -m keras_softmoe.exporting JOB...
"""

import importlib
import json
import sys
from pathlib import Path

import keras

from keras_softmoe.exporting.write import write


def main():
    """Load the model of each job and write it."""
    for file in sys.argv[1:]:
        text = Path(file).read_text(encoding="utf-8")
        job = json.loads(text, object_hook=_revived)
        for module in job.pop("modules"):
            importlib.import_module(module)
        saved = job.pop("model")
        # The model is trusted: the calling process has saved it.
        model = keras.saving.load_model(saved, compile=False, safe_mode=False)
        write(model, **job)


def _revived(x):
    return keras.InputSpec(**x["input_spec"]) if "input_spec" in x else x


if __name__ == "__main__":
    main()
