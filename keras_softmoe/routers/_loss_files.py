"""Losses of routers in files, of all ages."""

from keras_softmoe import ops
from keras_softmoe.routers._losses import RoutingLoss

# Weights of losses by name, in files that are older than `losses`.
FORMER_WEIGHTS = {
    "importance_loss_weight": ops.importance_loss,
    "load_loss_weight": ops.load_loss,
    "gshard_loss_weight": ops.gshard_loss,
    "z_loss_weight": ops.z_loss,
}


def serialize_loss(loss):
    """The form of a loss in a file: a class of its function's name.

    Not by `keras.saving.serialize_keras_object`, which would import TensorFlow for
    every layer that clones its router.
    """
    name = loss.term.name
    return {
        "module": RoutingLoss.__module__,
        "class_name": name or "RoutingLoss",
        "config": loss.settings() if name else loss.get_config(),
        "registered_name": f"keras_softmoe>{name or 'RoutingLoss'}",
    }


def with_losses(config, default):
    """A configuration of a router with `losses` in place of weights by name.

    Args:
        config: dict, of a file of any age.
        default: losses of the router's class, whose weights a file may leave out.

    Raises:
        ValueError: if it has both.
    """
    named = {name: config[name] for name in FORMER_WEIGHTS if name in config}
    if not named:
        return config
    if config.get("losses") is not None:
        raise ValueError(
            "Weights of losses are part of the losses. Received: losses and "
            f"{', '.join(named)}. Leave the weights out."
        )
    weights = {loss.function: loss.weight for loss in default}
    weights |= {FORMER_WEIGHTS[name]: weight for name, weight in named.items()}
    if config.get("noise_std") == 0:
        # Beside no noise the weight of the load loss did nothing.
        weights.pop(ops.load_loss, None)
    losses = [
        RoutingLoss(function, weight=weights[function])
        for function in FORMER_WEIGHTS.values()
        if weights.get(function)
    ]
    rest = {name: value for name, value in config.items() if name not in named}
    return {**rest, "losses": losses}
