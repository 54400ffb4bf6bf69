"""Random numbers that a compiled function may draw."""

import keras
from keras import ops

from keras_softmoe.types import Tensor


def normal_like(x: Tensor, seed: keras.random.SeedGenerator) -> Tensor:
    """Return normal noise of the shape and dtype of a tensor."""
    if keras.backend.backend() == "torch" and torch.compiler.is_compiling():
        return _draw(seed.state.value, x)
    dtype = keras.backend.standardize_dtype(x.dtype)
    return keras.random.normal(ops.shape(x), dtype=dtype, seed=seed)


if keras.backend.backend() == "torch":
    import torch

    # `torch.compile` cannot trace a generator, and Keras leaves the graph to make one.
    # With a graph for each side of every draw, the functions of Keras that each layer
    # calls would be compiled for a few layers only, up to Dynamo's limit.
    @torch.library.custom_op("keras_softmoe::normal_like", mutates_args=("state",))
    def _draw(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        # The seed and the next state are those of `keras.random.normal`.
        seed = int(state.sum()) & 0xFFFFFFFF
        state[1] += 1
        dtype = keras.backend.standardize_dtype(x.dtype)
        return keras.random.normal(tuple(x.shape), dtype=dtype, seed=seed)

    @_draw.register_fake
    def _(state, x):
        return torch.empty_like(x)
