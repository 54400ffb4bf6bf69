"""Transport plans between tokens and experts, with balanced marginals.

A plan is a `(G, S, E)` tensor of non-negative weights. The weights of every token sum
to 1, and those of every expert to `S / E`. Padding (`valid` is `False`) has no weight,
and `S` is then the number of other tokens.
"""

import keras
from keras import ops

from keras_softmoe.checks import check_whole_numbers
from keras_softmoe.ops.assignment import check_capacity
from keras_softmoe.ops.kernels import (
    as_tensor,
    compiled_on_jax,
    float32_at_least,
    repeat,
    reshape,
)
from keras_softmoe.ops.numbers import INDEX, at_least, clip, lowest, positions, where
from keras_softmoe.ops.selection import (
    largest_entry,
    smallest_entry,
    take_along,
    top_values,
)
from keras_softmoe.types import Tensor

# Scalings of a plan between updates of its logarithm. A scaling changes an entry at
# most by the square of the number of tokens, so entries that underflow stay small, and
# four scalings overflow only with 50,000 tokens or more.
_SCALINGS = 4


def sinkhorn_plan(
    logits: Tensor, num_iterations: int = 20, valid: Tensor | None = None
) -> Tensor:
    """Return the entropy-regularized transport plan, by Sinkhorn's iterations.

    The plan `P` maximizes `<P, logits> + entropy(P)` over all plans. Each iteration
    scales the columns (experts) to their marginals and then the rows (tokens), so
    the token marginals hold exactly and the expert marginals in the limit.

    Args:
        logits: `(G, S, E)` float tensor, clipped to a quarter of the largest number.
        num_iterations: int, number of column-and-row scalings.
        valid: optional `(G, S)` bool tensor, `False` for padding.

    Returns:
        `(G, S, E)` tensor, the plan, in float32 at least. It is differentiable through
        the iterations.

    Raises:
        ValueError: if `num_iterations` is under one.

    Source: router study, section 2 ("Sinkhorn Token Choice").

    Examples:
        >>> logits = np.random.normal(size=(1, 16, 4)).astype("float32")
        >>> plan = np.asarray(ksm.ops.sinkhorn_plan(logits))
        >>> bool(abs(plan.sum(axis=2) - 1).max() < 1e-5)  # the weights of each token
        True
    """
    check_whole_numbers(1, num_iterations=num_iterations)
    logits, valid = float32_at_least(logits), as_tensor(valid)
    return _sinkhorn_plan(logits, num_iterations, valid)


@compiled_on_jax("num_iterations")
def _sinkhorn_plan(logits, num_iterations, valid):
    never = lowest(logits)
    logits = clip(logits, -0.5 * never)
    if valid is not None:
        valid = valid[..., None]
        logits = where(valid, logits, never)
        # A group of padding alone is scaled as if it had tokens, and set to zero at
        # the end. Otherwise the sums of padding are 0, and 1 is added to divide by.
        is_token = valid | ~ops.any(valid, axis=1, keepdims=True)
        is_padding = ops.cast(~is_token, logits.dtype)

    def iterate(log_plan, count=_SCALINGS):
        plan = ops.exp(log_plan)
        rows = ops.ones_like(plan[..., :1])
        # (G, 1, E) and (G, S, 1), factors of the columns and of the rows. Columns are
        # scaled to 1: their mass is a factor of all, which the rows take back. Not
        # products of matrices, which GPUs compute in TF32.
        for _ in range(count):
            columns = ops.reciprocal(ops.sum(plan * rows, axis=1, keepdims=True))
            sums = ops.sum(plan * columns, axis=2, keepdims=True)
            rows = ops.reciprocal(sums if valid is None else sums + is_padding)
        return log_plan + ops.log(rows) + ops.log(columns)

    # The first scaling of columns, and that of rows. `log_softmax` subtracts the
    # largest logit first, which avoids rounding errors for large logits.
    log_plan = ops.log_softmax(ops.log_softmax(logits, axis=1), axis=2)
    if valid is not None:
        # Rows of padding have no weight.
        log_plan = where(is_token, log_plan, never)
    # The rest: an update of the logarithm for every four scalings
    left = num_iterations - 1
    if left % _SCALINGS:
        log_plan = iterate(log_plan, left % _SCALINGS)
    if left >= _SCALINGS:
        log_plan = repeat(
            lambda _, log_plan: iterate(log_plan), left // _SCALINGS, log_plan
        )
    plan = ops.exp(log_plan)
    return plan if valid is None else where(valid, plan, 0.0)


def sparse_transport_plan(
    scores: Tensor,
    capacity: int,
    num_iterations: int = 20,
    learning_rate: float = 0.01,
    tolerance: float = 1e-3,
    valid: Tensor | None = None,
    sharded: bool = False,
    limit: Tensor | None = None,
) -> Tensor:
    """Return a transport plan in which an expert receives at most `capacity` tokens.

    The plan `P` minimizes `-<P, scores> + |P|^2 / 2` over all plans with at most
    `capacity` non-zeros in each column (expert). Its semi-dual, in one variable per
    token, is minimized by Adam from zero. The expert marginals hold exactly, the token
    marginals approximately.

    Args:
        scores: `(G, S, E)` float tensor, usually the softmax probabilities, clipped to
            the largest number divided by `4 E`.
        capacity: int, the largest number of non-zeros in a column; at least `S` for no
            constraint.
        num_iterations: int, the largest number of Adam steps.
        learning_rate: float, Adam's step size.
        tolerance: float. A group ends its steps once the norm of the error of its token
            marginals is at most this.
        valid: optional `(G, S)` bool tensor, `False` for padding.
        sharded: bool, see `token_choice`.
        limit: optional `(G,)` int tensor, the largest number of non-zeros of each
            group, from 1 to `capacity`.

    Returns:
        `(G, S, E)` tensor, the plan, in float32 at least. No gradient flows through it.

    Raises:
        ValueError: if `capacity` or `num_iterations` is under one.

    Source: router study, section 2 ("Sparsity-constrained Expert Choice").

    Examples:
        >>> scores = np.random.uniform(size=(1, 16, 4)).astype("float32")
        >>> plan = np.asarray(ksm.ops.sparse_transport_plan(scores, capacity=4))
        >>> bool(((plan > 0).sum(axis=1) <= 4).all())
        True
    """
    check_whole_numbers(1, num_iterations=num_iterations)
    check_capacity(capacity)
    scores, valid, limit = float32_at_least(scores), as_tensor(valid), as_tensor(limit)
    capacity = min(capacity, scores.shape[1])
    solver = (num_iterations, learning_rate, tolerance)
    return _sparse_transport_plan(scores, capacity, *solver, valid, sharded, limit)


@compiled_on_jax("capacity", "num_iterations", "learning_rate", "tolerance", "sharded")
def _sparse_transport_plan(
    scores, capacity, num_iterations, learning_rate, tolerance, valid, sharded, limit
):
    scores, num_experts = ops.stop_gradient(scores), scores.shape[-1]
    never = lowest(scores) / num_experts
    # (G, E, S), (G, 1, S)
    scores = ops.transpose(clip(scores, -0.5 * never), (0, 2, 1))
    row = ops.ones_like(scores[:, :1])
    if valid is not None:
        valid = valid[:, None]
        scores = where(valid, scores, never)
        row = ops.cast(valid, scores.dtype)
    # A number that is added to all scores of an expert changes nothing: then small ones
    # beside the variables of tokens are not rounded.
    scores = scores - largest_entry(scores)
    if keras.backend.backend() == "torch" and scores.device.type != "mps":
        # So that ties go to the lower index: far less than float32 resolves
        index = positions(scores.shape[-1], scores)
        scores = scores.double() - 2.0**-40 * index
    # (G, 1, 1), the mass of an expert; at least that of one token, as it is a divisor
    column = at_least(ops.sum(row, axis=2, keepdims=True), 1.0) / num_experts
    # (k,), the numbers of non-zeros, and (G, 1, k), infinity for those that a group may
    # not have
    count, excess = positions(capacity, scores), None
    if limit is not None:
        excess = ops.cast(count < reshape(limit, (-1, 1, 1)), scores.dtype)
        excess = ops.reciprocal(excess) - 1.0
    count = ops.cast(count + 1, scores.dtype)

    def plan_of(dual, start=0.0):
        """Return the plan for numbers of the tokens, `(G, 1, S)`, added to a start."""
        return _project(scores + dual, column, count, sharded, excess, start)

    # Of each expert its part of what a token shall receive
    share = ops.zeros_like(scores) - row / num_experts

    def step(number, state):
        """Return the state after one of Adam's steps, with the gradient before it."""
        dual, first, second, _ = state
        gradient = ops.sum(plan_of(dual, share), axis=1, keepdims=True)
        return *_adam(dual, first, second, gradient, number, learning_rate), gradient

    zeros = ops.zeros_like(scores[:, :1])
    duals, _, _, gradients = _trace(step, num_iterations, (zeros,) * 4)
    # (iterations, G, 1, 1). If zero is a solution, a group takes no step: Adam would
    # make a full step, even for a gradient of rounding errors. Otherwise it ends with
    # the step that starts at a solution.
    errors = ops.sum(ops.square(gradients), axis=-1, keepdims=True)
    unsolved = ops.cast(errors > tolerance**2, scores.dtype)
    goes_on = ops.cumprod(unsolved, axis=0)
    last = ops.sum(goes_on[:-1], axis=0, keepdims=True)
    index = ops.broadcast_to(ops.cast(last, INDEX), ops.shape(duals[:1]))
    plan = plan_of(take_along(duals, index, axis=0)[0] * unsolved[0])
    plan = ops.cast(plan, row.dtype)
    if valid is not None:
        # Groups of padding alone have an empty plan.
        plan = where(valid, plan, 0.0)
    return ops.stop_gradient(ops.transpose(plan, (0, 2, 1)))


def _adam(x, first, second, gradient, number, learning_rate):
    """Return a variable and both moments after step 0, 1, ... of Adam."""
    steps = number + 1
    if keras.backend.backend() != "torch":
        steps = ops.cast(steps, x.dtype)
    # The weights of all gradients in both moments, which start at zero
    of_first, of_second = 1.0 - 0.9**steps, 1.0 - 0.999**steps
    if keras.backend.backend() == "torch":
        # The same in five operations: the second moment is kept divided by
        # `0.999**number`.
        scale = 0.999**number
        rate, norm = learning_rate / of_first, (scale * 0.999 / of_second) ** 0.5
        first = first.lerp(gradient, 0.1)
        second = second.addcmul(gradient, gradient, value=0.001 / (0.999 * scale))
        root = second.sqrt() + 1e-8 / norm
        return x.addcdiv(first, root, value=-rate / norm), first, second
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * ops.square(gradient)
    root = ops.sqrt(second / of_second) + 1e-8
    update = first / of_first / root
    return x - learning_rate * update, first, second


def _trace(step, count, state):
    """Return the states after 1, 2, ... `count` steps, tensors `(count, ...)`."""
    if keras.backend.backend() == "torch":
        states = [state]
        for number in range(count):
            states.append(step(number, states[-1]))
        return [ops.stack(parts) for parts in zip(*states[1:], strict=True)]

    def next_state(state, number):
        state = step(number, state)
        return state, state

    return ops.scan(next_state, state, ops.arange(count))[1]


def _project(points, mass, count, sharded, excess, start):
    """Return the nearest points of a mass with at most `k` non-zeros, plus a start.

    They are not negative, and the last axis of each adds up to its mass. Ties for the
    last non-zero go to the lower index.

    Args:
        points: `(G, E, S)` tensor.
        mass: `(G, 1, 1)` tensor.
        count: `(k,)` tensor, 1, 2, ... `k`.
        sharded: bool, see `token_choice`.
        excess: optional `(G, 1, k)` tensor, infinity for non-zeros that groups may not
            have, 0 for others.
        start: number, or a tensor like `points`.
    """
    k, is_torch = count.shape[0], keras.backend.backend() == "torch"
    # (G, E, k), descending
    if is_torch:
        chosen, index = points.topk(k)
    else:
        # The only non-zero of a row is then the mass itself, not rounded: such plans of
        # different tokens are ties.
        points = points - largest_entry(points)
        chosen = top_values(points, k, sharded)
        # Not `chosen[..., -1:]`: XLA would replace `top_k` and the slice by a full
        # sort.
        last = smallest_entry(chosen if excess is None else chosen + excess)
    if excess is not None:
        chosen = chosen - excess
    # With the first j points the rest has the mass if this is taken from each: the
    # largest of these candidates is the threshold.
    threshold = largest_entry((ops.cumsum(chosen, axis=-1) - mass) / count)
    if is_torch:
        kept = (chosen - threshold).relu()
        if not isinstance(start, float):
            return start.scatter_add(-1, index, kept)
        return ops.zeros_like(points).scatter(-1, index, kept)
    if excess is not None:
        k = ops.sum(ops.cast(excess == 0, "int32"), axis=-1, keepdims=True)
    # All above the last one are kept, and of those equal to it the first ones.
    above = points > last
    tied = ops.cast(points == last, "int32")
    room = k - ops.sum(ops.cast(above, "int32"), axis=-1, keepdims=True)
    kept = above | ((tied > 0) & (ops.cumsum(tied, axis=-1) <= room))
    return start + where(kept, ops.relu(points - threshold), 0.0)
