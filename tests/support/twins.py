"""Plain NumPy twins of the routing mathematics, in float64 and written from the papers.

They are the definition that the tests hold `keras_softmoe` to: loops where the paper
has loops, no vectorisation that could hide a mistake, nothing imported from the
library. Axis legend: G groups, S tokens per group, D width, E experts, C slots per
expert, K choices per token, H expert hidden width.

Padding (`valid` False) is defined once, by `without_padding`: a padded group routes
exactly like the group with its padded tokens cut out.
"""

import math

import numpy as np


def softmax(x, axis=-1):
    """Softmax over one axis or over several axes jointly."""
    x = np.asarray(x, "float64")
    x = np.exp(x - x.max(axis=axis, keepdims=True))
    return x / x.sum(axis=axis, keepdims=True)


def logsumexp(x, axis, keepdims=False):
    x = np.asarray(x, "float64")
    top = x.max(axis=axis, keepdims=True)
    total = np.log(np.exp(x - top).sum(axis=axis, keepdims=True)) + top
    return total if keepdims else np.squeeze(total, axis)


def l2_normalize(x, axis):
    """x * rsqrt(sum(x^2) + 1e-6): the epsilon is added to the squared norm."""
    x = np.asarray(x, "float64")
    return x / np.sqrt((x**2).sum(axis=axis, keepdims=True) + 1e-6)


def normal_cdf(x):
    return np.vectorize(lambda v: 0.5 * (1.0 + math.erf(v / math.sqrt(2.0))))(x)


def gelu(x):
    """Tanh approximation."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def kept_tokens(scores, valid, group):
    """Indices of the tokens of one group that are not padding, in order."""
    if valid is None:
        return np.arange(scores.shape[1])
    return np.flatnonzero(np.asarray(valid)[group])


def to_dense(token, filled, gate, num_tokens):
    """Dispatch and combine weights (G, S, E, C) of a slot routing."""
    num_groups, num_experts, capacity = token.shape
    dispatch = np.zeros((num_groups, num_tokens, num_experts, capacity))
    combine = np.zeros_like(dispatch)
    for g, e, c in np.ndindex(*token.shape):
        if filled[g, e, c]:
            dispatch[g, token[g, e, c], e, c] = 1.0
            combine[g, token[g, e, c], e, c] = gate[g, e, c]
    return dispatch, combine


def dispatch_tokens(tokens, dispatch):
    """Slot inputs (G, E, C, D)."""
    return np.einsum("gsd,gsec->gecd", np.asarray(tokens, "float64"), dispatch)


def combine_outputs(outputs, combine):
    """Token outputs (G, S, D)."""
    return np.einsum("gecd,gsec->gsd", np.asarray(outputs, "float64"), combine)


def expert_capacity(
    num_tokens, num_experts, factor, rounding="round", multiple_of=None
):
    """Slots per expert; raises ValueError below one slot."""
    exact = (num_tokens * factor) / num_experts
    # Python rounds halves to even.
    capacity = math.ceil(exact) if rounding == "ceil" else round(exact)
    if capacity < 1:
        raise ValueError("no slot")
    if multiple_of:
        capacity += -capacity % multiple_of
    return capacity


def token_choice(
    scores,
    num_selected_experts,
    capacity,
    priority,
    valid=None,
    keep_fraction=1.0,
    bias=0.0,
):
    """Token and filled (G, E, C): the literal queue of V-MoE, appendix C.1.

    All first choices are served in the order of the tokens, then all second ones; or,
    for "pair", all choices by their score. A choice that finds its expert full is
    dropped. A bias takes part in what a token chooses and in nothing else.
    """
    scores = np.asarray(scores)
    biased = scores + np.float32(bias)
    num_groups, _, num_experts = scores.shape
    token = np.zeros((num_groups, num_experts, capacity), "int32")
    filled = np.zeros((num_groups, num_experts, capacity), bool)
    for g in range(num_groups):
        # sorted() is stable: equal scores keep the lower index first.
        chosen = {
            s: sorted(range(num_experts), key=lambda e: -biased[g, s, e])
            for s in kept_tokens(scores, valid, g)
        }
        chosen = {
            s: sorted(experts[:num_selected_experts], key=lambda e: -scores[g, s, e])
            for s, experts in chosen.items()
        }
        tokens = list(chosen)
        if priority in ("max", "pair"):
            ranked = sorted(tokens, key=lambda s: -scores[g, s, chosen[s][0]])
        elif priority == "sum":
            # In float32, as sums in float64 would break ties.
            total = {s: scores[g, s, chosen[s]].sum(dtype="float32") for s in tokens}
            ranked = sorted(tokens, key=lambda s: -total[s])
        else:
            ranked = tokens
        if keep_fraction < 1:
            ranked = ranked[: max(1, round(keep_fraction * len(tokens)))]
        queue = [(k, s) for k in range(num_selected_experts) for s in ranked]
        if priority == "pair":
            queue = sorted(queue, key=lambda pair: (pair[0], pair[1]))
            queue = sorted(
                queue, key=lambda pair: -scores[g, pair[1], chosen[pair[1]][pair[0]]]
            )
        used = [0] * num_experts
        for k, s in queue:
            e = chosen[s][k]
            if used[e] < capacity:
                token[g, e, used[e]] = s
                filled[g, e, used[e]] = True
            used[e] += 1
    return token, filled


def expert_choice(scores, capacity, valid=None):
    """Token and filled (G, E, C): each expert's best tokens, best first."""
    scores = np.asarray(scores, "float64")
    num_groups, _, num_experts = scores.shape
    token = np.zeros((num_groups, num_experts, capacity), "int32")
    filled = np.zeros((num_groups, num_experts, capacity), bool)
    for g, e in np.ndindex(num_groups, num_experts):
        kept = kept_tokens(scores, valid, g)
        best = sorted(kept, key=lambda s: -scores[g, s, e])[:capacity]
        token[g, e, : len(best)] = best
        filled[g, e, : len(best)] = True
    return token, filled


def moved_bias(bias, scores, num_selected_experts, rate, valid=None):
    """The bias (E,) after a batch (arXiv 2408.15664, algorithm 1)."""
    scores = np.asarray(scores)
    load = [0] * len(bias)
    for g in range(len(scores)):
        for s in kept_tokens(scores, valid, g):
            biased = scores[g, s] + np.float32(bias)
            for e in sorted(range(len(bias)), key=lambda e: -biased[e])[
                :num_selected_experts
            ]:
                load[e] += 1
    mean = sum(load) / len(load)
    return [b + rate * np.sign(mean - n) for b, n in zip(bias, load, strict=True)]


def lowest_winners(scores, num_selected_experts, valid=None):
    """The lowest score that wins in each group, of the best K * S pairs."""
    found = []
    for g in range(len(scores)):
        kept = kept_tokens(scores, valid, g)
        falling = sorted(-scores[g, s, e] for s in kept for e in range(scores.shape[2]))
        found.append(-falling[num_selected_experts * len(kept) - 1])
    return found


def race(scores, thresholds, capacity, valid=None):
    """Token and filled (G, E, C): each expert's best pairs that reach a threshold."""
    scores = np.asarray(scores)
    token, filled = expert_choice(scores, capacity, valid)
    for g, e, c in np.ndindex(*token.shape):
        if filled[g, e, c] and scores[g, token[g, e, c], e] < thresholds[g]:
            token[g, e, c], filled[g, e, c] = 0, False
    return token, filled


def identity(num_groups, num_tokens, num_experts):
    """Round robin: token s sits with expert s % E in slot s // E."""
    shape = (num_groups, num_experts, num_tokens // num_experts)
    token = np.zeros(shape, "int32")
    for s in range(num_tokens):
        token[:, s % num_experts, s // num_experts] = s
    return token, np.ones(shape, bool)


def gates(scores, token, filled):
    """Combine weights (G, E, C): the score of the token in the slot, 0 if empty."""
    gate = np.zeros(token.shape)
    for g, e, c in np.ndindex(*token.shape):
        if filled[g, e, c]:
            gate[g, e, c] = scores[g, token[g, e, c], e]
    return gate


def without_padding(plan_of_group, scores, valid):
    """Applies `plan_of_group` to the kept tokens of each group, zero elsewhere."""
    scores = np.asarray(scores, "float64")
    plan = np.zeros(scores.shape)
    for g in range(len(scores)):
        kept = kept_tokens(scores, valid, g)
        plan[g, kept] = plan_of_group(scores[g, kept])
    return plan


def sinkhorn_plan(logits, num_iterations=20, valid=None):
    """Entropic plan: row sums 1, column sums S/E; columns are scaled first."""

    def plan_of_group(a):
        log_column = math.log(a.shape[0] / a.shape[1])
        log_u = np.zeros((a.shape[0], 1))
        log_v = np.zeros((1, a.shape[1]))
        for _ in range(num_iterations):
            log_v = log_column - logsumexp(a + log_u, 0, keepdims=True)
            log_u = -logsumexp(a + log_v, 1, keepdims=True)
        return np.exp(a + log_u + log_v)

    return without_padding(plan_of_group, logits, valid)


def project_sparse_simplex(x, num_nonzeros):
    """Euclidean projection of a vector on the simplex with few non-zeros.

    Keeps the largest entries (ties: lower index) and projects those.
    """
    kept = sorted(range(len(x)), key=lambda i: -x[i])[:num_nonzeros]
    values = x[kept]
    thresholds = (np.cumsum(values) - 1) / np.arange(1, len(values) + 1)
    threshold = thresholds[np.flatnonzero(values > thresholds)[-1]]
    projected = np.zeros(len(x))
    projected[kept] = np.maximum(values - threshold, 0)
    return projected


def sparse_transport_plan(
    scores, capacity, num_iterations=20, learning_rate=0.01, tolerance=1e-3, valid=None
):
    """Plan with at most C non-zeros a column, by Adam on the semi-dual.

    The step whose gradient is within the tolerance is the last one taken; if that
    is the first one, it is not taken either.
    """

    def plan_of_group(a):
        num_tokens, num_experts = a.shape
        mass = num_tokens / num_experts

        def plan(alpha):
            columns = [
                project_sparse_simplex((alpha + a[:, e]) / mass, capacity)
                for e in range(num_experts)
            ]
            return mass * np.stack(columns, 1)

        alpha = np.zeros(num_tokens)
        mean, square = np.zeros(num_tokens), np.zeros(num_tokens)
        for step in range(1, num_iterations + 1):
            gradient = plan(alpha).sum(1) - 1.0
            solved = np.linalg.norm(gradient) <= tolerance
            if solved and step == 1:
                break
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            mean_hat = mean / (1 - 0.9**step)
            square_hat = square / (1 - 0.999**step)
            alpha = alpha - learning_rate * mean_hat / (np.sqrt(square_hat) + 1e-8)
            if solved:
                break
        return plan(alpha)

    return without_padding(plan_of_group, scores, valid)


def squared_variation(x):
    """(population standard deviation / mean)^2."""
    return (x.std() / x.mean()) ** 2


def per_group(loss_of_group, valid, *arrays):
    arrays = [np.asarray(a, "float64") for a in arrays]
    kept = [kept_tokens(arrays[0], valid, g) for g in range(len(arrays[0]))]
    return np.array(
        [loss_of_group(*(a[g, k] for a in arrays)) for g, k in enumerate(kept)]
    )


def importance_loss(probs, valid=None):
    return per_group(lambda p: squared_variation(p.sum(0)), valid, probs)


def load_loss(logits, noisy_logits, num_selected_experts, noise_std, valid=None):
    def loss_of_group(clean, noisy):
        threshold = np.sort(noisy, -1)[:, -num_selected_experts, None]
        return squared_variation(
            (1 - normal_cdf((threshold - clean) / noise_std)).mean(0)
        )

    return per_group(loss_of_group, valid, logits, noisy_logits)


def gshard_loss(probs, valid=None):
    def loss_of_group(p):
        num_experts = p.shape[-1]
        first = p.argmax(-1)[:, None] == np.arange(num_experts)
        return num_experts**2 * (first.mean(0) * p.mean(0)).mean()

    return per_group(loss_of_group, valid, probs)


def z_loss(logits, valid=None):
    return per_group(lambda a: (logsumexp(a, -1) ** 2).mean(), valid, logits)


def router_similarity_loss(probs, chosen, valid=None):
    """arXiv 2503.16057, section 5: with M the choices and P the probabilities."""

    def loss_of_group(p, m):
        num_tokens, num_experts = p.shape
        pairs = list(np.ndindex(num_experts, num_experts))
        p_of = {(i, j): (p[:, i] * p[:, j]).sum() for i, j in pairs}
        m_of = {(i, j): (m[:, i] * m[:, j]).sum() for i, j in pairs}
        total = 0.0
        for same in (True, False):
            some = [(i, j) for i, j in pairs if (i == j) == same]
            together = sum(m_of[pair] for pair in some)
            if together:
                total += sum(
                    len(some) * m_of[pair] / together * p_of[pair] for pair in some
                )
        return total / num_tokens

    return per_group(loss_of_group, valid, probs, chosen)


def soft_router(
    tokens,
    mu,
    scale,
    dispatch="soft",
    combine="soft",
    normalize=True,
    noise=0.0,
    valid=None,
):
    """Dispatch and combine weights (G, S, E, C) of Soft MoE and its ablations."""
    tokens, mu = np.asarray(tokens, "float64"), np.asarray(mu, "float64")
    if normalize:
        tokens, mu = l2_normalize(tokens, -1), l2_normalize(mu, 0)
    logits = scale * np.einsum("gsd,dec->gsec", tokens, mu) + noise
    dispatch_weights, combine_weights = np.zeros((2, *logits.shape))
    for g in range(len(logits)):
        kept = kept_tokens(logits, valid, g)
        a = logits[g, kept]
        uniform = np.zeros_like(a)
        dispatch_weights[g, kept] = softmax(a if dispatch == "soft" else uniform, 0)
        combine_weights[g, kept] = softmax(a if combine == "soft" else uniform, (1, 2))
    return dispatch_weights, combine_weights


def experts(slots, kernel_0, bias_0, kernel_1, bias_1):
    """Slot outputs (G, E, C, D): one two-layer MLP per expert."""
    outputs = np.zeros(slots.shape)
    for e in range(slots.shape[1]):
        hidden = gelu(slots[:, e] @ np.float64(kernel_0[e]) + bias_0[e])
        outputs[:, e] = hidden @ np.float64(kernel_1[e]) + bias_1[e]
    return outputs


def moe(tokens, dispatch, combine, expert_weights):
    """Outputs (G, S, D) of a MoE layer, from dense routing weights."""
    slots = dispatch_tokens(tokens, dispatch)
    return combine_outputs(experts(slots, *expert_weights), combine)


def sincos_2d_table(height, width, hidden_dim, temperature=10000.0):
    """(h * w, D): sin and cos of the column, then of the row."""
    quarter = hidden_dim // 4
    table = np.zeros((height * width, hidden_dim))
    for y, x, i in np.ndindex(height, width, quarter):
        omega = temperature ** (-i / (quarter - 1))
        waves = [math.sin(x * omega), math.cos(x * omega)]
        waves += [math.sin(y * omega), math.cos(y * omega)]
        table[y * width + x, i::quarter] = waves
    return table


def resample_position_grid(grid, height, width):
    """Bilinear with aligned corners: source coordinate i (old - 1) / (new - 1)."""
    grid = np.asarray(grid, "float64")
    for axis, size in enumerate((height, width)):
        old = grid.shape[axis]
        lines = []
        for i in range(size):
            at = i * (old - 1) / (size - 1) if size > 1 else 0.0
            low = min(int(at), old - 1)
            high = min(low + 1, old - 1)
            first, second = np.take(grid, low, axis), np.take(grid, high, axis)
            lines.append(first + (at - low) * (second - first))
        grid = np.stack(lines, axis)
    return grid


def _cubic(distance, a):
    x = abs(distance)
    if x <= 1.0:
        return (a + 2.0) * x**3 - (a + 3.0) * x**2 + 1.0
    if x < 2.0:
        return a * x**3 - 5.0 * a * x**2 + 8.0 * a * x - 4.0 * a
    return 0.0


def _near(line, at):
    """Four neighbours, the ends repeated."""
    first = math.floor(at) - 1
    total = 0.0
    for place in range(first, first + 4):
        total = (
            total + _cubic(at - place, -0.75) * line[min(max(place, 0), len(line) - 1)]
        )
    return total


def _wide(line, at, step):
    """All neighbours under a kernel that is wider by the step, if that is over one."""
    weights = [
        _cubic((at - place) / max(step, 1.0), -0.5) for place in range(len(line))
    ]
    return sum(w * x for w, x in zip(weights, line, strict=True)) / sum(weights)


def bicubic(grid, height, width, antialias):
    """`(h, w, D)` to `(height, width, D)`, as PyTorch resamples."""
    grid = np.asarray(grid, "float64")
    for axis, size in enumerate((height, width)):
        line = np.moveaxis(grid, axis, 0)
        step = len(line) / size
        places = [(i + 0.5) * step - 0.5 for i in range(size)]
        new = [_wide(line, at, step) if antialias else _near(line, at) for at in places]
        grid = np.moveaxis(np.stack(new), 0, axis)
    return grid
