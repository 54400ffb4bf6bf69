"""Soft MoE in NumPy, from Puigcerver et al. 2024, "From Sparse to Soft Mixtures of
Experts", section 2.

Shapes: G images, S tokens of an image, D the width of a token, E experts, P slots of an
expert, H the hidden width of an expert.
"""

import numpy as np


def soft_moe(x, phi, scale, w1, b1, w2, b2):
    """Mix the tokens of each image into slots, apply the experts, and mix back.

    Args:
        x: tokens, (G, S, D).
        phi: parameters of the slots, (D, E, P).
        scale: number, the length of the normalized slot parameters.
        w1, b1, w2, b2: weights of the experts' MLPs, (E, D, H), (E, H), (E, H, D) and
            (E, D).
    """
    G, S, D = x.shape
    _, E, P = phi.shape

    # How well each token fits each slot: a scaled cosine, which stays bounded however
    # wide the tokens are (section 2.3).
    phi = scale * unit(phi.reshape(D, E * P), axis=0)  # (D, E P)
    logits = unit(x, axis=-1) @ phi  # (G, S, E P)

    # A slot is a weighted mean of all tokens: its weights sum to one over the tokens.
    # They mix the tokens as they came, not the normalized ones.
    dispatch = softmax(logits, axis=1)  # (G, S, E P)
    slots = np.swapaxes(dispatch, 1, 2) @ x  # (G, E P, D)

    # Each expert, an MLP of its own, sees only its P slots.
    slots = slots.reshape(G, E, P, D)
    hidden = gelu(slots @ w1 + b1[:, None])  # (G, E, P, H)
    outputs = hidden @ w2 + b2[:, None]  # (G, E, P, D)

    # A token gets a weighted mean of all outputs: weights sum to one over the slots.
    combine = softmax(logits, axis=2)  # (G, S, E P)
    return combine @ outputs.reshape(G, E * P, D)  # (G, S, D)


def unit(x, axis):
    """Vectors of length one. The small number keeps the gradient finite at zero."""
    return x / np.sqrt(np.sum(x**2, axis, keepdims=True) + 1e-6)


def softmax(x, axis):
    """Positive weights that sum to one. Less the largest, so that none overflows."""
    x = np.exp(x - np.max(x, axis, keepdims=True))
    return x / np.sum(x, axis, keepdims=True)


def gelu(x):
    """The tanh approximation of x times the normal distribution function of x."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
