"""Transport plans between tokens and experts, with balanced marginals.

A plan is a `(G, S, E)` tensor of non-negative weights. The weights of every token sum
to 1, and those of every expert to `S / E`. Padding (`valid` is `False`) has no weight,
and `S` is then the number of other tokens.
"""

from keras import ops

from keras_softmoe.ops.kernels import compiled_on_jax, float32_at_least, repeat, reshape
from keras_softmoe.ops.numbers import lowest
from keras_softmoe.ops.selection import largest_entry, smallest_entry, top_values
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
    _check_num_iterations(num_iterations)
    return _sinkhorn_plan(float32_at_least(logits), num_iterations, valid)


@compiled_on_jax("num_iterations")
def _sinkhorn_plan(logits, num_iterations, valid):
    # (G, 1, 1)
    mass = _num_tokens(logits, valid) / logits.shape[-1]
    never = lowest(logits)
    logits = ops.clip(logits, 0.5 * never, -0.5 * never)
    is_token = valid
    if valid is not None:
        valid = ops.expand_dims(valid, -1)
        logits = ops.where(valid, logits, never)
        # A group of padding alone is scaled as if it had tokens, and set to zero at
        # the end.
        is_empty = ops.logical_not(ops.any(valid, axis=1, keepdims=True))
        is_token = ops.logical_or(valid, is_empty)

    def iterate(log_plan, count=_SCALINGS):
        plan = ops.exp(log_plan)
        rows = 1.0
        # (G, 1, E) and (G, S, 1), factors of the columns and of the rows
        for _ in range(count):
            columns = mass / ops.sum(plan * rows, axis=1, keepdims=True)
            sums = ops.sum(plan * columns, axis=2, keepdims=True)
            rows = 1.0 / (sums if valid is None else ops.where(is_token, sums, 1.0))
        return log_plan + (ops.log(rows) + ops.log(columns))

    # The first scaling of columns, and that of rows. `log_softmax` subtracts the
    # largest logit first, which avoids rounding errors for large logits.
    log_plan = ops.log(mass) + ops.log_softmax(logits, axis=1)
    log_plan = ops.log_softmax(log_plan, axis=2)
    if valid is not None:
        # Rows of padding have no weight.
        log_plan = ops.where(is_token, log_plan, never)
    # The rest: an update of the logarithm for every four scalings
    left = num_iterations - 1
    if left % _SCALINGS:
        log_plan = iterate(log_plan, left % _SCALINGS)
    if left >= _SCALINGS:
        log_plan = repeat(
            lambda _, log_plan: iterate(log_plan), left // _SCALINGS, log_plan
        )
    plan = ops.exp(log_plan)
    return plan if valid is None else ops.where(valid, plan, 0.0)


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
    _check_num_iterations(num_iterations)
    if capacity < 1:
        raise ValueError(
            f"`capacity` must be a positive integer. Received: capacity={capacity}."
        )
    scores = float32_at_least(scores)
    capacity = min(capacity, scores.shape[1])
    solver = (num_iterations, learning_rate, tolerance)
    return _sparse_transport_plan(scores, capacity, *solver, valid, sharded, limit)


@compiled_on_jax("capacity", "num_iterations", "learning_rate", "tolerance", "sharded")
def _sparse_transport_plan(
    scores, capacity, num_iterations, learning_rate, tolerance, valid, sharded, limit
):
    scores = ops.stop_gradient(scores)
    # (G, 1, 1)
    column = _num_tokens(scores, valid) / scores.shape[-1]
    # Still finite after division by the least mass of a column, `1 / E`
    never = lowest(scores) / scores.shape[-1]
    scores = ops.clip(scores, 0.5 * never, -0.5 * never)
    # (G, E, S), (G, 1, S)
    scores = ops.transpose(scores, (0, 2, 1))
    row = ops.ones_like(scores[:, :1])
    if valid is not None:
        valid = ops.expand_dims(valid, 1)
        scores = ops.where(valid, scores, never)
        row = ops.where(valid, row, 0.0)

    if limit is not None:
        limit = ops.minimum(reshape(limit, (-1, 1, 1)), capacity)

    def plan_of(dual):
        # (G, E, S), given a number for each token, (G, 1, S)
        points = ops.divide(dual + scores, column)
        return column * _project(points, capacity, sharded, limit)

    def gradient_at(dual):
        return ops.sum(plan_of(dual), axis=1, keepdims=True) - row

    def unsolved(gradient):
        norm = ops.sqrt(ops.sum(ops.square(gradient), axis=-1, keepdims=True))
        return ops.cast(norm > tolerance, gradient.dtype)

    def adam_step(step, state):
        # `running` is 0 for groups that have ended, (G, 1, 1).
        dual, first, second, running = state
        gradient = gradient_at(dual)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * ops.square(gradient)
        count = ops.cast(step + 1, dual.dtype)
        first_unbiased = first / (1.0 - 0.9**count)
        second_unbiased = second / (1.0 - 0.999**count)
        update = first_unbiased / (ops.sqrt(second_unbiased) + 1e-8)
        dual = dual - learning_rate * running * update
        return dual, first, second, running * unsolved(gradient)

    # If zero is a solution, no step is taken: Adam would make a full step, even for a
    # gradient of rounding errors.
    zeros = ops.zeros_like(row)
    start = (zeros, zeros, zeros, unsolved(gradient_at(zeros)))
    dual = repeat(adam_step, num_iterations, start)[0]
    plan = plan_of(dual)
    if valid is not None:
        # Groups of padding alone have an empty plan.
        plan = ops.where(valid, plan, 0.0)
    return ops.stop_gradient(ops.transpose(plan, (0, 2, 1)))


def _project(points, k, sharded, limit=None):
    """Return the nearest points on the simplex with at most `k` non-zeros.

    The simplex is that of the last axis. Ties for the last non-zero go to the lower
    index. `limit` is an optional int tensor used in place of `k`, at most `k`.
    """
    # (..., k), descending
    chosen = top_values(points, k, sharded)
    counts = ops.arange(1, k + 1, dtype=points.dtype)
    # The simplex threshold, less the largest point, is the largest of these candidates.
    # Points more than 1 below the largest do not change it.
    top = largest_entry(chosen)
    candidates = ops.maximum(chosen - top, -1.0)
    candidates = (ops.cumsum(candidates, axis=-1) - 1.0) / counts
    if limit is not None:
        inside = ops.arange(k, dtype="int32") < limit
        candidates = ops.where(inside, candidates, -float("inf"))
        chosen = ops.where(inside, chosen, float("inf"))
        k = limit
    threshold = largest_entry(candidates)
    # Not `chosen[..., -1:]`: XLA would replace `top_k` and the slice by a full sort.
    last = smallest_entry(chosen)
    # All above the last one are kept, and of those equal to it the first ones.
    above = points > last
    tied = ops.cast(ops.equal(points, last), "int32")
    room = k - ops.sum(ops.cast(above, "int32"), axis=-1, keepdims=True)
    kept = ops.logical_or(
        above, ops.logical_and(tied > 0, ops.cumsum(tied, axis=-1) <= room)
    )
    return ops.where(kept, ops.relu(points - top - threshold), 0.0)


def _num_tokens(scores, valid):
    """Return the number of tokens of each group without padding, `(G, 1, 1)` float."""
    if valid is None:
        return ops.full_like(scores[:, :1, :1], scores.shape[1])
    # At least one, as it is a divisor
    count = ops.maximum(ops.sum(ops.cast(valid, scores.dtype), axis=1), 1.0)
    return reshape(count, (-1, 1, 1))


def _check_num_iterations(num_iterations):
    if num_iterations < 1:
        raise ValueError(
            "`num_iterations` must be a positive integer. Received: "
            f"num_iterations={num_iterations}."
        )
