"""The balance of experts in `fit`: the metric of their loss, a warning of drops."""

import math
import warnings

import keras
import numpy as np
from keras import ops

from keras_softmoe.keras_adapter.layers import states_of_draws
from keras_softmoe.keras_adapter.runs import without_gradients
from keras_softmoe.routers import record

# The share of tokens without an expert above which `fit` warns.
_MANY = 0.3


class RoutingLoss:
    """The metric `routing_loss` of a task: the part of the loss that its layers add.

    It belongs to training steps, as `evaluate` has no such losses, and to models that
    have some. (Not tracked by Keras: a second `compile` would keep the first metric.)

    Args:
        model: task with `routers`.
    """

    def __init__(self, model):
        self.metrics = (
            [keras.metrics.Mean(name="routing_loss")] if model.routers else []
        )
        # Whether the latest step, or one that is traced, has such losses.
        self._has_losses = False

    def count(self, losses):
        """Count the `losses` of a model in a step, none outside of training."""
        self._has_losses = bool(losses and self.metrics)
        if self._has_losses:
            self.metrics[0].update_state(sum(ops.sum(loss) for loss in losses))

    def without(self, results):
        """Return the results of metrics, without this one where it does not apply."""
        if self._has_losses:
            return results
        return {k: v for k, v in results.items() if k != "routing_loss"}


class DropWarning(keras.callbacks.Callback):
    """Callback that warns once of dropped tokens, after the first epoch or the last.

    Args:
        first_inputs: function that returns a batch of inputs of the model, or `None`.
    """

    def __init__(self, first_inputs):
        super().__init__()
        self._first_inputs = first_inputs
        self._epochs = 0
        self._has_warned = False

    def on_epoch_end(self, epoch, logs=None):
        self._epochs += 1
        if self._epochs == 1:
            self._check()

    def on_train_end(self, logs=None):
        if self._epochs > 1:
            self._check()

    def _check(self):
        inputs = None if self._has_warned else self._first_inputs()
        if inputs is None:
            return
        dropped = dropped_shares(self.model, inputs)
        many = {block: share for block, share in dropped.items() if share > _MANY}
        if not many:
            return
        self._has_warned = True
        found = ", ".join(f"{share:.0%} at block {b}" for b, share in many.items())
        warnings.warn(
            "Many tokens are dropped: no expert takes them, and they pass the block "
            f"unchanged. Received: {found}, of a batch of the training data after "
            f"epoch {self._epochs}. Let several images share the slots of the experts "
            "(`model.set_routing(group_images=8)`); where tokens choose, give the "
            "balancing losses more weight, or the router a `bias_update_rate`; or "
            "raise its `capacity_factor`. `analysis.RoutingMonitor` follows it through "
            "a training.",
            stacklevel=2,
        )


def may_drop(model):
    """Whether a router of a model may leave tokens without an expert."""
    return any(not router.mixes_tokens for router in model.routers.values())


def dropped_shares(model, inputs):
    """Return a dict from blocks to the share of tokens that no expert takes.

    Tokens for which there are no slots at all do not count: a capacity below the number
    of tokens is a choice. The model is left as it was, and so are its random numbers.
    """
    # Copies: of a tensor of PyTorch an array shares the memory.
    draws = [(s, np.array(ops.convert_to_numpy(s))) for s in states_of_draws(model)]
    names = {id(router): block for block, router in model.routers.items()}
    try:
        with without_gradients(), record(lambda r: names.get(id(r))) as decisions:
            model(
                keras.tree.map_structure(ops.convert_to_tensor, inputs), training=False
            )
    finally:
        for state, value in draws:
            state.assign(value)
    return {block: _dropped(decision) for block, decision in decisions.items()}


def _dropped(decision):
    routing, summary = decision
    if "dropped" not in summary:
        return 0.0
    tokens = float(ops.sum(ops.cast(summary["valid"], "float32")))
    dropped = float(ops.sum(ops.cast(summary["dropped"], "float32")))
    if hasattr(routing, "filled"):
        dropped -= max(tokens - math.prod(routing.filled.shape), 0.0)
    return dropped / max(tokens, 1.0)
