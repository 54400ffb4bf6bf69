"""Plain NumPy twin of LIMoE's router, in float64 and written from the paper.

Like `twins.py`, whose legend and padding hold here, it imports nothing of the
library. Tokens have a name each, "image" or "text".
"""

import math
from typing import NamedTuple

import numpy as np

from tests.support import limoe_twins, twins


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


# === Losses: name -> (G,), as the appendix writes them ===


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
    return limoe_twins.local_entropy_loss(
        twins.softmax(routed.logits), routed.members[modality]
    )


def target(routed, modality):
    return limoe_twins.target_entropy_loss(
        twins.softmax(routed.logits),
        routed.num_selected_experts,
        routed.members[modality],
    )


def merged(routed, modality):
    return limoe_twins.merged_entropy_loss(
        twins.softmax(routed.logits),
        routed.num_selected_experts,
        routed.members[modality],
    )


def at_least(soft_minimum):
    """The global entropy loss for `soft_minimum` experts."""

    def loss(routed, modality):
        return limoe_twins.global_entropy_loss(
            twins.softmax(routed.logits),
            math.log(soft_minimum),
            routed.members[modality],
        )

    return loss


def mutual_information(routed, modality=None):
    probabilities = twins.softmax(routed.logits)
    return limoe_twins.mutual_information_loss(
        [probabilities] * 2, [routed.members["image"], routed.members["text"]]
    )


def auxiliary_loss(losses, routed, weight):
    """Weighted mean of pairs of a loss above and a modality, (G,)."""
    return weight * np.mean([loss(routed, m) for loss, m in losses], axis=0)
