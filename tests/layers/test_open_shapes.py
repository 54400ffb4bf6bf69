"""Rows, sequences of unknown length and maps of unknown size."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, routers
from tests.skips import only_on
from tests.support.close import assert_near
from tests.support.layer_checks import normal, randomize

BACKEND = keras.backend.backend()
ROUTERS = {
    "soft": lambda: routers.SoftRouter(4, 2, noise_std=0.1),
    "dropless": lambda: routers.SoftmaxTokenChoiceRouter(4, 2, capacity_factor=None),
    "dropless predictions": lambda: routers.SoftmaxTokenChoiceRouter(
        4, eval_capacity_factor="dropless"
    ),
    "token choice": lambda: routers.SoftmaxTokenChoiceRouter(4),
    "expert choice": lambda: routers.SoftmaxExpertChoiceRouter(4),
    "identity": lambda: routers.IdentityRouter(4),
    "race": lambda: routers.ExpertRaceRouter(4, num_selected_experts=1),
}
# Graphs of TensorFlow know the number of tokens only when they run.
OPEN = ("soft", "dropless", "dropless predictions")


def model(shape, layer):
    x = keras.Input(shape)
    return keras.Model(x, layer(x))


@pytest.mark.parametrize("router", ROUTERS if BACKEND != "tensorflow" else OPEN)
@pytest.mark.parametrize("shape", [(None, 6), (None, None, 6)])
def test_predictions(router, shape, tmp_path):
    layer = layers.MoE(ROUTERS[router](), mlp_dim=8, shared_mlp_dim=4)
    opened = model(shape, layer)
    randomize(layer, 0)
    assert opened.output_shape == (None, *shape)
    opened.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for number in (8, 12):
        size = (number,) if len(shape) == 2 else (2, number // 2)
        x = normal((3, *size, 6))
        known = model((*size, 6), layers.MoE.from_config(layer.get_config()))
        known.set_weights(opened.get_weights())
        expected = known.predict(x, verbose=0)
        assert_near(opened.predict(x, verbose=0), expected, atol=1e-6)
        assert_near(loaded.predict(x, verbose=0), expected, atol=1e-6)


@pytest.mark.parametrize("router", OPEN[:2])
def test_fit(router):
    """The same losses as with a known length, for batches of any length."""
    losses = []
    for length in (None, 8):
        keras.utils.set_random_seed(0)
        layer = layers.MoE(ROUTERS[router](), mlp_dim=8, group_images=2)
        trained = model((length, 6), layer)
        randomize(layer, 0)
        trained.compile("sgd", "mse")
        x = normal((4, 8, 6))
        losses.append(trained.fit(x, x, batch_size=4, verbose=0).history["loss"])
        if length is None:
            trained.fit(normal((4, 5, 6)), normal((4, 5, 6)), verbose=0)
    assert_near(*losses, atol=1e-5)


@pytest.mark.parametrize("router", ["soft", "dropless", "token choice"])
def test_rows(router, tmp_path):
    """`(B, D)`: a row is a token, and a group has so many rows."""
    rows = layers.MoE(ROUTERS[router](), mlp_dim=8, group_images=8)
    flat = model((6,), rows)
    randomize(rows, 0)
    x = normal((16, 6))
    found = flat.predict(x, verbose=0)
    assert found.shape == x.shape
    groups = layers.MoE.from_config({**rows.get_config(), "group_images": 1})
    grouped = model((8, 6), groups)
    grouped.set_weights(flat.get_weights())
    expected = grouped.predict(x.reshape((2, 8, 6)), verbose=0)
    assert_near(found, expected.reshape(x.shape), atol=1e-6)
    flat.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_near(loaded.predict(x, verbose=0), found, atol=1e-6)
    # A masked row has no part in the others.
    mask = np.arange(16) < 8
    masked = keras.ops.convert_to_numpy(rows(x, mask=mask))
    assert_near(masked[:8], found[:8], atol=1e-6)
    assert not masked[8:].any()


def test_images_have_a_known_size():
    layer = layers.ImageMoE(ROUTERS["token choice"](), mlp_dim=8)
    with pytest.raises(ValueError, match=r"\(None, None, 6\).*`keras.Input`"):
        layer(keras.Input((None, 6)))


def test_rows_in_groups_of_one():
    x = normal((16, 6))
    layer = layers.MoE(routers.SoftmaxTokenChoiceRouter(4), mlp_dim=8)
    with pytest.raises(ValueError, match=r"\(16, 6\).*group_images.*tokens\[None\]"):
        layer(x)
    # Without a capacity a group makes no difference.
    assert layers.MoE(ROUTERS["dropless"](), mlp_dim=8)(x).shape == x.shape


@only_on("tensorflow", because="own loop")
@pytest.mark.parametrize("router", tuple(ROUTERS))
def test_graphs(router):
    """A graph for all lengths, where the router can; otherwise an error names it."""
    import tensorflow as tf

    layer = layers.MoE(ROUTERS[router](), mlp_dim=8)
    opened, x = model((None, 6), layer), normal((2, 8, 6))
    randomize(layer, 0)
    spec = [tf.TensorSpec((None, None, 6), "float32")]
    graph = tf.function(lambda x: opened(x, training=False), input_signature=spec)
    # Eagerly every length is known.
    expected = opened(x)
    if router in OPEN:
        assert_near(graph(x).numpy(), expected.numpy(), atol=1e-6)
        return
    with pytest.raises(ValueError, match="Router.*known number of tokens"):
        graph(x)
