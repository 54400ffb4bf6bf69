"""Without a distribution nothing is sharded; checks are those of the distribution.

With one, see `test_parallel.py` of distributions.
"""

import types

import keras
import numpy as np
import pytest

from keras_softmoe.sharding import constraints


def test_without_a_distribution_tensors_are_unchanged():
    x = keras.ops.ones((2, 3))
    assert constraints.constrain(x, "layer/slots") is x
    assert constraints.replicate(x, 1, "layer/slots") is x
    assert constraints.layout_of("layer/slots") is None
    assert not constraints.is_distributed()
    constraints.check_placement("check_divides_experts", 3)


@pytest.mark.parametrize(
    "axis, expected", [(None, 1), ("batch", 2), (("batch", "model"), 8)]
)
def test_number_of_shards(axis, expected):
    mesh = types.SimpleNamespace(axis_names=["batch", "model"], shape=(2, 4))
    assert constraints.num_shards(mesh, axis) == expected


class Checking:
    """A distribution that refuses an odd number of experts."""

    def get_tensor_layout(self, path):
        return None

    def check_divides_experts(self, num_experts):
        if num_experts % 2:
            raise ValueError("odd")


def test_the_distribution_checks(monkeypatch):
    monkeypatch.setattr(keras.distribution, "distribution", Checking)
    assert constraints.is_distributed()
    constraints.check_placement("check_divides_experts", 2)
    with pytest.raises(ValueError, match="odd"):
        constraints.check_placement("check_divides_experts", 3)
    # A method that it does not have
    constraints.check_placement("check_model", None)
    x = np.ones((2, 3))
    assert constraints.constrain(x, "layer/slots") is x
