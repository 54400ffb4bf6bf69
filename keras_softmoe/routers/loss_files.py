"""Losses of routers in files."""

from keras_softmoe.routers.losses import RoutingLoss


def serialize_loss(loss):
    """Return the configuration of a loss in a file: a class named by its function.

    `keras.saving.serialize_keras_object` would import TensorFlow for every layer that
    clones its router.
    """
    name = loss.term.name
    return {
        "module": RoutingLoss.__module__,
        "class_name": name or "RoutingLoss",
        "config": loss.settings() if name else loss.get_config(),
        "registered_name": f"keras_softmoe>{name or 'RoutingLoss'}",
    }
