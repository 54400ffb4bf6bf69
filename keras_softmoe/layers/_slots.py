"""Slots of all groups, expert by expert."""

from keras import ops

from keras_softmoe.sharding.constraints import constrain


def by_expert(function, slots, path):
    """Apply a function to the slots of each expert, in all groups at once.

    Under a distribution with layouts for `slots_of_groups` and `slots_of_experts` below
    the path, slots are sent to the devices of the experts and back.

    Args:
        function: callable from `(E, N, D)` to a tensor of that shape.
        slots: `(G, E, C, D)` tensor.
        path: str, the path of the layer.

    Returns:
        `(G, E, C, D)` tensor.
    """
    _, num_experts, capacity, width = slots.shape
    of_groups, of_experts = f"{path}/slots_of_groups", f"{path}/slots_of_experts"
    # With experts first each bank is one batched product. With groups first, compilers
    # would transpose the hidden activations, which are several times larger.
    # (E, G, C, D)
    x = ops.transpose(constrain(slots, of_groups), (1, 0, 2, 3))
    # (E, G * C, D)
    x = function(ops.reshape(constrain(x, of_experts), (num_experts, -1, width)))
    x = ops.reshape(x, (num_experts, -1, capacity, width))
    x = ops.transpose(constrain(x, of_experts), (1, 0, 2, 3))
    return constrain(x, of_groups)
