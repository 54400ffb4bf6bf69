"""Routings: dispatch of tokens to slots, and combination of the outputs.

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
every pair of token and slot (`DenseRouting`). `to_dense` converts the first to the
second, and so defines it. Dropless routing needs no slots, only the choices of tokens
(`ChoiceRouting`).
"""

from typing import Any, NamedTuple, TypeAlias

import keras
from keras import ops

from keras_softmoe.ops.assignment import assign_choices, gates_of_slots
from keras_softmoe.ops.kernels import (
    add_rows,
    as_tensor,
    compiled_on_jax,
    matmul,
    on_own_groups,
    reshape,
    take_rows,
)
from keras_softmoe.ops.numbers import INDEX, count_true, positions, where
from keras_softmoe.ops.selection import take_along
from keras_softmoe.types import Tensor


class SlotRouting(NamedTuple):
    """The assignment of tokens to slots (sparse routing).

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
    """A weight for every pair of token and slot (dense routing).

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


class ChoiceRouting(NamedTuple):
    """The experts that each token chooses, without a limit (dropless routing).

    Each choice is a row of one matrix, sorted by expert, and each expert multiplies its
    own rows. No slot is empty and no choice is dropped.

    Attributes:
        expert: `(G, S, K)` int32, the experts of a token, in `[0, E)`. 0 where the
            choice does not count.
        kept: `(G, S, K)` bool, whether the choice counts: `False` for padding and for
            skipped tokens.
        gate: `(G, S, K)` float, weight of the expert's output in that of the token. 0
            where the choice does not count.
        order: `(G * S * K,)` int32, flat indices of the choices, sorted by expert and
            index. Choices that do not count come last, as zero rows of the last expert.
        row: `(G * S * K,)` int32, the place of each choice in that order.
        count: `(E,)` int32, the rows of each expert. They add up to `G * S * K`.

    Examples:
        >>> router = ksm.routers.SoftmaxTokenChoiceRouter(4, capacity_factor=None)
        >>> routing = router(np.ones((1, 6, 8), "float32")).routing
        >>> int(keras.ops.sum(routing.count))
        6

    Source: Gale et al. 2022 (MegaBlocks), section 4 ("dropless").
    """

    expert: Any
    kept: Any
    gate: Any
    order: Any
    row: Any
    count: Any


Routing: TypeAlias = SlotRouting | DenseRouting | ChoiceRouting


def to_dense(routing: Routing, num_tokens: int) -> DenseRouting:
    """Convert a routing to dispatch and combine weights.

    This is the definition of a `SlotRouting`: the dispatch weight is 1 where the
    token is assigned to the slot and 0 elsewhere; the combine weight is the slot's gate
    there.

    Args:
        routing: `SlotRouting`, `ChoiceRouting` (`S` slots of each expert, mostly
            empty) or `DenseRouting` (returned as it is).
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
        routing = to_slots(routing, num_tokens)
    token, filled, gate = map(as_tensor, routing)
    tokens = reshape(positions(num_tokens, token), (num_tokens, 1, 1))
    # (G, S, E, C)
    assigned = (token[:, None] == tokens) & filled[:, None]
    dispatch = ops.cast(assigned, gate.dtype)
    return DenseRouting(dispatch, dispatch * gate[:, None])


def dispatch(tokens: Tensor, routing: Routing, sharded: bool = False) -> Tensor:
    """Fill the experts' slots with tokens.

    Args:
        tokens: `(G, S, D)` float tensor.
        routing: `SlotRouting` (each slot receives its token, empty slots receive
            zeros), `ChoiceRouting` or `DenseRouting` (each slot receives the weighted
            sum of all tokens, Soft MoE equation 1).
        sharded: bool, whether groups may be sharded over devices. The result is the
            same, computed without tokens of other devices.

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
    tokens = as_tensor(tokens)
    if isinstance(routing, ChoiceRouting):
        # A choice counts if its token does. Padding may hold NaN.
        tokens = where(routing.kept[..., :1], tokens, 0.0)
        rows = reshape(tokens, (-1, tokens.shape[-1]))
        num_choices = routing.expert.shape[-1]
        return _reorder(rows, routing.order, routing.row, num_choices)
    if isinstance(routing, DenseRouting):
        _, num_tokens, num_experts, capacity = ops.shape(routing.dispatch)
        # (G, S, E * C)
        weights = ops.cast(routing.dispatch, tokens.dtype)
        weights = reshape(weights, (-1, num_tokens, num_experts * capacity))
        # (G, E * C, D). Not `einsum`, whose gradient on TensorFlow copies operands.
        slots = matmul(ops.transpose(weights, (0, 2, 1)), tokens)
        return reshape(slots, (-1, num_experts, capacity, tokens.shape[-1]))
    _, num_experts, capacity = routing.token.shape
    if sharded:
        index = reshape(routing.token, (-1, num_experts * capacity, 1))
        slots = ops.take_along_axis(tokens, index, axis=1)
        slots = reshape(slots, (-1, num_experts, capacity, tokens.shape[-1]))
        return slots * ops.expand_dims(ops.cast(routing.filled, slots.dtype), -1)
    # It is fastest to take (and in `combine` to add) rows of one matrix of all groups,
    # in the order in which experts multiply them: experts first. But with sharded
    # groups, the compiler would copy all rows to every device.
    rows = reshape(tokens, (-1, tokens.shape[-1]))
    slots = take_rows(rows, _row_of_slot(routing, tokens.shape[1]))
    # (E, G, C, D). JAX loses this shape if there are no rows.
    slots = reshape(slots, (num_experts, -1, capacity, tokens.shape[-1]))
    filled = ops.cast(_experts_first(routing.filled), slots.dtype)
    return _experts_first(slots * filled[..., None])


def combine(
    outputs: Tensor, routing: Routing, num_tokens: int, sharded: bool = False
) -> Tensor:
    """Combine the experts' outputs to outputs of tokens.

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
    outputs = as_tensor(outputs)
    if isinstance(routing, ChoiceRouting):
        num_choices = routing.expert.shape[-1]
        rows = _reorder(outputs, routing.row, routing.order)
        rows = reshape(rows, (-1, num_tokens, num_choices, rows.shape[-1]))
        return ops.sum(rows * ops.cast(routing.gate, rows.dtype)[..., None], axis=2)
    _, num_experts, capacity, width = outputs.shape
    slots = num_experts * capacity
    if isinstance(routing, DenseRouting):
        weights = ops.cast(routing.combine, outputs.dtype)
        weights = reshape(weights, (-1, num_tokens, slots))
        return matmul(weights, reshape(outputs, (-1, slots, width)))
    gate = ops.cast(routing.gate, outputs.dtype)
    if sharded:

        def add(group):
            return ops.segment_sum(*group, num_segments=num_tokens)

        outputs = reshape(outputs * ops.expand_dims(gate, -1), (-1, slots, width))
        token = reshape(routing.token, (-1, slots))
        return on_own_groups(lambda *x: ops.vectorized_map(add, x), outputs, token)
    num_groups = ops.shape(outputs)[0]
    # (E, G, C, D)
    outputs = _experts_first(outputs * gate[..., None])
    rows = add_rows(
        reshape(outputs, (-1, width)),
        _row_of_slot(routing, num_tokens),
        num_groups * num_tokens,
    )
    return reshape(rows, (-1, num_tokens, width))


def _row_of_slot(routing, num_tokens):
    """Return the `(E * G * C,)` rows of the slots in the `(G * S, D)` tokens."""
    token = as_tensor(routing.token)
    first = positions(ops.shape(token)[0], token)[:, None, None] * num_tokens
    return reshape(_experts_first(token + first), (-1,))


def _experts_first(x):
    """Exchange the first two axes, groups and experts. It is its own inverse."""
    return ops.transpose(x, (1, 0, *range(2, len(x.shape))))


# === Dropless routing: the choices of tokens, sorted by expert ===


def choice_routing(scores, chosen, kept=None):
    """Return the `ChoiceRouting` of given choices, experts `(G, S, K)` int32.

    Their gates are those of `(G, S, E)` scores. `kept` is a `(G, S)` bool tensor,
    `False` for padding and skipped tokens, or `None`.
    """
    num_experts = scores.shape[-1]
    gate = take_along(scores, chosen, axis=-1)
    # Choices that do not count have a dummy expert E, after the last one.
    expert, padded = chosen, kept is not None
    if not padded:
        kept = ops.ones_like(chosen, dtype="bool")
    else:
        kept = ops.broadcast_to(kept[..., None], ops.shape(chosen))
        gate = where(kept, gate, 0.0)
        expert = where(kept, chosen, num_experts)
        chosen = where(kept, chosen, 0)
    expert = reshape(expert, (-1,))
    num_choices = ops.shape(expert)[0]
    # Unique keys: the sorted ones tell the order, whatever the backend's rule for ties.
    keys = ops.sort(expert * num_choices + positions(num_choices, expert), axis=-1)
    order = ops.cast(keys % num_choices, "int32")
    row = ops.cast(ops.argsort(order), "int32")
    # (E,). The last expert has the rows of the dummy.
    if padded:
        expert = where(expert < num_experts, expert, num_experts - 1)
    is_of_expert = expert[:, None] == positions(num_experts, expert)
    count = count_true(is_of_expert, axis=0, dtype="int32")
    return ChoiceRouting(ops.cast(chosen, "int32"), kept, gate, order, row, count)


def to_slots(routing, num_tokens):
    """Return a `ChoiceRouting` as `SlotRouting` with `S` slots; others unchanged."""
    if not isinstance(routing, ChoiceRouting):
        return routing
    routing = ChoiceRouting(*map(as_tensor, routing))
    experts = positions(routing.count.shape[0], routing.expert)
    # (G, S, K, E)
    of_expert = routing.expert[..., None] == experts
    gate = routing.gate[..., None] * ops.cast(of_expert, routing.gate.dtype)
    # (G, S, E): a token chooses no expert twice.
    gate = ops.sum(gate, axis=2)
    kept, chosen = routing.kept[..., 0], ops.cast(routing.expert, INDEX)
    token, filled = assign_choices(gate, chosen, num_tokens, valid=kept)
    return SlotRouting(token, filled, gates_of_slots(gate, token, filled))


@compiled_on_jax("copies")
def _reorder(rows, order, inverse, copies=1):
    """Return rows, or several copies of each, in another order.

    Their gradient is taken in the inverse order. By default TensorFlow and JAX add it
    up, which is slow. On JAX it has no derivative in forward mode.
    """

    def take(rows, order, inverse):
        return take_rows(rows, order // copies if copies > 1 else order)

    def sum_of_copies(rows):
        if copies == 1:
            return rows
        return ops.sum(reshape(rows, (-1, copies, rows.shape[-1])), axis=1)

    if keras.backend.backend() == "jax":
        import jax

        def backward(known, upstream):
            order, inverse = known
            upstream = _reorder(upstream, inverse, order)
            return sum_of_copies(upstream), None, None

        reordered = jax.custom_vjp(take)
        reordered.defvjp(lambda *known: (take(*known), known[1:]), backward)
        return reordered(rows, order, inverse)
    if keras.backend.backend() == "torch":
        return take(rows, order, inverse)
    return ops.custom_gradient(
        lambda rows: (
            take(rows, order, inverse),
            lambda upstream: sum_of_copies(take_rows(upstream, inverse)),
        )
    )(rows)
