"""Models of which parts are frozen, in their configurations.

Those of KerasHub's kind are flat: they tell the arguments of the constructor, and none
of the layers. So the argument `trainable` tells of the parts, too.
"""

from keras_softmoe.checks import quote
from keras_softmoe.keras_adapter import set_trainable, trainable_parts


def set_trainable_argument(model, trainable):
    """Freeze what the argument `trainable` of a constructor says.

    Args:
        model: `keras.Model`, whose layers are all there. (Keras looks for those to
            freeze before there are any.)
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
    """The argument `trainable` that makes a model like this one.

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
