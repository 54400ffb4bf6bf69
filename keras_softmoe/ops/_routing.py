"""Where tokens go and how they come back: two views of one routing.

Axis legend, the same in every file of the library:

- `G`: groups of tokens that are routed together (one or several images)
- `S`: tokens in a group
- `D`: width of a token
- `E`: experts
- `C`: slots of an expert (its capacity)
- `K`: experts that a token chooses
- `H`: hidden width of an expert
- `B`: images

A *slot* is a place for one input of an expert. A sparse router assigns at most one
token to each slot, so a table of token indices describes it completely (`SlotRouting`).
A soft router assigns a mixture of all tokens to each slot, which takes a weight for
every pair of token and slot (`DenseRouting`). `to_dense` turns the first into the
second and so defines what the first means. Where tokens choose and nothing is dropped
there need be no slots, only the choices themselves (`ChoiceRouting`).
"""

from typing import Any, NamedTuple, TypeAlias

from keras import ops

from keras_softmoe.ops.backend import add_rows
from keras_softmoe.ops.choices import (
    ChoiceRouting,
    add_rows_of_choices,
    take_rows,
    to_slots,
)
from keras_softmoe.types import Tensor


class SlotRouting(NamedTuple):
    """Which token is assigned to which slot (the sparse view).

    Attributes:
        token: `(G, E, C)` int32, index of the token in the slot, in `[0, S)`.
            0 where the slot is empty.
        filled: `(G, E, C)` bool, whether a token is assigned to the slot.
        gate: `(G, E, C)` float, weight of the slot's output in the output of its
            token. 0 where the slot is empty.

    Examples:
        >>> scores = np.random.uniform(size=(1, 4, 2))
        >>> token, filled = ksm.ops.expert_choice(scores, capacity=2)
        >>> gate = keras.ops.cast(filled, "float32")
        >>> routing = ksm.ops.SlotRouting(token, filled, gate)
        >>> routing.token.shape
        (1, 2, 2)
    """

    token: Any
    filled: Any
    gate: Any


class DenseRouting(NamedTuple):
    """A weight for every pair of token and slot (the dense view).

    Attributes:
        dispatch: `(G, S, E, C)` float, weight of the token in the slot's input.
        combine: `(G, S, E, C)` float, weight of the slot's output in the token's
            output.

    Examples:
        >>> weights = np.full((1, 4, 2, 2), 0.25, "float32")
        >>> routing = ksm.ops.DenseRouting(dispatch=weights, combine=weights)
        >>> ksm.ops.dispatch(np.ones((1, 4, 8), "float32"), routing).shape
        (1, 2, 2, 8)
    """

    dispatch: Any
    combine: Any


Routing: TypeAlias = SlotRouting | DenseRouting | ChoiceRouting


def to_dense(routing: Routing, num_tokens: int) -> DenseRouting:
    """Write a routing as dispatch and combine weights.

    This is the definition of a `SlotRouting`: the dispatch weight is 1 where the
    token is assigned to the slot and 0 elsewhere; the combine weight is the slot's gate
    there.

    Args:
        routing: `SlotRouting`, `ChoiceRouting` (with `S` slots of each expert, most of
            them empty) or `DenseRouting` (returned as it is).
        num_tokens: int, the number `S` of tokens in a group.

    Returns:
        `DenseRouting` with `(G, S, E, C)` tensors in the dtype of the gates.

    Examples:
        >>> scores = np.random.uniform(size=(1, 4, 2))
        >>> token, filled = ksm.ops.expert_choice(scores, capacity=2)
        >>> gate = keras.ops.cast(filled, "float32")
        >>> dense = ksm.ops.to_dense(ksm.ops.SlotRouting(token, filled, gate), 4)
        >>> dense.dispatch.shape
        (1, 4, 2, 2)
    """
    if isinstance(routing, DenseRouting):
        return routing
    if isinstance(routing, ChoiceRouting):
        routing = SlotRouting(*to_slots(routing, num_tokens))
    tokens = ops.reshape(ops.arange(num_tokens, dtype="int32"), (1, num_tokens, 1, 1))
    # (G, S, E, C)
    assigned = ops.logical_and(
        ops.equal(ops.expand_dims(routing.token, 1), tokens),
        ops.expand_dims(routing.filled, 1),
    )
    dispatch = ops.cast(assigned, routing.gate.dtype)
    return DenseRouting(dispatch, dispatch * ops.expand_dims(routing.gate, 1))


def dispatch(tokens: Tensor, routing: Routing, sharded: bool = False) -> Tensor:
    """Fill the experts' slots with tokens.

    Args:
        tokens: `(G, S, D)` float tensor.
        routing: `SlotRouting` (each slot receives its token, empty slots receive
            zeros), `ChoiceRouting` or `DenseRouting` (each slot receives the weighted
            sum of all tokens, Soft MoE equation 1).
        sharded: bool, whether groups may be sharded over devices. The result is the
            same, by operations that need no tokens of other devices.

    Returns:
        `(G, E, C, D)` tensor of slot inputs, in the dtype of `tokens`; for a
        `ChoiceRouting` `(G * S * K, D)`, its rows in their order.

    Examples:
        >>> scores = np.random.uniform(size=(1, 4, 2))
        >>> token, filled = ksm.ops.expert_choice(scores, capacity=2)
        >>> routing = ksm.ops.SlotRouting(
        ...     token, filled, keras.ops.cast(filled, "float32")
        ... )
        >>> ksm.ops.dispatch(np.ones((1, 4, 8), "float32"), routing).shape
        (1, 2, 2, 8)
    """
    tokens = ops.convert_to_tensor(tokens)
    if isinstance(routing, ChoiceRouting):
        return take_rows(tokens, routing)
    if isinstance(routing, DenseRouting):
        _, _, num_experts, capacity = routing.dispatch.shape
        # (G, S, E * C)
        weights = _merge_slots(ops.cast(routing.dispatch, tokens.dtype))
        # (G, E * C, D). Not `einsum`, whose gradient on TensorFlow copies operands.
        slots = ops.matmul(ops.transpose(weights, (0, 2, 1)), tokens)
        return ops.reshape(slots, (-1, num_experts, capacity, tokens.shape[-1]))
    if sharded:
        slots = _take_in_groups(tokens, routing.token)
        return slots * ops.expand_dims(ops.cast(routing.filled, slots.dtype), -1)
    _, num_experts, capacity = routing.token.shape
    rows = ops.reshape(tokens, (-1, tokens.shape[-1]))
    slots = ops.take(rows, _row_of_slot(routing, tokens.shape[1]), axis=0)
    # (E, G, C, D), which JAX forgets where there are no rows.
    slots = ops.reshape(slots, (num_experts, -1, capacity, tokens.shape[-1]))
    filled = ops.cast(_experts_first(routing.filled), slots.dtype)
    return _experts_first(slots * ops.expand_dims(filled, -1))


def combine(
    outputs: Tensor, routing: Routing, num_tokens: int, sharded: bool = False
) -> Tensor:
    """Bring the experts' outputs back to the tokens.

    Args:
        outputs: `(G, E, C, D)` float tensor, the experts' outputs slot by slot; for a
            `ChoiceRouting` `(G * S * K, D)`.
        routing: `SlotRouting`, `ChoiceRouting` or `DenseRouting`.
        num_tokens: int, the number `S` of tokens in a group.
        sharded: bool, see `dispatch`.

    Returns:
        `(G, S, D)` tensor in the dtype of `outputs`: for each token the sum of the
        slot outputs weighted by their gates (Soft MoE equation 2). A token in no slot
        gets zeros.

    Examples:
        >>> scores = np.random.uniform(size=(1, 4, 2))
        >>> token, filled = ksm.ops.expert_choice(scores, capacity=2)
        >>> routing = ksm.ops.SlotRouting(
        ...     token, filled, keras.ops.cast(filled, "float32")
        ... )
        >>> ksm.ops.combine(np.ones((1, 2, 2, 8), "float32"), routing, 4).shape
        (1, 4, 8)
    """
    outputs = ops.convert_to_tensor(outputs)
    if isinstance(routing, ChoiceRouting):
        return add_rows_of_choices(outputs, routing, num_tokens)
    _, num_experts, capacity, width = outputs.shape
    if isinstance(routing, DenseRouting):
        weights = _merge_slots(ops.cast(routing.combine, outputs.dtype))
        outputs = ops.reshape(outputs, (-1, num_experts * capacity, width))
        return ops.matmul(weights, outputs)
    gate = ops.cast(routing.gate, outputs.dtype)
    if sharded:
        outputs = outputs * ops.expand_dims(gate, -1)
        return _add_in_groups(outputs, routing.token, num_tokens)
    num_groups = ops.shape(outputs)[0]
    # (E, G, C, D)
    outputs = _experts_first(outputs) * ops.expand_dims(_experts_first(gate), -1)
    rows = add_rows(
        ops.reshape(outputs, (-1, width)),
        ops.reshape(_row_of_slot(routing, num_tokens), (-1,)),
        num_groups * num_tokens,
    )
    return ops.reshape(rows, (-1, num_tokens, width))


# Taking rows, and adding them up, is fastest in one matrix with the rows of all groups,
# in the order in which experts multiply them: by experts first. But where groups are
# sharded the compiler cannot see that each device has the rows of its groups, and would
# hand all rows to every device. So there each group is indexed by itself.


def _take_in_groups(tokens, token):
    """`(G, E, C, D)` rows of `(G, S, D)` tokens at `(G, E, C)` indices."""
    _, num_experts, capacity = token.shape
    index = ops.reshape(token, (-1, num_experts * capacity, 1))
    slots = ops.take_along_axis(tokens, index, axis=1)
    return ops.reshape(slots, (-1, num_experts, capacity, tokens.shape[-1]))


def _add_in_groups(outputs, token, num_tokens):
    """`(G, S, D)` sums of `(G, E, C, D)` outputs at `(G, E, C)` indices."""
    _, num_experts, capacity, width = outputs.shape
    num_slots = num_experts * capacity

    def add(group):
        return ops.segment_sum(*group, num_segments=num_tokens)

    outputs = ops.reshape(outputs, (-1, num_slots, width))
    return ops.vectorized_map(add, (outputs, ops.reshape(token, (-1, num_slots))))


def _merge_slots(weights):
    """Reshape `(G, S, E, C)` weights to `(G, S, E * C)`."""
    _, num_tokens, num_experts, capacity = weights.shape
    return ops.reshape(weights, (-1, num_tokens, num_experts * capacity))


def _row_of_slot(routing, num_tokens):
    """`(E, G, C)` rows of the slots' tokens in the `(G * S, D)` matrix of all."""
    groups = ops.arange(ops.shape(routing.token)[0], dtype="int32")
    # (G, 1, 1)
    first_row = ops.reshape(groups * num_tokens, (-1, 1, 1))
    return _experts_first(routing.token + first_row)


def _experts_first(x):
    """Exchange the first two axes, of groups and experts; undoes itself."""
    return ops.transpose(x, (1, 0, *range(2, len(x.shape))))
