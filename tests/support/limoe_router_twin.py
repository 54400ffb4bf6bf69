"""Plain NumPy twins of LIMoE's router and losses, in float64, from the paper.

Like `twins.py`, whose legend and padding hold here, they import nothing of the
library. Tokens have a name each, "image" or "text".
"""

import math
from typing import NamedTuple

import numpy as np

from tests.support import twins
from tests.support.twins import kept_tokens, per_group, softmax


class Routed(NamedTuple):
    """What losses are computed from: logits are -inf where a token must not go."""

    logits: np.ndarray
    noisy_logits: np.ndarray
    # (G, S) bool of the tokens of each modality, padding left out
    members: dict
    num_selected_experts: int
    noise_std: float


def pool(name, num_experts, image_experts=None, text_experts=None):
    """Experts of a modality: images take the first ones, text the last ones."""
    experts = list(range(num_experts))
    if name == "image":
        return experts[: num_experts if image_experts is None else image_experts]
    return experts[num_experts - (text_experts or num_experts) :]


def logits(tokens, names, kernels, image_experts=None, text_experts=None):
    """(G, S, E): one product per token, with the kernel of its modality."""
    tokens = np.asarray(tokens, "float64")
    num_groups, num_tokens, _ = tokens.shape
    num_experts = next(iter(kernels.values())).shape[-1]
    result = np.full((num_groups, num_tokens, num_experts), -np.inf)
    for s, name in enumerate(names):
        kernel = np.float64(kernels.get(name, kernels.get(None)))
        for e in pool(name, num_experts, image_experts, text_experts):
            result[:, s, e] = tokens[:, s] @ kernel[:, e]
    return result


def members(names, num_groups, valid=None):
    """(G, S) bool for each modality, and for all under `None`."""
    names = np.array(names)
    real = np.ones((num_groups, len(names)), bool) if valid is None else valid
    found = {None: real}
    for name in ("image", "text"):
        if name in names:
            found[name] = real & (names == name)
    return found


def token_choice(probabilities, num_choices, capacity, priority, names, valid=None):
    """Seats: the queue of `twins.py`, or one modality in front of the other."""
    if not priority.endswith("_first"):
        return twins.token_choice(probabilities, num_choices, capacity, priority, valid)
    first = priority.removesuffix("_first")
    # The tokens in the order in which they queue, then by position.
    order = [s for s, name in enumerate(names) if name == first]
    order += [s for s, name in enumerate(names) if name != first]
    token, filled = twins.token_choice(
        probabilities[:, order],
        num_choices,
        capacity,
        "position",
        None if valid is None else valid[:, order],
    )
    return np.where(filled, np.array(order)[token], 0), filled


def entropy(p):
    """In nats, over the last axis; 0 log 0 is 0."""
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(-1)


def local_entropy_loss(probs, valid=None):
    return per_group(lambda p: entropy(p).mean(), valid, probs)


def target_entropy_loss(probs, num_selected_experts, valid=None):
    return (math.log(num_selected_experts) - local_entropy_loss(probs, valid)) ** 2


def merged_entropy_loss(probs, num_selected_experts, valid=None):
    def loss_of_group(p):
        ranked = -np.sort(-p, -1)
        top = ranked[:, :num_selected_experts].sum(-1)
        rest = ranked[:, num_selected_experts:].sum(-1)
        return entropy(np.stack([top, rest], -1)).mean()

    return per_group(loss_of_group, valid, probs)


def global_entropy_loss(probs, threshold, valid=None):
    return per_group(lambda p: max(0.0, threshold - entropy(p.mean(0))), valid, probs)


def mutual_information_loss(probs_by_modality, valid_by_modality):
    """Mean entropy of the modalities' marginals, less that of their mean."""
    values = []
    for g in range(len(probs_by_modality[0])):
        marginals = [
            np.float64(probs[g])[kept_tokens(probs, valid, g)].mean(0)
            for probs, valid in zip(probs_by_modality, valid_by_modality, strict=True)
        ]
        values.append(
            np.mean([entropy(p) for p in marginals]) - entropy(np.mean(marginals, 0))
        )
    return np.array(values)


def softmax_contrastive_loss(logits):
    logits = np.asarray(logits, "float64")
    rows = [-np.log(softmax(logits[i])[i]) for i in range(len(logits))]
    columns = [-np.log(softmax(logits[:, i])[i]) for i in range(len(logits))]
    return (np.array(rows) + np.array(columns)) / 2


def sigmoid_contrastive_loss(logits):
    logits = np.asarray(logits, "float64")
    sign = 2 * np.eye(len(logits)) - 1
    return np.log1p(np.exp(-sign * logits)).sum(1)


def importance(routed, modality):
    return twins.importance_loss(twins.softmax(routed.logits), routed.members[modality])


def load(routed, modality):
    return twins.load_loss(
        routed.logits,
        routed.noisy_logits,
        routed.num_selected_experts,
        routed.noise_std,
        routed.members[modality],
    )


def z(routed, modality):
    return twins.z_loss(routed.logits, routed.members[modality])


def local(routed, modality):
    return local_entropy_loss(twins.softmax(routed.logits), routed.members[modality])


def target(routed, modality):
    return target_entropy_loss(
        twins.softmax(routed.logits),
        routed.num_selected_experts,
        routed.members[modality],
    )


def merged(routed, modality):
    return merged_entropy_loss(
        twins.softmax(routed.logits),
        routed.num_selected_experts,
        routed.members[modality],
    )


def at_least(soft_minimum):
    """The global entropy loss for `soft_minimum` experts."""

    def loss(routed, modality):
        return global_entropy_loss(
            twins.softmax(routed.logits),
            math.log(soft_minimum),
            routed.members[modality],
        )

    return loss


def mutual_information(routed, modality=None):
    probabilities = twins.softmax(routed.logits)
    return mutual_information_loss(
        [probabilities] * 2, [routed.members["image"], routed.members["text"]]
    )


def auxiliary_loss(losses, routed, weight):
    """Weighted mean of pairs of a loss above and a modality, (G,)."""
    return weight * np.mean([loss(routed, m) for loss, m in losses], axis=0)
