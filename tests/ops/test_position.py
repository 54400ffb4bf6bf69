"""Sine-cosine table and position-grid resampling."""

import keras
import numpy as np
import pytest

from keras_softmoe.ops import position
from tests.support import twins
from tests.support.close import assert_near
from tests.support.references import to_numpy


@pytest.mark.parametrize(
    "height, width, hidden_dim, temperature",
    [(1, 1, 8, 10000.0), (3, 5, 16, 10000.0), (5, 3, 24, 100.0)],
)
def test_sincos_2d_table(height, width, hidden_dim, temperature):
    arguments = (height, width, hidden_dim, temperature)
    assert_near(
        to_numpy(position.sincos_2d_table(*arguments)),
        twins.sincos_2d_table(*arguments),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("hidden_dim", [4, 10])
def test_sincos_2d_table_wants_a_multiple_of_four(hidden_dim):
    with pytest.raises(ValueError, match=f"Received: .*{hidden_dim}"):
        position.sincos_2d_table(2, 2, hidden_dim)


@pytest.mark.parametrize("old", [(1, 1), (2, 3), (4, 4)])
@pytest.mark.parametrize("new", [(1, 1), (3, 3), (5, 2)])
def test_resample_position_grid(old, new):
    grid = np.random.default_rng(0).normal(size=(*old, 6)).astype("float32")
    assert_near(
        to_numpy(position.resample_position_grid(grid, *new)),
        twins.resample_position_grid(grid, *new),
        rtol=1e-5,
        atol=1e-5,
    )


def test_corners_are_kept():
    grid = np.random.default_rng(0).normal(size=(3, 4, 6)).astype("float32")
    larger = to_numpy(position.resample_position_grid(grid, 7, 9))
    np.testing.assert_allclose(
        larger[[0, 0, -1, -1], [0, -1, 0, -1]],
        grid[[0, 0, -1, -1], [0, -1, 0, -1]],
        rtol=1e-6,
    )


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize(
    "old, new", [((2, 3), (5, 4)), ((6, 5), (2, 3)), ((1, 1), (2, 2))]
)
def test_bicubic(old, new, antialias):
    grid = np.random.default_rng(0).normal(size=(*old, 4)).astype("float32")
    name = "bicubic_antialias" if antialias else "bicubic"
    ours = to_numpy(position.resample_position_grid(grid, *new, name))
    expected = twins.bicubic(grid, *new, antialias)
    assert_near(ours, expected, atol=1e-5)
    if keras.backend.backend() == "torch":
        import torch

        images = torch.from_numpy(np.moveaxis(grid, -1, 0)[None].copy())
        theirs = torch.nn.functional.interpolate(
            images, new, mode="bicubic", antialias=antialias
        )
        assert_near(np.moveaxis(ours, -1, 0)[None], theirs, atol=1e-5)
