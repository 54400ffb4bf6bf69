"""Presets: their names, descriptions and directories.

A preset is a directory in KerasHub's format: `config.json` (architecture),
`metadata.json`, and, where they exist, `model.weights.h5`, `task.json`,
`task.weights.h5`, `preprocessor.json`, `image_converter.json` and a `README.md` (the
model card). In ours, `metadata.json` also has the `kind`:

- `"trained"`: real weights, trained with the script that is named in its card.
- `"convertible"`: weights released by others, downloaded and converted when first used.
- `"architecture"`: the weights were never released. Load with `load_weights=False`.

Only trained presets are directories in the package; `write` makes those of others.
"""

from keras_softmoe.catalogue import (
    Preset as Preset,
    describe as describe,
    names as names,
    write as write,
)
from keras_softmoe.models.conversion import convert as convert
