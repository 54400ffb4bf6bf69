"""LIMoE's losses on the entropy of routing. Each returns one value per group, `(G,)`.

They are made for the tokens of one modality. `valid` picks those out of a group, and
leaves padding out. They are computed in float32 at least, and come in that dtype.
"""

import math
from collections.abc import Sequence

from keras import ops

from keras_softmoe.ops.assignment import check_num_selected_experts
from keras_softmoe.ops.backend import float32_at_least, top_values
from keras_softmoe.ops.constants import tiny
from keras_softmoe.ops.losses import mean_over_tokens
from keras_softmoe.ops.padding import zero_padding
from keras_softmoe.types import Tensor


def local_entropy_loss(probs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean entropy of the tokens' probabilities: pulls tokens to few experts.

    Args:
        probs: `(G, S, E)` float tensor, each token's probabilities over experts.
        valid: optional `(G, S)` bool tensor, `True` for the tokens that count.

    Returns:
        `(G,)` tensor in nats, 0 where every token is sure of one expert, `log(E)`
        where none prefers any.

    Source: LIMoE, section 2.2.2 ("local entropy").

    Examples:
        >>> loss = ksm.ops.local_entropy_loss(np.full((1, 16, 4), 0.25, "float32"))
        >>> np.asarray(loss)  # log(4)
        array([1.38...], dtype=float32)
    """
    probs = zero_padding(float32_at_least(probs), valid)
    entropy = _entropy(probs, keepdims=True)
    return mean_over_tokens(entropy, valid)[:, 0]


def target_entropy_loss(
    probs: Tensor, num_selected_experts: int, valid: Tensor | None = None
) -> Tensor:
    """Squared distance of the mean local entropy from that of `K` equal choices.

    Args:
        probs: `(G, S, E)` float tensor, each token's probabilities over experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        valid: optional `(G, S)` bool tensor, `True` for the tokens that count.

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
    """Mean entropy of "among the `K` most probable experts or not".

    It asks for all weight on `K` experts and does not care how they share it.

    Args:
        probs: `(G, S, E)` float tensor, each token's probabilities over experts.
        num_selected_experts: int, the number `K` of experts that a token chooses.
        valid: optional `(G, S)` bool tensor, `True` for the tokens that count.
        sharded: bool, see `token_choice`.

    Returns:
        `(G,)` tensor in nats, 0 if `K = E`.

    Raises:
        ValueError: if `num_selected_experts` is not in `[1, E]`.

    Source: LIMoE, appendix E.1 ("merged entropy").

    Examples:
        >>> probs = np.array([[[0.5, 0.5, 0.0, 0.0]] * 16], "float32")
        >>> np.asarray(ksm.ops.merged_entropy_loss(probs, 2))  # sure of its two experts
        array([0.], dtype=float32)
    """
    probs = zero_padding(float32_at_least(probs), valid)
    num_experts = probs.shape[-1]
    check_num_selected_experts(num_selected_experts, num_experts)
    # Both sums from the probabilities: one minus the other would lose a small one.
    ranked = top_values(probs, num_experts, sharded)
    chosen = ops.sum(ranked[..., :num_selected_experts], axis=-1)
    others = ops.sum(ranked[..., num_selected_experts:], axis=-1)
    entropy = _entropy(ops.stack([chosen, others], axis=-1), keepdims=True)
    return mean_over_tokens(entropy, valid)[:, 0]


def global_entropy_loss(
    probs: Tensor, threshold: float, valid: Tensor | None = None
) -> Tensor:
    """How far the entropy of the mean probabilities stays below a threshold.

    It spreads a modality over experts: at least `exp(threshold)` of them have to be
    used to satisfy it (more, if unevenly), and from there on it is zero.

    Args:
        probs: `(G, S, E)` float tensor, each token's probabilities over experts.
        threshold: float in nats, at most `log(E)`: the logarithm of the soft minimum
            of experts. A negative one, a soft minimum of less than one expert, asks
            for nothing: no entropy is below it, and the loss is zero.
        valid: optional `(G, S)` bool tensor, `True` for the tokens that count.

    Returns:
        `(G,)` tensor: `max(0, threshold - entropy)`.

    Raises:
        ValueError: if the threshold is over `log(E)`, which no probabilities reach, or
            not finite.

    Source: LIMoE, section 2.2.2 ("global entropy") and appendix B.2; table 5 (runs of
    figure 12) has `log(0.8)`.

    Examples:
        >>> probs = np.full((1, 16, 4), 0.25, "float32")
        >>> np.asarray(ksm.ops.global_entropy_loss(probs, threshold=np.log(3)))
        array([0.], dtype=float32)
    """
    num_experts = probs.shape[-1]
    largest = math.log(num_experts)
    # Some slack for `log` in single precision.
    if not -math.inf < threshold <= largest + 1e-6:
        raise ValueError(
            "The entropy of a choice among experts is at most their logarithm: "
            f"`threshold` must be finite and at most log({num_experts}) = "
            f"{largest:.4f}. Received: threshold={threshold}. To ask for S experts, "
            "pass log(S)."
        )
    entropy = _entropy(mean_over_tokens(float32_at_least(probs), valid))
    return ops.relu(threshold - entropy)


def mutual_information_loss(
    probs_by_modality: Sequence, valid_by_modality: Sequence | None = None
) -> Tensor:
    """Minus the mutual information of experts and modalities.

    Lowest, `-log(M)`, where `M` modalities share no expert (and there are enough of
    them), and 0 where all are routed alike.

    Args:
        probs_by_modality: list of `(G, S_m, E)` float tensors, the probabilities over
            experts of the tokens of each modality. Their numbers may differ.
        valid_by_modality: optional list of `(G, S_m)` bool tensors or `None`, `True`
            for the tokens that count.

    Returns:
        `(G,)` tensor in nats.

    Raises:
        ValueError: if there are no modalities, or as many masks as modalities are not
            given.

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
            "Mutual information takes the probabilities of each modality, and one mask "
            f"for each if any. Received: {len(probs_by_modality)} modalities, "
            f"{len(valid_by_modality)} masks."
        )
    # (M, G, E)
    marginals = ops.stack(
        [
            mean_over_tokens(float32_at_least(probs), valid)
            for probs, valid in zip(probs_by_modality, valid_by_modality, strict=True)
        ]
    )
    return ops.mean(_entropy(marginals), axis=0) - _entropy(ops.mean(marginals, axis=0))


def _entropy(probs, keepdims=False):
    """Entropy over the last axis, in nats."""
    # The logarithm and its derivative are finite at zero, where x log x is zero.
    logarithm = ops.log(ops.maximum(probs, tiny(probs)))
    return -ops.sum(probs * logarithm, axis=-1, keepdims=keepdims)
