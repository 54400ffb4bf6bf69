"""Slots and losses of groups that differ in their number of tokens."""

import functools

import numpy as np
from keras import ops

from keras_softmoe.ops.kernels import reshape


@functools.lru_cache(maxsize=256)
def slots_by_length(capacity, factor, largest, choices, num_experts):
    """Return the slots for 0, 1, ... tokens, at least one: `(largest + 1,)` int32.

    Cached, as each eager call needs it. Arguments are those of `Capacity.slots`.
    """

    def slots(num_tokens):
        try:
            return capacity.slots(factor, num_tokens, choices, num_experts)
        except ValueError:
            # So few tokens would have less than one slot.
            return 1

    return np.array([1, *map(slots, range(1, largest + 1))], "int32")


def first_slots(token, filled, limit):
    """Keep the first `limit` slots of each expert, `(G,)` int.

    Slots are filled by priority: a smaller capacity would have filled these.
    """
    slots = ops.arange(filled.shape[-1], dtype="int32")
    filled = ops.logical_and(filled, slots < reshape(limit, (-1, 1, 1)))
    return ops.where(filled, token, 0), filled


def mean_of_groups(losses, num_tokens):
    """Return the mean over the groups with tokens; 0 if there are none."""
    if num_tokens is None:
        groups = losses.shape[0]
        if groups is not None and groups != 0:
            return ops.mean(losses)
        # On TensorFlow the batch size may be known only when the graph runs.
        groups = ops.cast(ops.shape(losses)[0], losses.dtype)
        return ops.sum(losses) / ops.maximum(groups, 1.0)
    has_tokens = num_tokens > 0
    count = ops.maximum(ops.sum(ops.cast(has_tokens, losses.dtype)), 1.0)
    return ops.sum(ops.where(has_tokens, losses, 0.0)) / count
