"""Statistics of soft routing as they come from a pass over data, made from noise."""

import numpy as np

from keras_softmoe.analysis.soft import (
    TOKEN_WEIGHT_EDGES,
    ConcentrationTotal,
    SoftStatistics,
)

NUM_EXPERTS, SLOTS, NUM_TOKENS, NUM_GROUPS = 3, 2, 5, 4


def concentration(rng, *shape):
    total = ConcentrationTotal()
    total.add(rng.dirichlet(np.full(shape[-1], 0.5), size=shape[:-1]))
    return total


def make_block(block=0, seed=0):
    rng = np.random.default_rng(seed)
    dispatch = concentration(rng, NUM_GROUPS, NUM_EXPERTS * SLOTS, NUM_TOKENS)
    tokens = NUM_GROUPS * NUM_TOKENS
    combine = concentration(rng, tokens, 1, NUM_EXPERTS * SLOTS)
    weights = rng.gamma(1.0, size=tokens)
    weights *= NUM_EXPERTS * SLOTS * NUM_GROUPS / weights.sum()
    return SoftStatistics(
        block=block,
        num_groups=NUM_GROUPS,
        num_tokens=tokens,
        token_weight_counts=np.histogram(weights, TOKEN_WEIGHT_EDGES)[0],
        slot_contribution=rng.dirichlet(np.ones(6)).reshape(NUM_EXPERTS, SLOTS),
        slot_curves=dispatch.curves.reshape(NUM_EXPERTS, SLOTS, -1),
        dispatch=dispatch.concentration(),
        combine=combine.concentration(),
        slot_directions=make_directions(NUM_EXPERTS * SLOTS),
    )


def make_directions(count, seed=0):
    directions = np.random.default_rng(seed).normal(size=(count, 4))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return directions.astype("float32")


def statistics(blocks=(1, 3)):
    return {block: make_block(block, seed) for seed, block in enumerate(blocks)}
