"""Statistics of routing, made up."""

import numpy as np

from keras_softmoe.analysis import BlockStatistics


def make_block(
    block=1,
    num_experts=3,
    num_tokens=5,
    num_classes=4,
    num_choices=2,
    patch_grid=(2, 2),
):
    rng = np.random.default_rng(block)
    return BlockStatistics(
        block=block,
        num_groups=20,
        num_tokens=20 * num_tokens,
        load=rng.uniform(size=num_experts),
        dropped=rng.uniform(),
        chooses=True,
        patch_grid=patch_grid,
        experts_per_image=rng.integers(0, num_experts + 1, size=20),
        weight_by_position=rng.uniform(size=(num_tokens, num_experts)),
        weight_by_class=rng.uniform(size=(num_classes, num_experts)),
        choice_histogram=rng.integers(1, 9, size=(num_choices, 50)),
    )


def statistics(blocks=(1, 3), **kwargs):
    return {block: make_block(block, **kwargs) for block in blocks}
