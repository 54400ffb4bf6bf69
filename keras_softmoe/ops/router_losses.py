"""Balancing and entropy losses of routers. Each returns one value per group, `(G,)`.

`valid` is `False` for padding and for tokens of other modalities. The loss of a group
without tokens is that of zeros. Losses are computed and returned in float32 or more.
"""

import math
from collections.abc import Sequence

from keras import ops

from keras_softmoe.ops.assignment import check_num_selected_experts
from keras_softmoe.ops.kernels import float32_at_least
from keras_softmoe.ops.numbers import at_least, positions, tiny, variance_and_mean
from keras_softmoe.ops.selection import (
    last_of_top,
    top_indices,
    top_values,
    zero_padding,
)
from keras_softmoe.types import Tensor

# === Balancing losses of V-MoE and others ===


def importance_loss(probs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the squared coefficient of variation of the experts' importance.

    An expert's importance is the sum of its probabilities over the tokens.

    Args:
        probs: `(G, S, E)` float tensor, probabilities over experts, without noise.
        valid: optional `(G, S)` bool mask of the tokens that count.

    Returns:
        `(G,)` tensor, 0 where all experts are equally important.

    Source: V-MoE, appendix A ("importance loss").

    Examples:
        >>> loss = ksm.ops.importance_loss(np.full((2, 16, 4), 0.25, "float32"))
        >>> np.asarray(loss)
        array([0., 0.], dtype=float32)
    """
    return _squared_variation(ops.sum(_counted(probs, valid), axis=1))


def load_loss(
    logits: Tensor,
    noisy_logits: Tensor,
    num_selected_experts: int,
    noise_std: float,
    valid: Tensor | None = None,
    sharded: bool = False,
) -> Tensor:
    """Return the squared coefficient of variation of the experts' expected load.

    An expert's load is the mean probability, over the tokens, that it would be
    among the token's choices if its noise were drawn again.

    Args:
        logits: `(G, S, E)` float tensor, without noise.
        noisy_logits: `(G, S, E)` float tensor, with the noise that experts were chosen
            with.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        noise_std: float, standard deviation of the noise on the logits.
        valid: optional `(G, S)` bool mask of the tokens that count.
        sharded: bool, see `token_choice`.

    Returns:
        `(G,)` tensor, 0 where all experts have the same load.

    Raises:
        ValueError: if `noise_std` is not positive.

    Source: V-MoE, appendix A ("load loss").

    Examples:
        >>> logits = np.random.normal(size=(2, 16, 4)).astype("float32")
        >>> noise = np.random.normal(scale=0.25, size=logits.shape).astype("float32")
        >>> ksm.ops.load_loss(logits, logits + noise, 1, noise_std=0.25).shape
        (2,)
    """
    if not noise_std > 0:
        raise ValueError(
            "`noise_std` must be positive for the load loss. Received: "
            f"noise_std={noise_std}. Without noise, leave the loss out."
        )
    logits, noisy_logits = (_counted(x, valid) for x in (logits, noisy_logits))
    # (G, S, 1), the smallest logit of a chosen expert
    threshold = last_of_top(noisy_logits, num_selected_experts, sharded)
    # (G, S, E), the chance that new noise lifts the clean logit over the threshold
    normal = (logits - threshold) / (noise_std * 2**0.5)
    # Twice the chance, which varies as much
    chance = 1.0 + ops.erf(normal)
    return _squared_variation(ops.sum(zero_padding(chance, valid), axis=1))


def gshard_loss(probs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the product of the experts' shares of choices and their probabilities.

    The share of first choices has no gradient; the mean probability has.

    Args:
        probs: `(G, S, E)` float tensor, probabilities over experts.
        valid: optional `(G, S)` bool mask of the tokens that count.

    Returns:
        `(G,)` tensor, 1 where both are uniform.

    Source: Lepikhin et al. 2020 (GShard), section 2.2: `l_aux` of algorithm 1, times
    the square of the number of experts.

    Examples:
        >>> loss = ksm.ops.gshard_loss(np.full((2, 16, 4), 0.25, "float32"))
        >>> np.asarray(loss)
        array([1., 1.], dtype=float32)
    """
    probs = _counted(probs, valid)
    num_experts = probs.shape[-1]
    first = top_indices(probs, 1)
    is_first = ops.cast(first == positions(num_experts, first), probs.dtype)
    share = ops.stop_gradient(_mean_over_tokens(is_first, valid))
    probability = _mean_over_tokens(probs, valid)
    return num_experts * ops.sum(share * probability, axis=-1)


def z_loss(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the mean squared log-partition of the router, which keeps logits small.

    Args:
        logits: `(G, S, E)` float tensor.
        valid: optional `(G, S)` bool mask of the tokens that count.

    Returns:
        `(G,)` tensor, the mean over tokens of `logsumexp(logits) ** 2`. It overflows
        for logits over 1.8e19; its gradient is finite.

    Source: Zoph et al. 2022 (ST-MoE), section 3; LIMoE, appendices.

    Examples:
        >>> np.asarray(ksm.ops.z_loss(np.zeros((1, 16, 4), "float32")))  # log(4) ** 2
        array([1.92...], dtype=float32)
    """
    logits = _counted(logits, valid)
    squared = ops.square(ops.logsumexp(logits, axis=-1, keepdims=True))
    return _mean_over_tokens(squared, valid)[:, 0]


def router_similarity_loss(
    probs: Tensor, chosen: Tensor, valid: Tensor | None = None
) -> Tensor:
    """Return a loss that balances how often experts, and pairs of them, are chosen.

    The more often two experts are chosen for the same token, the larger the weight of
    the product of their probabilities. Weights have no gradient.

    Args:
        probs: `(G, S, E)` float tensor, probabilities over experts.
        chosen: `(G, S, E)` bool tensor, `True` for chosen pairs of token and expert.
        valid: optional `(G, S)` bool mask of the tokens that count.

    Returns:
        `(G,)` tensor, the mean over tokens of the sum over `i` and `j` of
        `W[i, j] * p[i] * p[j]`. Let `N[i, j]` be the number of tokens with both experts
        (for `i = j`: with expert `i`).

        - `W[i, i]` is `E * N[i, i]`, divided by the sum of all `N[k, k]`.
        - `W[i, j]` is `E * (E - 1) * N[i, j]`, divided by the sum of `N` off the
          diagonal.

    Source: Yuan et al. 2025 (Expert Race), section 5 ("router similarity loss").

    Examples:
        >>> probs = np.full((1, 4, 2), 0.5, "float32")
        >>> chosen = np.ones((1, 4, 2), "bool")
        >>> np.asarray(ksm.ops.router_similarity_loss(probs, chosen))
        array([1.], dtype=float32)
    """
    probs = _counted(probs, valid)
    num_experts = probs.shape[-1]
    chosen = zero_padding(ops.cast(chosen, probs.dtype), valid)
    # (G, E, E), tokens for which both experts are chosen
    together = ops.stop_gradient(ops.einsum("gsi,gsj->gij", chosen, chosen))
    # (G, E, E), the weights: single experts and pairs are normalized separately.
    same = ops.eye(num_experts, dtype=probs.dtype)
    weight = 0.0
    for part, number in (
        (together * same, num_experts),
        (together * (1.0 - same), num_experts * (num_experts - 1)),
    ):
        total = ops.sum(part, axis=(1, 2), keepdims=True)
        weight = weight + number * part / at_least(total, 1.0)
    # The sum over i and j of W[i, j] p_i p_j, for each token
    similarity = ops.sum(ops.matmul(probs, weight) * probs, axis=-1, keepdims=True)
    return _mean_over_tokens(similarity, valid)[:, 0]


# === Entropy losses of LIMoE, for the tokens of one modality ===


def local_entropy_loss(probs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the mean entropy of the tokens' probabilities, which concentrates them.

    Args:
        probs: `(G, S, E)` float tensor, probabilities over experts.
        valid: optional `(G, S)` bool mask of the tokens that count.

    Returns:
        `(G,)` tensor in nats, 0 if each token has one expert with probability 1,
        `log(E)` if all probabilities are equal.

    Source: LIMoE, section 2.2.2 ("local entropy").

    Examples:
        >>> loss = ksm.ops.local_entropy_loss(np.full((1, 16, 4), 0.25, "float32"))
        >>> np.asarray(loss)  # log(4)
        array([1.38...], dtype=float32)
    """
    entropy = _entropy(_counted(probs, valid), keepdims=True)
    return _mean_over_tokens(entropy, valid)[:, 0]


def target_entropy_loss(
    probs: Tensor, num_selected_experts: int, valid: Tensor | None = None
) -> Tensor:
    """Return the squared distance of the local entropy from that of `K` equal choices.

    Args:
        probs: `(G, S, E)` float tensor, probabilities over experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        valid: optional `(G, S)` bool mask of the tokens that count.

    Returns:
        `(G,)` tensor: `(log(K) - local_entropy_loss(probs)) ** 2`.

    Raises:
        ValueError: if `num_selected_experts` is not in `[1, E]`.

    Source: LIMoE, appendix E.1 ("target entropy").

    Examples:
        >>> probs = np.full((1, 16, 4), 0.25, "float32")
        >>> np.asarray(ksm.ops.target_entropy_loss(probs, 2)).round(3)  # log(2) ** 2
        array([0.48], dtype=float32)
    """
    check_num_selected_experts(num_selected_experts, probs.shape[-1])
    target = math.log(num_selected_experts)
    return ops.square(target - local_entropy_loss(probs, valid))


def merged_entropy_loss(
    probs: Tensor,
    num_selected_experts: int,
    valid: Tensor | None = None,
    sharded: bool = False,
) -> Tensor:
    """Return the mean entropy of "among the `K` most probable experts or not".

    It moves all weight to `K` experts, whatever their shares.

    Args:
        probs: `(G, S, E)` float tensor, probabilities over experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        valid: optional `(G, S)` bool mask of the tokens that count.
        sharded: bool, see `token_choice`.

    Returns:
        `(G,)` tensor in nats, 0 if `K = E`.

    Raises:
        ValueError: if `num_selected_experts` is not in `[1, E]`.

    Source: LIMoE, appendix E.1 ("merged entropy").

    Examples:
        >>> probs = np.array([[[0.5, 0.5, 0.0, 0.0]] * 16], "float32")
        >>> np.asarray(ksm.ops.merged_entropy_loss(probs, 2))  # all weight on two
        array([0.], dtype=float32)
    """
    probs = _counted(probs, valid)
    num_experts = probs.shape[-1]
    check_num_selected_experts(num_selected_experts, num_experts)
    # Not one minus the other: a small sum would be lost in rounding.
    ranked = top_values(probs, num_experts, sharded)
    chosen = ops.sum(ranked[..., :num_selected_experts], axis=-1)
    others = ops.sum(ranked[..., num_selected_experts:], axis=-1)
    entropy = _entropy(ops.stack([chosen, others], axis=-1), keepdims=True)
    return _mean_over_tokens(entropy, valid)[:, 0]


def global_entropy_loss(
    probs: Tensor, threshold: float, valid: Tensor | None = None
) -> Tensor:
    """Return how far the entropy of the mean probabilities is below a threshold.

    It spreads a modality over at least `exp(threshold)` experts.

    Args:
        probs: `(G, S, E)` float tensor, probabilities over experts.
        threshold: float in nats, at most `log(E)`: the logarithm of the soft minimum
            of experts.
        valid: optional `(G, S)` bool mask of the tokens that count.

    Returns:
        `(G,)` tensor: `max(0, threshold - entropy)`.

    Raises:
        ValueError: if the threshold is over `log(E)` or not finite.

    Source: LIMoE, section 2.2.2 ("global entropy") and appendix B.2.

    Examples:
        >>> probs = np.full((1, 16, 4), 0.25, "float32")
        >>> np.asarray(ksm.ops.global_entropy_loss(probs, threshold=np.log(3)))
        array([0.], dtype=float32)
    """
    num_experts = probs.shape[-1]
    largest = math.log(num_experts)
    # Tolerance for a `log` in single precision
    if not -math.inf < threshold <= largest + 1e-6:
        raise ValueError(
            f"`threshold` must be finite and at most log({num_experts}) = "
            f"{largest:.4f}, the largest entropy. Received: threshold={threshold}. For "
            "a soft minimum of S experts pass log(S)."
        )
    entropy = _entropy(_mean_over_tokens(float32_at_least(probs), valid))
    return ops.relu(threshold - entropy)


def mutual_information_loss(
    probs_by_modality: Sequence, valid_by_modality: Sequence | None = None
) -> Tensor:
    """Return minus the mutual information of experts and modalities.

    It is `-log(M)` if `M` modalities share no expert, and 0 if all have the same.

    Args:
        probs_by_modality: list of `(G, S_m, E)` float tensors, probabilities over
            experts, one tensor for each modality.
        valid_by_modality: optional list of `(G, S_m)` bool masks or `None`.

    Returns:
        `(G,)` tensor in nats.

    Raises:
        ValueError: if there are no modalities, or another number of masks.

    Source: LIMoE, appendix B.1 ("mutual-information loss").

    Examples:
        >>> image = np.array([[[1.0, 0.0]] * 16], "float32")
        >>> text = np.array([[[0.0, 1.0]] * 8], "float32")
        >>> np.asarray(ksm.ops.mutual_information_loss([image, text]))  # -log(2)
        array([-0.693...], dtype=float32)
    """
    valid_by_modality = valid_by_modality or [None] * len(probs_by_modality)
    if not probs_by_modality or len(valid_by_modality) != len(probs_by_modality):
        raise ValueError(
            "Mutual information requires at least one modality, and one mask for each "
            f"or none. Received: {len(probs_by_modality)} modalities, "
            f"{len(valid_by_modality)} masks."
        )
    # (M, G, E)
    marginals = ops.stack(
        [
            _mean_over_tokens(float32_at_least(probs), valid)
            for probs, valid in zip(probs_by_modality, valid_by_modality, strict=True)
        ]
    )
    # The entropy of experts given the modality, less that of experts
    return ops.mean(_entropy(marginals), axis=0) - _entropy(ops.mean(marginals, axis=0))


# === Shared steps ===


def _counted(values, valid):
    """Return values in float32 at least, with zeros for tokens that do not count."""
    return zero_padding(float32_at_least(values), valid)


def _mean_over_tokens(values, valid):
    """Return the mean of `(G, S, N)` values over the tokens that count, `(G, N)`."""
    if valid is None:
        return ops.mean(values, axis=1)
    # The mean of a group without tokens is zero.
    count = ops.sum(ops.cast(valid, values.dtype), axis=1, keepdims=True)
    return ops.sum(zero_padding(values, valid), axis=1) / at_least(count, 1.0)


def _squared_variation(values):
    """Return `(std / mean) ** 2` over the last axis; zero if all values are zero."""
    variance, mean = variance_and_mean(values)
    squared = ops.square(mean)
    return (variance / at_least(squared, tiny(squared)))[..., 0]


def _entropy(probs, keepdims=False):
    """Return the entropy over the last axis, in nats."""
    # So the logarithm and its derivative are finite at zero, where x log x is zero.
    logarithm = ops.log(at_least(probs, tiny(probs)))
    return -ops.sum(probs * logarithm, axis=-1, keepdims=keepdims)
