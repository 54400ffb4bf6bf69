"""Noise is that of Keras, and compiled by PyTorch without leaving the graph."""

import keras
import numpy as np

from keras_softmoe.ops.numbers import normal_like
from tests.skips import only_on
from tests.support.references import to_numpy


def expected(shape, calls):
    seed = keras.random.SeedGenerator(3)
    return [to_numpy(keras.random.normal(shape, seed=seed)) for _ in range(calls)]


def test_the_numbers_of_keras():
    x, seed = keras.ops.zeros((2, 3)), keras.random.SeedGenerator(3)
    for values in expected((2, 3), 2):
        np.testing.assert_array_equal(to_numpy(normal_like(x, seed)), values)


@only_on("torch", because="own loop")
def test_one_graph():
    import torch

    torch._dynamo.reset()
    x, seed = torch.zeros((2, 3)), keras.random.SeedGenerator(3)
    state = seed.state.value

    @torch.compile(fullgraph=True, backend="aot_eager")
    def draw(x):
        return normal_like(x, seed)

    for values in expected((2, 3), 3):
        np.testing.assert_array_equal(to_numpy(draw(x)), values)
    assert int(state[1]) == 3
