"""Statistics of routing, made up."""

import numpy as np

from keras_softmoe.analysis._statistics import RoutingStatistics


def make_block(seed=0, num_experts=3, num_tokens=5, num_classes=4, num_choices=2):
    rng = np.random.default_rng(seed)
    return RoutingStatistics(
        dropped=rng.uniform(),
        load=rng.uniform(size=num_experts),
        experts_per_image=rng.integers(0, num_experts + 1, size=20),
        weight_by_position=rng.uniform(size=(num_tokens, num_experts)),
        weight_by_class=rng.uniform(size=(num_classes, num_experts)),
        choice_histogram=rng.integers(1, 9, size=(num_choices, 50)),
    )


def statistics(layers=(1, 3), **kwargs):
    return {layer: make_block(layer, **kwargs) for layer in layers}
