"""Losses of routers in files, and in those of older versions."""

from keras_softmoe import ops
from keras_softmoe.routers.losses import RoutingLoss

# Weights of losses by name, in files that are older than `losses`
FORMER_WEIGHTS = {
    "importance_loss_weight": ops.importance_loss,
    "load_loss_weight": ops.load_loss,
    "gshard_loss_weight": ops.gshard_loss,
    "z_loss_weight": ops.z_loss,
}


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


def with_losses(config, default):
    """Return a router's configuration with `losses` in place of weights by name.

    Args:
        config: dict, from a file of any version.
        default: the default losses of the router, for weights that are left out.

    Raises:
        ValueError: if the configuration has both.
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
        # Without noise, the weight of the load loss had no effect.
        weights.pop(ops.load_loss, None)
    losses = [
        RoutingLoss(function, weight=weights[function])
        for function in FORMER_WEIGHTS.values()
        if weights.get(function)
    ]
    rest = {name: value for name, value in config.items() if name not in named}
    return {**rest, "losses": losses}
