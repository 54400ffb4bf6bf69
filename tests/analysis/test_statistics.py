"""Statistics of routing, against sums over the decisions themselves."""

import keras
import numpy as np
import pytest

from keras_softmoe import analysis, ops, routers
from tests.models import tiny
from tests.references import to_numpy

TOKEN_CHOICE = routers.SoftmaxTokenChoiceRouter(
    4, num_selected_experts=2, capacity_factor=0.5
)
ROUTERS = {
    "token_choice": TOKEN_CHOICE,
    "expert_choice": routers.SoftmaxExpertChoiceRouter(4, 0.5),
    "identity": routers.IdentityRouter(4),
    "soft": routers.SoftRouter(4, slots_per_expert=2),
}
# Five images in batches of four, groups of two: padding in the last group.
NUM_IMAGES, BATCH_SIZE, NUM_TOKENS = 5, 4, 4


def statistics_of(router, labels=None, group_images=2):
    backbone = tiny.backbone(
        moe_layers=(1,), router=router, pooling="gap", group_images=group_images
    )
    images = tiny.images(NUM_IMAGES)
    statistics = analysis.routing_statistics(
        backbone, images, labels, batch_size=BATCH_SIZE, verbose=0
    )
    assert list(statistics) == [1]
    return backbone, images, statistics[1]


def decisions(backbone, images):
    """Dispatch, combine (images, tokens, E, C) and probabilities, batch by batch."""
    parts = []
    for batch in (images[:4], images[4:]):
        routing, summary = backbone.route(batch)[1]
        arrays = [*ops.to_dense(routing, 2 * NUM_TOKENS)]
        arrays.append(summary.get("probabilities", keras.ops.sum(arrays[1], -1)))
        parts.append(
            [
                to_numpy(x).reshape(-1, NUM_TOKENS, *x.shape[2:])[: len(batch)]
                for x in arrays
            ]
        )
    return [np.concatenate(x) for x in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", ROUTERS)
def test_counts(name):
    labels = np.array([0, 2, 2, 0, 0])
    backbone, images, statistics = statistics_of(ROUTERS[name], labels)
    dispatch, combine, given = decisions(backbone, images)
    weights = combine.sum(-1)

    expected = np.mean(dispatch.sum((2, 3)) == 0)
    np.testing.assert_allclose(statistics.dropped, expected, rtol=1e-6)
    load = (weights if name == "soft" else dispatch.sum(-1)).sum((0, 1)) / NUM_IMAGES
    np.testing.assert_allclose(statistics.load, load, rtol=1e-5)
    used = (dispatch.sum((1, 3)) > 0).sum(1)
    np.testing.assert_array_equal(statistics.experts_per_image, used)
    np.testing.assert_allclose(
        statistics.weight_by_position, weights.mean(0), rtol=1e-5, atol=1e-7
    )
    by_class = np.stack(
        [
            weights[[0, 3, 4]].mean((0, 1)),
            np.full(4, np.nan),
            weights[[1, 2]].mean((0, 1)),
        ]
    )
    np.testing.assert_allclose(
        statistics.weight_by_class, by_class, rtol=1e-5, atol=1e-7
    )
    assert (statistics.dropped > 0) == (name in ("token_choice", "expert_choice"))
    assert statistics.choice_histogram.shape == (2, 50)
    np.testing.assert_array_equal(
        statistics.choice_histogram.sum(1), NUM_IMAGES * NUM_TOKENS
    )
    largest = -np.sort(-given, axis=-1)
    for k in range(2):
        expected, _ = np.histogram(largest[..., k], 50, (0, 1))
        # A number beside the edge of a bin may fall on either side.
        assert np.abs(statistics.choice_histogram[k] - expected).sum() <= 2


@pytest.mark.parametrize(
    "overrides, labels, received",
    [
        (tiny.DENSE, None, "moe_layers"),
        ({}, np.zeros(3, int), "5 images, 3 labels"),
    ],
)
def test_bad_arguments_are_named(overrides, labels, received):
    backbone = tiny.backbone(**overrides)
    with pytest.raises(ValueError, match=f"Received: .*{received}"):
        analysis.routing_statistics(backbone, tiny.images(5), labels, verbose=0)
