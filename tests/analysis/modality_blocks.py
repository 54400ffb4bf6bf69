"""Statistics by modality with known numbers, for figures."""

import numpy as np

from keras_softmoe.analysis._by_modality import ModalityStatistics

MODALITIES = ("image", "text")


def make_block(seed=0, num_experts=3, modalities=MODALITIES, capacity=30, last=False):
    """Two groups; numbers that agree with each other as far as figures compare them."""
    rng = np.random.default_rng(seed)

    def each(make):
        return {name: make() for name in modalities}

    chosen = each(lambda: rng.integers(10, 40, num_experts))
    seated = {
        name: count - rng.integers(1, 5, num_experts) for name, count in chosen.items()
    }
    return ModalityStatistics(
        num_tokens={name: int(count.sum()) for name, count in chosen.items()},
        routed=chosen,
        chosen=chosen,
        seated=seated,
        padding=seated["text"] // 3 if "text" in seated else np.zeros(num_experts, int),
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


def statistics(layers=(1, 3), **kwargs):
    last = list(layers)[-1]
    return {layer: make_block(layer, last=layer == last, **kwargs) for layer in layers}
