"""Statistics by modality with known numbers, for figures."""

import numpy as np

from keras_softmoe.analysis import ModalityStatistics

MODALITIES = ("image", "text")


def make_block(block=0, num_experts=3, modalities=MODALITIES, capacity=30, last=False):
    """Two groups; numbers that agree with each other as far as figures compare them."""
    rng = np.random.default_rng(block)

    def each(make):
        return {name: make() for name in modalities}

    chosen = each(lambda: rng.integers(10, 40, num_experts))
    assigned = {
        name: count - rng.integers(1, 5, num_experts) for name, count in chosen.items()
    }
    return ModalityStatistics(
        block=block,
        num_tokens={name: int(count.sum()) for name, count in chosen.items()},
        routed=chosen,
        chosen=chosen,
        assigned=assigned,
        padding=assigned["text"] // 3
        if "text" in assigned
        else np.zeros(num_experts, int),
        dropped=each(rng.uniform),
        capacity=capacity,
        num_groups=2,
        queue=each(lambda: rng.integers(0, 3, (num_experts, 12))),
        queue_step=4,
        probability=each(lambda: rng.dirichlet(np.ones(num_experts))),
        confidence_mean=each(rng.uniform),
        confidence_std=each(lambda: rng.uniform(0.01, 0.1)),
        confidence_histogram=each(lambda: rng.integers(1, 9, 50)),
        transitions=None
        if last
        else each(lambda: rng.integers(0, 9, (num_experts, num_experts))),
    )


def statistics(blocks=(1, 3), **kwargs):
    last = list(blocks)[-1]
    return {block: make_block(block, last=block == last, **kwargs) for block in blocks}
