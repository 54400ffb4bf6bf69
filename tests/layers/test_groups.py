"""Groups of images: what is joined comes apart again, and fillers are no tokens."""

import numpy as np
import pytest

from keras_softmoe.layers.groups import group, ungroup
from tests.support.layer_checks import normal
from tests.support.references import to_numpy

# Three images of five tokens
X = normal((3, 5, 4))
MASK = np.arange(5) < np.array([[5], [2], [4]])


@pytest.mark.parametrize(
    "group_images, shape",
    [(1, (3, 5, 4)), (2, (2, 10, 4)), (3, (1, 15, 4)), (None, (1, 15, 4))],
)
def test_groups_and_back(group_images, shape):
    tokens, valid, counts = group(X, None, group_images, num_experts=2)
    assert tuple(tokens.shape) == shape and counts is None
    if group_images == 2:
        assert to_numpy(valid).sum(axis=1).tolist() == [10, 5]
    else:
        assert valid is None
    np.testing.assert_array_equal(to_numpy(ungroup(tokens, X)), X)


@pytest.mark.parametrize(
    "group_images, expected",
    # A filler counts like the other images of its group.
    [(1, [5, 2, 4]), (2, [7, 8]), (3, [11]), (None, [11])],
)
def test_tokens_of_masked_groups(group_images, expected):
    _, valid, counts = group(X, MASK, group_images, num_experts=2)
    assert to_numpy(counts).tolist() == expected
    assert to_numpy(valid).sum() == MASK.sum()
