"""Assignment of tokens to slots by scores.

The functions return `token` `(G, E, C)` int32 and `filled` `(G, E, C)` bool of a
`SlotRouting`. Gates are looked up afterwards, so the scores that select may differ from
those that weigh. Ties go to the lower index on every backend.
"""

from typing import Any

import keras
from keras import ops

from keras_softmoe.checks import check_choice
from keras_softmoe.ops.kernels import float32_at_least, reshape
from keras_softmoe.ops.selection import (
    take_along,
    top_indices,
    with_real_first,
    zero_padding,
)
from keras_softmoe.types import Tensor

PRIORITIES = ("position", "max", "sum", "pair", "random")


def token_choice(
    scores: Tensor,
    num_selected_experts: int,
    capacity: int,
    priority: str = "position",
    valid: Tensor | None = None,
    keep_fraction: float = 1.0,
    seed: Any = None,
    sharded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Assign to each token its best experts, as long as they have free slots.

    All first choices come before all second choices, and so on; among equal choices
    tokens come in the order of their priority. A choice of a full expert is dropped.

    Args:
        scores: `(G, S, E)` float tensor of scores of tokens and experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        capacity: int, the number `C` of slots of an expert. May exceed `S`.
        priority: order of tokens.

            - `"position"`: their own order (the vanilla algorithm).
            - `"max"`: their largest score, descending (batch prioritized routing).
            - `"sum"`: the sum of their `K` largest scores, descending.
            - `"pair"`: pairs of token and chosen expert by score, descending. A second
              choice may come before another token's first.
            - `"random"`: a random order.
            - a `(G, S)` tensor: these numbers, descending.
        valid: optional `(G, S)` bool tensor, `False` for padding, which gets no slot.
        keep_fraction: float in `(0, 1]`, the fraction of a group's tokens (rounded, at
            least one) that choose experts: those with the highest priority. `"pair"`
            ranks tokens like `"max"`.
        seed: int or `keras.random.SeedGenerator`, for the priority `"random"`.
        sharded: bool, whether groups may be sharded over devices. The result is the
            same, computed without data of other devices.

    Returns:
        `token` `(G, E, C)` int32 and `filled` `(G, E, C)` bool.

    Raises:
        ValueError: if an argument is out of its range.

    Source: V-MoE, section 4.1 and appendix C.1.

    Examples:
        >>> scores = np.array([[[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]], "float32")
        >>> token, filled = ksm.ops.token_choice(scores, 1, capacity=1)
        >>> np.asarray(token)[0, :, 0]  # token 1 is dropped: expert 0 is full
        array([0, 2], dtype=int32)
    """
    scores = ops.convert_to_tensor(scores)
    check_num_selected_experts(num_selected_experts, scores.shape[-1])
    if isinstance(priority, str):
        check_priority(priority)
    check_keep_fraction(keep_fraction)
    _check_capacity(capacity)
    # Not every backend can sort NaN.
    scores = zero_padding(scores, valid)
    if not isinstance(priority, str) and valid is not None:
        priority = ops.where(valid, priority, 0)
    # (G, S, K), best expert first
    chosen = top_indices(scores, num_selected_experts, sharded)
    return assign_choices(
        scores, chosen, capacity, priority, valid, keep_fraction, seed, sharded
    )


def assign_choices(
    scores,
    chosen,
    capacity,
    priority="position",
    valid=None,
    keep_fraction=1.0,
    seed=None,
    sharded=False,
):
    """Return the slots of given choices, see `token_choice`.

    `chosen` is `(G, S, K)` int32, the experts of each token, best first.
    """
    _, num_tokens, num_experts = scores.shape
    num_selected_experts = chosen.shape[-1]
    num_choices = num_selected_experts * num_tokens

    # The order of the queue, (G, K * S) places in that of `_by_choice`; `None` if it is
    # that order.
    rank = order = None
    if not isinstance(priority, str):
        rank = ops.convert_to_tensor(priority)
        order = _queue_order(rank, num_selected_experts, sharded)
    elif priority != "position":
        chosen_scores = take_along(scores, chosen, axis=-1)
        rank = _rank_tokens(chosen_scores, priority, seed)
        if priority == "pair":
            order = top_indices(_by_choice(chosen_scores), num_choices, sharded)
        else:
            order = _queue_order(rank, num_selected_experts, sharded)
    # Skipped tokens are treated as padding.
    if keep_fraction < 1.0:
        valid = _best_tokens(chosen, rank, keep_fraction, valid, sharded)
    if valid is not None:
        # Padding chooses a dummy expert E, and so takes no slot.
        chosen = ops.where(ops.expand_dims(valid, -1), chosen, num_experts)
    # (G, K * S), the queue
    chosen = _by_choice(chosen)
    if order is not None:
        chosen = take_along(chosen, order, axis=1)

    # Sorting by (expert, place in the queue) groups the choices by expert, in the order
    # of assignment. Keys are unique, so the backend's rule for ties does not matter.
    keys = chosen * num_choices + ops.arange(num_choices, dtype="int32")
    queue = ops.argsort(keys, axis=-1)

    # Each expert takes the first C choices of its stretch of the sorted queue.
    experts = ops.arange(num_experts, dtype="int32")
    # (G, E)
    count = ops.sum(
        ops.cast(ops.equal(ops.expand_dims(chosen, -1), experts), "int32"), axis=1
    )
    start = ops.cumsum(count, axis=-1) - count
    slots = ops.arange(capacity, dtype="int32")
    # (G, E, C)
    filled = slots < ops.expand_dims(count, -1)
    place = ops.where(filled, ops.expand_dims(start, -1) + slots, 0)
    place = reshape(place, (-1, num_experts * capacity))
    # (G, E * C), the choice in the slot
    choice = take_along(queue, place, axis=1)
    if order is not None:
        choice = take_along(order, choice, axis=1)
    token = reshape(ops.cast(choice, "int32") % num_tokens, (-1, num_experts, capacity))
    return ops.where(filled, token, 0), filled


def kept_tokens(scores, chosen, priority, keep_fraction, valid=None, seed=None):
    """Return a `(G, S)` mask of the tokens that are not skipped; `None` for all.

    Arguments are those of `assign_choices`.
    """
    if keep_fraction == 1.0:
        return valid
    rank = None
    if priority != "position":
        rank = _rank_tokens(take_along(scores, chosen, axis=-1), priority, seed)
    return _best_tokens(chosen, rank, keep_fraction, valid, sharded=False)


def expert_choice(
    scores: Tensor, capacity: int, valid: Tensor | None = None, sharded: bool = False
) -> tuple[Tensor, Tensor]:
    """Assign to each expert its best tokens: several experts may choose one, or none.

    Args:
        scores: `(G, S, E)` float tensor of scores of tokens and experts.
        capacity: int in `[1, S]`, the number `C` of slots of an expert.
        valid: optional `(G, S)` bool tensor, `False` for padding, which gets no slot.
        sharded: bool, see `token_choice`.

    Returns:
        `token` `(G, E, C)` int32, by descending score, and `filled` `(G, E, C)` bool,
        `False` only where there is padding.

    Raises:
        ValueError: if `capacity` is under one or over `S`.

    Source: Soft MoE, section 3 ("Experts Choice"); router study, section 2.

    Examples:
        >>> scores = np.array([[[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]], "float32")
        >>> token, filled = ksm.ops.expert_choice(scores, capacity=2)
        >>> np.asarray(token)[0]  # expert 1 takes token 1 as well
        array([[0, 1], [2, 1]], dtype=int32)
    """
    scores = ops.convert_to_tensor(scores)
    num_tokens = scores.shape[1]
    _check_capacity(capacity)
    if capacity > num_tokens:
        raise ValueError(
            "`capacity` must be at most the number of tokens in a group, "
            f"{num_tokens}. Received: capacity={capacity}. Use larger groups."
        )
    # (G, E, S)
    scores = ops.transpose(scores, (0, 2, 1))
    if valid is not None:
        valid = ops.expand_dims(valid, 1)
        scores = with_real_first(scores, valid)
    # (G, E, C)
    token = top_indices(scores, capacity, sharded)
    if valid is None:
        return token, ops.ones_like(token, dtype="bool")
    # By the mask: scores of tokens may be -inf, too.
    filled = take_along(ops.broadcast_to(valid, ops.shape(scores)), token, axis=-1)
    return ops.where(filled, token, 0), filled


def gates_of_slots(scores, token, filled):
    """Return the `(G, E, C)` gates of slots from `(G, S, E)` scores, 0 if empty."""
    # (G, E, S)
    by_expert = ops.transpose(scores, (0, 2, 1))
    return ops.where(filled, take_along(by_expert, token, axis=-1), 0.0)


def identity(num_groups, num_tokens, num_experts):
    """Assign token `s` to slot `s // E` of expert `s % E`.

    Returns:
        `token` `(G, E, S / E)` int32 and `filled` `(G, E, S / E)` bool.

    Source: Soft MoE, section 3.6 and appendix A ("Identity").
    """
    check_num_tokens(num_tokens, num_experts)
    capacity = num_tokens // num_experts
    token = reshape(ops.arange(num_tokens, dtype="int32"), (capacity, num_experts))
    shape = (num_groups, num_experts, capacity)
    token = ops.broadcast_to(ops.transpose(token), shape)
    return token, ops.ones_like(token, dtype="bool")


def check_num_tokens(num_tokens, num_experts):
    """Raise unless `num_experts` divides `num_tokens`, as in identity routing."""
    if num_tokens % num_experts:
        raise ValueError(
            "In identity routing `num_experts` must divide the number of tokens. "
            f"Received: num_tokens={num_tokens}, num_experts={num_experts}. Change "
            "`num_experts`, or the image or patch size."
        )


def check_num_selected_experts(num_selected_experts, num_experts):
    """Raise unless `1 <= num_selected_experts <= num_experts`."""
    if not 1 <= num_selected_experts <= num_experts:
        raise ValueError(
            f"`num_selected_experts` must be between 1 and {num_experts}, the number "
            f"of experts. Received: num_selected_experts={num_selected_experts}."
        )


def check_priority(priority):
    """Raise unless `priority` is one of `PRIORITIES`."""
    check_choice("priority", priority, PRIORITIES)


def _check_capacity(capacity):
    if capacity < 1:
        raise ValueError(
            "`capacity` must be a positive integer. Received: "
            f"capacity={capacity}. See `keras_softmoe.ops.expert_capacity`."
        )


def check_keep_fraction(keep_fraction):
    """Raise unless `0 < keep_fraction <= 1`."""
    if not 0.0 < keep_fraction <= 1.0:
        raise ValueError(
            "`keep_fraction` must be over 0 and at most 1. Received: "
            f"keep_fraction={keep_fraction}. 1 keeps all tokens."
        )


def _by_choice(values):
    """Reshape `(G, S, K)` to `(G, K * S)`: all first choices, all second ones, ..."""
    _, num_tokens, num_choices = values.shape
    values = ops.transpose(values, (0, 2, 1))
    return reshape(values, (-1, num_choices * num_tokens))


def _rank_tokens(chosen_scores, priority, seed):
    """Return `(G, S)` numbers, larger for tokens of higher priority."""
    if priority == "random":
        # Not in the default dtype: float16 would have ties.
        return keras.random.uniform(ops.shape(chosen_scores)[:2], 0, 1, "float32", seed)
    if priority == "sum":
        return ops.sum(chosen_scores, axis=-1)
    # Choices come best first.
    return chosen_scores[..., 0]


def _queue_order(rank, num_choices, sharded):
    """Return the order of choices, `(G, K * S)` indices in that of `_by_choice`."""
    num_tokens = rank.shape[1]
    # (G, 1, S), the same order of tokens among all first choices, all second, ...
    order = ops.expand_dims(top_indices(rank, num_tokens, sharded), 1)
    # (K, 1)
    start = ops.expand_dims(ops.arange(num_choices, dtype="int32") * num_tokens, -1)
    return reshape(start + order, (-1, num_choices * num_tokens))


def _best_tokens(chosen, rank, keep_fraction, valid, sharded):
    """Return a `(G, S)` mask of the fraction of tokens with the highest ranks."""
    num_tokens = chosen.shape[1]
    if rank is None:
        falling = ops.arange(num_tokens, 0, -1, dtype="float32")
        rank = ops.broadcast_to(falling, ops.shape(chosen)[:2])
    # Rounded by Python for every number of tokens, as backends may differ
    kept_of = [max(1, round(keep_fraction * n)) for n in range(num_tokens + 1)]
    num_kept = kept_of[-1]
    if valid is not None:
        rank = with_real_first(float32_at_least(rank), valid)
        count = ops.sum(ops.cast(valid, "int32"), axis=-1, keepdims=True)
        num_kept = ops.take(ops.array(kept_of, dtype="int32"), count)
    # (G, S), number of tokens before
    order = top_indices(rank, num_tokens, sharded)
    before = ops.cast(ops.argsort(order, axis=-1), "int32")
    best = before < num_kept
    return best if valid is None else ops.logical_and(best, valid)
