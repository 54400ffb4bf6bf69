"""Statistics of soft routing as they come from a pass over data, made from noise."""

import numpy as np

from keras_softmoe.analysis._concentration import ConcentrationTotal
from keras_softmoe.analysis._slots import SlotCorrelation
from keras_softmoe.analysis._soft_statistics import TOKEN_WEIGHT_EDGES, SoftStatistics

NUM_EXPERTS, SLOTS, NUM_TOKENS, NUM_GROUPS = 3, 2, 5, 4


def concentration(rng, *shape):
    total = ConcentrationTotal()
    total.add(rng.dirichlet(np.full(shape[-1], 0.5), size=shape[:-1]))
    return total


def make_block(seed=0):
    rng = np.random.default_rng(seed)
    dispatch = concentration(rng, NUM_GROUPS, NUM_EXPERTS * SLOTS, NUM_TOKENS)
    tokens = NUM_GROUPS * NUM_TOKENS
    combine = concentration(rng, tokens, 1, NUM_EXPERTS * SLOTS)
    weights = rng.gamma(1.0, size=tokens)
    weights *= NUM_EXPERTS * SLOTS * NUM_GROUPS / weights.sum()
    return SoftStatistics(
        num_groups=NUM_GROUPS,
        num_tokens=tokens,
        token_weight_counts=np.histogram(weights, TOKEN_WEIGHT_EDGES)[0],
        slot_contribution=rng.dirichlet(np.ones(6)).reshape(NUM_EXPERTS, SLOTS),
        slot_curves=dispatch.curves.reshape(NUM_EXPERTS, SLOTS, -1),
        dispatch=dispatch.concentration(),
        combine=combine.concentration(),
    )


def make_correlation(seed=0, num_experts=NUM_EXPERTS, slots=SLOTS):
    rng = np.random.default_rng(seed)
    mu = rng.normal(size=(num_experts * slots, 4))
    mu /= np.linalg.norm(mu, axis=1, keepdims=True)
    return SlotCorrelation((mu @ mu.T).astype("float32"), slots)


def blocks(make=make_block, names=(1, 3)):
    return {name: make(seed) for seed, name in enumerate(names)}
