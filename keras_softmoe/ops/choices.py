"""Routing in which nothing is dropped: the choices of tokens, sorted by expert."""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_softmoe.ops.assignment import assign_choices, gates_of_slots
from keras_softmoe.ops.backend import compiled_on_jax, linear_on_jax
from keras_softmoe.ops.selection import take_along


class ChoiceRouting(NamedTuple):
    """Which experts each token chose, all of them with room for it (dropless).

    A `SlotRouting` has places that may be too few, or stay empty. Here each choice is
    one row of one matrix, in the order of the experts, and the experts multiply their
    own stretch of rows.

    Attributes:
        expert: `(G, S, K)` int32, the experts of a token, in `[0, E)`. 0 where the
            choice does not count.
        kept: `(G, S, K)` bool, whether the choice counts: `False` for padding and for
            tokens that are skipped.
        gate: `(G, S, K)` float, weight of the expert's output in that of the token. 0
            where the choice does not count.
        order: `(G * S * K,)` int32, the choices (as they follow each other in the
            tensors above) by expert, in each by index. Choices that do not count come
            last, as rows of zeros of the last expert.
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


def choice_routing(scores, chosen, kept=None):
    """The `ChoiceRouting` of tokens whose experts are known.

    Args:
        scores: `(G, S, E)` float tensor, in which gates are looked up.
        chosen: `(G, S, K)` int32 tensor, the experts of each token.
        kept: optional `(G, S)` bool tensor, `False` for tokens that no expert takes.

    Returns:
        `ChoiceRouting`.
    """
    num_experts = scores.shape[-1]
    gate = take_along(scores, chosen, axis=-1)
    # Of what does not count: an expert E, which comes after the last one
    expert = chosen
    if kept is None:
        kept = ops.ones_like(chosen, dtype="bool")
    else:
        kept = ops.logical_and(ops.expand_dims(kept, -1), ops.ones_like(chosen) > 0)
        gate = ops.where(kept, gate, 0.0)
        expert = ops.where(kept, chosen, num_experts)
        chosen = ops.where(kept, chosen, 0)
    expert = ops.reshape(expert, (-1,))
    num_choices = ops.shape(expert)[0]
    # Unique keys: no backend's rule for ties matters.
    keys = expert * num_choices + ops.arange(num_choices, dtype="int32")
    order = ops.cast(ops.argsort(keys), "int32")
    row = ops.cast(ops.argsort(order), "int32")
    expert = ops.minimum(expert, num_experts - 1)
    experts = ops.arange(num_experts, dtype="int32")
    of_expert = ops.cast(ops.equal(ops.expand_dims(expert, -1), experts), "int32")
    count = ops.sum(of_expert, axis=0)
    return ChoiceRouting(chosen, kept, gate, order, row, count)


def to_slots(routing, num_tokens):
    """The slots of a `ChoiceRouting` `(token, filled, gate)`: `S` of each expert.

    That many are never too few; all but the choices stay empty.
    """
    experts = ops.arange(routing.count.shape[0], dtype="int32")
    # (G, S, K, E)
    of_expert = ops.equal(ops.expand_dims(routing.expert, -1), experts)
    gate = ops.expand_dims(routing.gate, -1) * ops.cast(of_expert, routing.gate.dtype)
    # (G, S, E): a token chooses no expert twice.
    gate = ops.sum(gate, axis=2)
    kept = routing.kept[..., 0]
    token, filled = assign_choices(gate, routing.expert, num_tokens, valid=kept)
    return token, filled, gates_of_slots(gate, token, filled)


def take_rows(tokens, routing):
    """`(G * S * K, D)` rows of `(G, S, D)` tokens: their choices, sorted by expert."""
    num_choices = routing.expert.shape[-1]
    rows = ops.reshape(tokens, (-1, tokens.shape[-1]))
    if num_choices > 1:
        rows = ops.repeat(rows, num_choices, axis=0)
    rows = _reorder(rows, routing.order, routing.row)
    # Whatever padding holds, NaN too, stays outside.
    kept = ops.take(ops.reshape(routing.kept, (-1, 1)), routing.order, axis=0)
    return ops.where(kept, rows, ops.zeros_like(rows))


def add_rows_of_choices(rows, routing, num_tokens):
    """`(G, S, D)` sums of a token's rows, weighted by their gates."""
    num_choices = routing.expert.shape[-1]
    rows = _reorder(rows, routing.row, routing.order)
    rows = ops.reshape(rows, (-1, num_tokens, num_choices, rows.shape[-1]))
    gate = ops.cast(routing.gate, rows.dtype)
    return ops.sum(rows * ops.expand_dims(gate, -1), axis=2)


@compiled_on_jax()
def _reorder(rows, order, inverse):
    """Rows in another order.

    Their gradient is taken back. By itself TensorFlow and JAX would add it up, as if
    rows could meet, which is slow.
    """

    def take(rows):
        return ops.take(rows, order, axis=0)

    def take_back(upstream):
        return ops.take(upstream, inverse, axis=0)

    if keras.backend.backend() == "jax":
        return linear_on_jax(take, take_back, rows)
    if keras.backend.backend() == "torch":
        return take(rows)
    return ops.custom_gradient(lambda rows: (take(rows), take_back))(rows)
