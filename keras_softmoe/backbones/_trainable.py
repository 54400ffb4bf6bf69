"""Frozen parts of models in their configurations.

KerasHub's configurations are flat: they have the arguments of the constructor, and
nothing of the layers. So the argument `trainable` also describes the parts.
"""

from keras_softmoe.checks import quote
from keras_softmoe.keras_adapter.layers import set_trainable, trainable_parts


def set_trainable_argument(model, trainable):
    """Freeze a model according to the argument `trainable` of its constructor.

    Args:
        model: `keras.Model` with all its layers. (Keras applies the argument before
            there are any.)
        trainable: bool; or dict, as `trainable_argument` returns it.

    Raises:
        ValueError: if it is neither.
    """
    flags = trainable.items() if isinstance(trainable, dict) else [("", trainable)]
    if not all(isinstance(p, str) and isinstance(flag, bool) for p, flag in flags):
        raise ValueError(
            "`trainable` must be a bool, or a dict from paths of layers to bools. "
            f"Received: trainable={quote(trainable)}. Pass one of these."
        )
    if trainable is not True:
        set_trainable(model, trainable)


def trainable_argument(model):
    """Return the argument `trainable` that describes the frozen parts of a model.

    Args:
        model: `keras.Model`.

    Returns:
        bool; or, where parts differ, a dict from the paths of layers (`""` for the
        model itself) to bools.
    """
    parts = trainable_parts(model)
    if not parts:
        return model.trainable
    return parts if model.trainable else {"": False, **parts}
