"""Vision mixtures of experts for Keras 3, on TensorFlow, JAX and PyTorch.

`import keras_softmoe as ksm` loads Keras and the modules `ops`, `routers` and `layers`.
The others need KerasHub and TensorFlow, scikit-learn or matplotlib, and are imported
when first used: `ksm.models` is enough.

Keras finds a class by its registered name, so import `keras_softmoe` before something
saved is loaded, and `keras_softmoe.models` before you call
`keras_hub.models.ImageClassifier.from_preset` on a preset of ours. Where KerasHub was
imported before this package, `import keras_softmoe` alone does it.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from keras_softmoe import layers as layers, ops as ops, routers as routers

if TYPE_CHECKING:
    from keras_softmoe import (
        analysis as analysis,
        converters as converters,
        datasets as datasets,
        distribution as distribution,
        evaluation as evaluation,
        exporting as exporting,
        models as models,
        presets as presets,
        training as training,
    )

__version__ = "0.1.0"

_LAZY_ROOMS = (
    *("analysis", "converters", "datasets", "distribution", "evaluation", "exporting"),
    *("models", "presets", "training"),
)

__all__ = ["__version__", "layers", "ops", "routers", *_LAZY_ROOMS]


def __getattr__(name):
    if name in _LAZY_ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return list(__all__)


# With KerasHub loaded the models cost nothing more, and its `from_preset` finds them.
if "keras_hub" in sys.modules:
    importlib.import_module(f"{__name__}.models")
