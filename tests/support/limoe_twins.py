"""Plain NumPy twins of LIMoE's losses, in float64 and written from its appendices.

Like `twins.py`, whose legend and padding hold here, they import nothing of the
library.
"""

import math

import numpy as np

from tests.support.twins import kept_tokens, per_group, softmax


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
