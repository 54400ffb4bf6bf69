"""Models whose variables are spread over devices, while they are used."""

import functools
import warnings

import keras

from keras_softmoe.converters.spread import is_spread, num_processes, whole_value


def warn_if_misplaced(model):
    """Say so if a model is spread over devices and the active distribution is not."""
    if isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel):
        return
    spread = next((v.path for v in model.variables if is_spread(v)), None)
    if spread is not None:
        warnings.warn(
            f"{spread!r} and perhaps more of this model is spread over devices, but no "
            "distribution that spreads models is active: every step collects the "
            "weights of all experts. Use the model under the distribution that it was "
            "built under: `keras.distribution.set_distribution(distribution)`, or `with"
            " distribution.scope():`. Received: distribution="
            f"{keras.distribution.distribution()}.",
            stacklevel=4,
        )


def gather_predictions(model):
    """Let `predict` return all rows in each of several processes.

    Each has the rows of its own devices only, which Keras cannot put together.
    """
    predict = model.predict_function
    if num_processes() == 1 or getattr(predict, "gathers", False):
        return

    @functools.wraps(predict)
    def gathered(*arguments):
        outputs, state = predict(*arguments)
        return keras.tree.map_structure(whole_value, outputs), state

    gathered.gathers = True
    model.predict_function = gathered
