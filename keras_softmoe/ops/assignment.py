"""Assignment of tokens to slots by scores.

The functions return `token` `(G, E, C)` int32 and `filled` `(G, E, C)` bool of a
`SlotRouting`. Gates are looked up afterwards, so the scores that select may differ from
those that weigh. Ties go to the lower index on every backend.
"""

import functools
from typing import Any

import numpy as np
from keras import ops

from keras_softmoe.checks import check_choice, is_number
from keras_softmoe.ops.kernels import as_tensor, float32_at_least, reshape, take_rows
from keras_softmoe.ops.numbers import (
    INDEX,
    Constant,
    count_true,
    positions,
    uniform,
    where,
)
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
    scores, valid = as_tensor(scores), as_tensor(valid)
    check_num_selected_experts(num_selected_experts, scores.shape[-1])
    if isinstance(priority, str):
        check_choice("priority", priority, PRIORITIES)
    check_keep_fraction(keep_fraction)
    check_capacity(capacity)
    # Not every backend can sort NaN.
    scores = zero_padding(scores, valid)
    if not isinstance(priority, str) and valid is not None:
        priority = where(valid, as_tensor(priority), 0)
    # (G, S, K), best expert first
    chosen = top_indices(scores, num_selected_experts, sharded)
    token, filled = assign_choices(
        scores, chosen, capacity, priority, valid, keep_fraction, seed, sharded
    )
    return ops.cast(token, "int32"), filled


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
    """Return the slots of given choices, see `token_choice`; indices are of `INDEX`.

    `chosen` is `(G, S, K)`, the experts of each token, best first.
    """
    _, num_tokens, num_experts = scores.shape
    num_selected_experts = chosen.shape[-1]
    num_choices = num_selected_experts * num_tokens

    # 1. The order of the queue, (G, S) tokens, or (G, K * S) choices if these have
    # priorities; `None` for their own order
    rank = order = None
    by_pairs = isinstance(priority, str) and priority == "pair"
    if not isinstance(priority, str):
        rank = ops.convert_to_tensor(priority)
    elif priority != "position":
        chosen_scores = take_along(scores, chosen, axis=-1)
        rank = _rank_tokens(chosen_scores, priority, seed)
    # Skipped tokens are treated as padding.
    if keep_fraction < 1.0:
        valid = _best_tokens(chosen, rank, keep_fraction, valid, sharded)
    if valid is not None:
        # Padding chooses a dummy expert E, and so takes no slot.
        chosen = where(valid[..., None], chosen, num_experts)
    # (G, K * S), all first choices, all second ones, ...
    if by_pairs:
        order = top_indices(_by_choice(chosen_scores), num_choices, sharded)
        chosen = take_along(_by_choice(chosen), order, axis=1)
    elif rank is not None:
        order = top_indices(rank, num_tokens, sharded)
        index = ops.broadcast_to(order[..., None], ops.shape(chosen))
        chosen = _by_choice(take_along(chosen, index, axis=1))
    else:
        chosen = _by_choice(chosen)

    # 2. Sorting by (expert, place in the queue) groups the choices by expert, in the
    # order of assignment. Keys are unique, so the backend's rule for ties does not
    # matter, and the sorted keys themselves tell the places.
    keys = chosen * num_choices + positions(num_choices, chosen)
    queue = ops.sort(keys, axis=-1)

    # 3. Each expert takes the first C choices of its stretch of the sorted queue.
    experts = positions(num_experts, chosen)[:, None]
    # (G, E, 1)
    count = count_true(chosen[:, None] == experts, axis=-1, keepdims=True)
    start = ops.cumsum(count, axis=1) - count
    slots = positions(capacity, chosen)
    # (G, E, C). Empty slots point to any choice.
    filled = slots < count
    index = reshape((start + slots) % num_choices, (-1, num_experts * capacity))
    # (G, E * C), the place in the queue of the choice in the slot, and its token
    token = take_along(queue, index, axis=1)
    token = token % (num_choices if by_pairs else num_tokens)
    if order is not None:
        token = take_along(order, token, axis=1)
        token = token % num_tokens if by_pairs else token
    token = reshape(token, (-1, num_experts, capacity))
    return where(filled, token, 0), filled


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
    scores, valid = as_tensor(scores), as_tensor(valid)
    num_tokens = scores.shape[1]
    check_capacity(capacity)
    if capacity > num_tokens:
        raise ValueError(
            "`capacity` must be at most the number of tokens in a group, "
            f"{num_tokens}. Received: capacity={capacity}. Use larger groups."
        )
    token, filled = best_tokens(scores, capacity, valid, sharded)
    return ops.cast(token, "int32"), filled


def best_tokens(scores, capacity, valid=None, sharded=False):
    """Return the slots of experts that choose, see `expert_choice`; of `INDEX`."""
    # (G, E, S)
    scores = ops.transpose(scores, (0, 2, 1))
    if valid is not None:
        valid = valid[:, None]
        scores = with_real_first(scores, valid)
    # (G, E, C)
    token = top_indices(scores, capacity, sharded)
    if valid is None:
        return token, ops.ones_like(token, dtype="bool")
    # By the mask: scores of tokens may be -inf, too.
    filled = take_along(ops.broadcast_to(valid, ops.shape(scores)), token, axis=-1)
    return where(filled, token, 0), filled


def gates_of_slots(scores, token, filled):
    """Return the `(G, E, C)` gates of slots from `(G, S, E)` scores, 0 if empty."""
    # (G, E, S)
    by_expert = ops.transpose(scores, (0, 2, 1))
    return where(filled, take_along(by_expert, token, axis=-1), 0.0)


def identity(num_groups, num_tokens, num_experts):
    """Assign token `s` to slot `s // E` of expert `s % E`: token, filled `(G, E, C)`.

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


def check_capacity(capacity):
    """Raise unless a capacity is positive."""
    if capacity < 1:
        raise ValueError(
            "`capacity` must be a positive integer. Received: "
            f"capacity={capacity}. See `keras_softmoe.ops.expert_capacity`."
        )


def check_keep_fraction(keep_fraction):
    """Raise unless `0 < keep_fraction <= 1`."""
    if not is_number(keep_fraction) or not 0.0 < keep_fraction <= 1.0:
        raise ValueError(
            "`keep_fraction` must be over 0 and at most 1. Received: "
            f"keep_fraction={keep_fraction!r}. 1 keeps all tokens."
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
        return uniform(ops.shape(chosen_scores)[:2], chosen_scores, seed)
    if priority == "sum":
        return ops.sum(chosen_scores, axis=-1)
    # Choices come best first.
    return chosen_scores[..., 0]


def _best_tokens(chosen, rank, keep_fraction, valid, sharded):
    """Return a `(G, S)` mask of the fraction of tokens with the highest ranks."""
    num_tokens = chosen.shape[1]
    num_kept = max(1, round(keep_fraction * num_tokens))
    if valid is None and rank is None:
        first = positions(num_tokens, chosen) < num_kept
        return ops.broadcast_to(first, ops.shape(chosen)[:2])
    if valid is not None:
        table = _kept_of(keep_fraction, num_tokens).on(valid)
        num_kept = take_rows(table, count_true(valid, axis=-1))[:, None]
    if rank is None:
        # (G, S), number of real tokens before
        before = ops.cumsum(ops.cast(valid, INDEX), axis=-1) - 1
        return (before < num_kept) & valid
    if valid is not None:
        rank = with_real_first(float32_at_least(rank), valid)
    # The place of each token in the order is the inverse permutation.
    order = top_indices(rank, num_tokens, sharded)
    best = ops.argsort(order, axis=-1) < num_kept
    return best if valid is None else best & valid


@functools.lru_cache(maxsize=256)
def _kept_of(keep_fraction, num_tokens):
    """Return the numbers of tokens that are kept of 0, 1, ... `num_tokens`."""
    # Rounded by Python, as backends may differ
    kept = [max(1, round(keep_fraction * n)) for n in range(num_tokens + 1)]
    return Constant(np.array(kept, "int32"))
