"""From scores to seats: which token sits in which slot.

Every function returns the pair `token` `(G, E, C)` int32 and `filled` `(G, E, C)`
bool of a `SlotRouting`; the gates are looked up afterwards, so the scores that
select need not be the scores that weigh. Ties go to the lower index on every
backend.
"""

import keras
from keras import ops

PRIORITIES = ("position", "max")


def token_choice(
    scores, num_selected_experts, capacity, priority="position", valid=None
):
    """Every token chooses its best experts, as long as they have free slots.

    All first choices are seated before all second choices, and so on; among equal
    choices the tokens come in the order of their priority. A choice that finds its
    expert full is dropped and takes no other seat.

    Args:
        scores: `(G, S, E)` float tensor, how well token and expert suit each other.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        capacity: int, the number `C` of slots of an expert. May exceed `S`.
        priority: who is seated first. `"position"`: tokens in their order
            (the vanilla algorithm). `"max"`: tokens by their largest score,
            descending (batch prioritized routing).
        valid: optional `(G, S)` bool tensor. Tokens with `False` are padding and
            take no slot.

    Returns:
        `token` `(G, E, C)` int32 and `filled` `(G, E, C)` bool.

    Raises:
        ValueError: if `num_selected_experts` is not in `[1, E]`, `capacity` is
            under one, or `priority` is unknown.

    Source: V-MoE, sections 2.3 and 4.1 (algorithms 1 and 2).

    Example:

    >>> scores = np.array([[[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]], "float32")
    >>> token, filled = ksm.ops.token_choice(scores, 1, capacity=1)
    >>> token[0, :, 0]  # token 1 is dropped: expert 0 is full
    [0, 2]
    """
    scores = ops.convert_to_tensor(scores)
    _, num_tokens, num_experts = scores.shape
    check_num_selected_experts(num_selected_experts, num_experts)
    check_priority(priority)
    _check_capacity(capacity)
    num_choices = num_selected_experts * num_tokens

    # (G, S, K), best expert first
    chosen = _top_indices(scores, num_selected_experts)
    if valid is not None:
        # Expert E does not exist: padding queues there and is never seated.
        chosen = ops.where(ops.expand_dims(valid, -1), chosen, num_experts)
    order = None
    if priority == "max":
        # (G, S), the most confident token first
        order = _top_indices(ops.max(scores, axis=-1), num_tokens)
        chosen = ops.take_along_axis(chosen, ops.expand_dims(order, -1), axis=1)
    # (G, K * S): the queue, all first choices before all second choices
    chosen = ops.reshape(ops.transpose(chosen, (0, 2, 1)), (-1, num_choices))

    # Sorting by (expert, place in the queue) brings each expert's choices together
    # in the order in which they are seated. The keys are unique, so the result
    # depends on no backend's rule for ties.
    keys = chosen * num_choices + ops.arange(num_choices, dtype="int32")
    queue = ops.argsort(keys, axis=-1)
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
    place = ops.reshape(place, (-1, num_experts * capacity))
    # (G, E * C), position of the token in the order of priority
    token = ops.cast(ops.take_along_axis(queue, place, axis=1), "int32") % num_tokens
    if order is not None:
        token = ops.take_along_axis(order, token, axis=1)
    token = ops.reshape(token, (-1, num_experts, capacity))
    return ops.where(filled, token, 0), filled


def expert_choice(scores, capacity, valid=None):
    """Every expert chooses its best tokens.

    A token may be chosen by several experts or by none; no slot stays empty unless
    the tokens are padding.

    Args:
        scores: `(G, S, E)` float tensor, how well token and expert suit each other.
        capacity: int in `[1, S]`, the number `C` of tokens that an expert takes.
        valid: optional `(G, S)` bool tensor. Tokens with `False` are padding and
            take no slot.

    Returns:
        `token` `(G, E, C)` int32, in the order of descending score, and `filled`
        `(G, E, C)` bool.

    Raises:
        ValueError: if `capacity` is under one or over `S`.

    Source: Soft MoE, section 3 ("Experts Choice"); router study, section 2.
    """
    scores = ops.convert_to_tensor(scores)
    num_tokens = scores.shape[1]
    _check_capacity(capacity)
    if capacity > num_tokens:
        raise ValueError(
            "An expert cannot choose more tokens than there are. `capacity` must be "
            f"at most the number of tokens in a group, {num_tokens}. "
            f"Received: capacity={capacity}. Use "
            f"`min(capacity, {num_tokens})` or larger groups."
        )
    # (G, E, S)
    scores = ops.transpose(scores, (0, 2, 1))
    if valid is not None:
        valid = ops.expand_dims(valid, 1)
        scores = ops.where(valid, scores, -float("inf"))
    # (G, E, C)
    token = _top_indices(scores, capacity)
    if valid is None:
        return token, ops.ones_like(token, dtype="bool")
    # Scores can be -inf themselves, so ask the mask who is real.
    filled = ops.take_along_axis(
        ops.broadcast_to(valid, ops.shape(scores)), token, axis=-1
    )
    return ops.where(filled, token, 0), filled


def identity(num_groups, num_tokens, num_experts):
    """Seat the tokens round robin, whatever they hold.

    Token `s` goes to slot `s // E` of expert `s % E`.

    Args:
        num_groups: int (or scalar int tensor), the number `G` of groups.
        num_tokens: int, the number `S` of tokens in a group, a multiple of `E`.
        num_experts: int, the number `E` of experts.

    Returns:
        `token` `(G, E, S / E)` int32 and `filled` `(G, E, S / E)` bool.

    Raises:
        ValueError: if `num_tokens` is not a multiple of `num_experts`.

    Source: Soft MoE, section 3.6 and appendix A ("Identity").
    """
    if num_tokens % num_experts:
        raise ValueError(
            "Identity routing needs as many slots as tokens, so the number of tokens "
            "must be a multiple of the number of experts. Received: "
            f"num_tokens={num_tokens}, num_experts={num_experts}. Change "
            "`num_experts`, or choose the image and patch size so that it divides."
        )
    capacity = num_tokens // num_experts
    token = ops.reshape(ops.arange(num_tokens, dtype="int32"), (capacity, num_experts))
    shape = (num_groups, num_experts, capacity)
    token = ops.broadcast_to(ops.transpose(token), shape)
    return token, ops.ones_like(token, dtype="bool")


def check_num_selected_experts(num_selected_experts, num_experts):
    """Raise unless `1 <= num_selected_experts <= num_experts`."""
    if not 1 <= num_selected_experts <= num_experts:
        raise ValueError(
            "A token can choose at least one expert and at most all of them: "
            f"`num_selected_experts` must be between 1 and {num_experts}. "
            f"Received: num_selected_experts={num_selected_experts}. Choose fewer "
            "experts per token or raise `num_experts`."
        )


def check_priority(priority):
    """Raise unless `priority` is one of `PRIORITIES`."""
    if priority not in PRIORITIES:
        raise ValueError(
            f"Unknown `priority`. Accepted: {', '.join(map(repr, PRIORITIES))}. "
            f"Received: priority={priority!r}."
        )


def _check_capacity(capacity):
    if capacity < 1:
        raise ValueError(
            "An expert needs at least one slot. `capacity` must be a positive "
            f"integer. Received: capacity={capacity}. See "
            "`keras_softmoe.ops.expert_capacity`."
        )


def _top_indices(scores, k):
    """Indices of the `k` largest entries of the last axis, ties to the lower index.

    `top_k` promises that order on JAX and TensorFlow. PyTorch's does not, its
    stable sort does.
    """
    if keras.backend.backend() == "torch":
        indices = ops.argsort(-scores, axis=-1)[..., :k]
    else:
        _, indices = ops.top_k(scores, k)
    return ops.cast(indices, "int32")
