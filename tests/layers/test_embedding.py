"""From images to tokens, against plain NumPy."""

import numpy as np
import pytest

from keras_softmoe import layers
from keras_softmoe.layers.embedding import TokenEmbedding
from tests.support import twins
from tests.support.close import assert_near
from tests.support.layer_checks import normal, randomize
from tests.support.references import to_numpy


def test_patch_embedding():
    layer = layers.PatchEmbedding((2, 4), 5)
    image = normal((2, 6, 8, 3))
    layer.build(image.shape)
    randomize(layer)
    kernel, bias = (to_numpy(w) for w in layer.projection.weights)
    # Row by row
    patches = [
        image[:, y : y + 2, x : x + 4].reshape(2, -1) for y in (0, 2, 4) for x in (0, 4)
    ]
    expected = np.stack(patches, 1) @ kernel.reshape(-1, 5) + bias
    assert_near(to_numpy(layer(image)), expected, rtol=1e-5, atol=1e-5)


def test_class_token_goes_first():
    layer = layers.ClassToken()
    tokens = normal((2, 3, 4))
    layer.build(tokens.shape)
    assert not to_numpy(layer.class_token).any()
    randomize(layer)
    outputs = to_numpy(layer(tokens))
    for image in outputs:
        np.testing.assert_array_equal(image[0], to_numpy(layer.class_token)[0, 0])
    np.testing.assert_array_equal(outputs[:, 1:], tokens)


@pytest.mark.parametrize("has_class_token", [False, True])
def test_sincos_positions(has_class_token):
    layer = layers.PositionEmbedding((2, 3), "sincos2d", has_class_token)
    tokens = normal((2, 6 + has_class_token, 8))
    outputs = to_numpy(layer(tokens))
    table = twins.sincos_2d_table(2, 3, 8)
    first = int(has_class_token)
    assert_near(outputs[:, first:], tokens[:, first:] + table, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(outputs[:, :first], tokens[:, :first])
    assert not layer.weights


def test_learned_positions():
    layer = layers.PositionEmbedding((2, 3))
    tokens = normal((2, 6, 8))
    layer.build(tokens.shape)
    randomize(layer)
    expected = tokens + to_numpy(layer.embedding)
    np.testing.assert_allclose(to_numpy(layer(tokens)), expected, rtol=1e-6)


@pytest.mark.parametrize("has_class_token", [False, True])
@pytest.mark.parametrize("grid", [(2, 3), (5, 4), (1, 1)])
def test_saved_positions_are_resampled(grid, has_class_token):
    rows, columns = grid
    first = int(has_class_token)
    saved = layers.PositionEmbedding((2, 3), "learned", has_class_token)
    saved.build((None, 6 + first, 4))
    randomize(saved)
    store = {}
    saved.save_own_variables(store)
    store = {key: to_numpy(value) for key, value in store.items()}
    assert sorted(store) == ["0", "grid"]

    layer = layers.PositionEmbedding(grid, "learned", has_class_token)
    layer.build((None, rows * columns + first, 4))
    layer.load_own_variables(store)
    table = to_numpy(saved.embedding)[0]
    patches = twins.resample_position_grid(table[first:].reshape(2, 3, 4), *grid)
    expected = np.concatenate([table[:first], patches.reshape(-1, 4)])
    assert_near(to_numpy(layer.embedding)[0], expected, rtol=1e-5, atol=1e-6)


def test_table_of_a_square_grid():
    layer = layers.PositionEmbedding((3, 3))
    layer.build((None, 9, 4))
    table = normal((1, 4, 4))
    expected = twins.resample_position_grid(table[0].reshape(2, 2, 4), 3, 3)
    actual = to_numpy(layer.resample(table))[0]
    assert_near(actual, expected.reshape(9, 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 7, 4), (1, 9, 5), (9, 4)])
def test_table_that_does_not_fit(shape):
    layer = layers.PositionEmbedding((3, 3))
    layer.build((None, 9, 4))
    with pytest.raises(ValueError, match="(?s)do not fit.*shape="):
        layer.resample(normal(shape))


def test_errors():
    with pytest.raises(ValueError, match="'learned', 'sincos2d'.*kind='rotary'"):
        layers.PositionEmbedding((2, 2), kind="rotary")
    layer = layers.PositionEmbedding((2, 2), has_class_token=True)
    with pytest.raises(ValueError, match=r"(?s)2 x 2 patches has not 4 tokens.*\(2, 2"):
        layer.build((None, 4, 8))


def test_token_embedding():
    layer = TokenEmbedding(5, 3, 4)
    ids = np.array([[0, 4, 4], [1, 0, 0]], "int32")
    layer.build(ids.shape)
    randomize(layer)
    table, positions = (
        to_numpy(w)
        for w in (layer.token_embedding.embeddings, layer.position_embedding)
    )
    # Padding, id 0, is a token like the others.
    np.testing.assert_allclose(to_numpy(layer(ids)), table[ids] + positions, rtol=1e-6)


def test_token_embedding_errors():
    for name in ("vocabulary_size", "sequence_length", "output_dim"):
        arguments = {"vocabulary_size": 5, "sequence_length": 3, "output_dim": 4}
        with pytest.raises(ValueError, match=f"positive.*Received: {name}=0"):
            TokenEmbedding(**{**arguments, name: 0})
    with pytest.raises(ValueError, match=r"must have 3 tokens.*\(2, 4\)"):
        TokenEmbedding(5, 3, 4).build((2, 4))
