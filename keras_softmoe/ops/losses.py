"""Losses that keep experts in balance. Each returns one value per group, `(G,)`.

Tokens whose `valid` is `False` are padding and count nowhere. Losses are computed in
float32 at least, and come in that dtype.
"""

from keras import ops

from keras_softmoe.ops.backend import float32_at_least, smallest_entry, top_values
from keras_softmoe.ops.constants import tiny
from keras_softmoe.ops.padding import zero_padding
from keras_softmoe.types import Tensor


def importance_loss(probs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Squared coefficient of variation of the experts' importance.

    An expert's importance is the sum of its probabilities over the tokens.

    Args:
        probs: `(G, S, E)` float tensor, each token's probabilities over experts,
            without noise.
        valid: optional `(G, S)` bool tensor, `False` for padding.

    Returns:
        `(G,)` tensor, 0 where all experts are equally important.

    Source: V-MoE, appendix A ("importance loss").

    Examples:
        >>> loss = ksm.ops.importance_loss(np.full((2, 16, 4), 0.25, "float32"))
        >>> np.asarray(loss)
        array([0., 0.], dtype=float32)
    """
    probs = zero_padding(float32_at_least(probs), valid)
    return _squared_variation(ops.sum(probs, axis=1))


def load_loss(
    logits: Tensor,
    noisy_logits: Tensor,
    num_selected_experts: int,
    noise_std: float,
    valid: Tensor | None = None,
    sharded: bool = False,
) -> Tensor:
    """Squared coefficient of variation of the experts' expected load.

    An expert's load is the mean probability, over the tokens, that it would be
    among the token's choices if its noise were drawn again.

    Args:
        logits: `(G, S, E)` float tensor, without noise.
        noisy_logits: `(G, S, E)` float tensor, the same with the noise that was
            used to choose experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        noise_std: float, the standard deviation of that noise, as it was added to
            the logits.
        valid: optional `(G, S)` bool tensor, `False` for padding.
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
            "The load loss is defined through the noise on the logits. `noise_std` "
            f"must be positive. Received: noise_std={noise_std}. Without noise, "
            "leave this loss out."
        )
    logits, noisy_logits = (
        zero_padding(float32_at_least(x), valid) for x in (logits, noisy_logits)
    )
    # (G, S, 1), what a logit has to reach to be chosen
    chosen = top_values(noisy_logits, num_selected_experts, sharded)
    # Not `chosen[..., -1:]`: XLA would replace `top_k` and the slice by a full sort.
    threshold = smallest_entry(chosen)
    chance = _normal_cdf((logits - threshold) / noise_std)
    return _squared_variation(ops.sum(zero_padding(chance, valid), axis=1))


def gshard_loss(probs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Product of the experts' share of first choices and their mean probability.

    The share of first choices has no gradient; the mean probability has.

    Args:
        probs: `(G, S, E)` float tensor, each token's probabilities over experts.
        valid: optional `(G, S)` bool tensor, `False` for padding.

    Returns:
        `(G,)` tensor, 1 where both are uniform.

    Source: Lepikhin et al. 2020 (GShard), section 2.2; router study, appendix A.

    Examples:
        >>> loss = ksm.ops.gshard_loss(np.full((2, 16, 4), 0.25, "float32"))
        >>> np.asarray(loss)
        array([1., 1.], dtype=float32)
    """
    probs = zero_padding(float32_at_least(probs), valid)
    num_experts = probs.shape[-1]
    experts = ops.arange(num_experts, dtype="int32")
    first = ops.cast(ops.argmax(probs, axis=-1), "int32")
    is_first = ops.cast(ops.equal(ops.expand_dims(first, -1), experts), probs.dtype)
    share = ops.stop_gradient(mean_over_tokens(is_first, valid))
    probability = mean_over_tokens(probs, valid)
    return num_experts * ops.sum(share * probability, axis=-1)


def z_loss(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean squared log-partition of the router: keeps logits small.

    Args:
        logits: `(G, S, E)` float tensor.
        valid: optional `(G, S)` bool tensor, `False` for padding.

    Returns:
        `(G,)` tensor, the mean over tokens of `logsumexp(logits) ** 2`: infinite for
        logits from 1.8e19 on, whose square no float32 holds. Its gradient is finite.

    Source: Zoph et al. 2022 (ST-MoE), section 3; LIMoE, appendices.

    Examples:
        >>> np.asarray(ksm.ops.z_loss(np.zeros((1, 16, 4), "float32")))  # log(4) ** 2
        array([1.92...], dtype=float32)
    """
    logits = zero_padding(float32_at_least(logits), valid)
    squared = ops.square(ops.logsumexp(logits, axis=-1, keepdims=True))
    return mean_over_tokens(squared, valid)[:, 0]


def mean_over_tokens(values, valid):
    """Mean of `(G, S, N)` values over the real tokens, `(G, N)`."""
    if valid is None:
        return ops.mean(values, axis=1)
    # In a group without any token the mean is zero.
    count = ops.maximum(ops.sum(ops.cast(valid, values.dtype), axis=1), 1.0)
    return ops.sum(zero_padding(values, valid), axis=1) / ops.expand_dims(count, -1)


def _squared_variation(values):
    """Squared coefficient of variation over the last axis: (std / mean) ** 2.

    Zero where all values are, of a group without any token.
    """
    mean = ops.mean(values, axis=-1, keepdims=True)
    # Not `ops.var`, with which PyTorch warns of an empty batch.
    variance = ops.mean(ops.square(values - mean), axis=-1)
    squared = ops.square(mean[..., 0])
    return variance / ops.maximum(squared, tiny(squared))


def _normal_cdf(x):
    return 0.5 * (1.0 + ops.erf(x / 2**0.5))
