"""Presets: their names, what they are, and directories of them.

A table of contents. A preset is a directory in KerasHub's format: `config.json`
(architecture), `metadata.json`, and, where they exist, `model.weights.h5`, `task.json`,
`task.weights.h5`, `preprocessor.json`, `image_converter.json` and a `README.md` (the
model card). In ours, `metadata.json` also tells the `kind`:

- `"trained"`: real weights, trained with the script that is named in its card.
- `"convertible"`: weights released by others. They are downloaded and converted when
  they are first asked for, and kept in the cache of Keras.
- `"architecture"`: the weights were never released. Load with `load_weights=False`.
  There is no directory until `write` makes one.

`names` and `describe` import no models. `convert` does, when it is first used.
"""

from typing import TYPE_CHECKING

from keras_softmoe.catalogue import METADATA_FILE as METADATA_FILE
from keras_softmoe.catalogue import Preset as Preset
from keras_softmoe.catalogue import describe as describe
from keras_softmoe.catalogue import names as names
from keras_softmoe.catalogue import write as write

if TYPE_CHECKING:
    from keras_softmoe.models.released import convert as convert


def __getattr__(name):
    if name != "convert":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from keras_softmoe.models.released import convert

    return convert


def __dir__():
    return [*globals(), "convert"]
