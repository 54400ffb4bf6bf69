"""Layers inside those of Keras that call them: videos, stacks and other wrappers."""

import keras
import numpy as np
import pytest

from keras_softmoe import layers, ops, routers
from keras_softmoe.layers.pooling import ContrastiveScale
from tests.support.close import assert_near
from tests.support.layer_checks import BATCH, normal
from tests.support.references import to_numpy

FRAMES, TOKENS = 3, (5, 8)
# Equal logits of four experts: what the loss is, one can tell.
Z_LOSS = 0.5 * np.log(4.0) ** 2
SPARSE = routers.SoftmaxTokenChoiceRouter(
    4,
    2,
    capacity_factor=0.5,
    noise_std=0.0,
    losses=(routers.RoutingLoss(ops.z_loss, weight=0.5),),
)


def moe(router=SPARSE, **kwargs):
    """A layer whose router thinks all experts are equal; only priority decides."""
    layer = layers.MoE(router, 6, **kwargs)
    layer.build((None, *TOKENS))
    if router is SPARSE:
        layer.router.kernel.assign(np.zeros(layer.router.kernel.shape))
    return layer


@pytest.mark.parametrize(
    "make",
    [
        moe,
        lambda: moe(group_images=2),
        lambda: layers.SoftMoE(4, 6),
        lambda: layers.EncoderBlock(2, layers.MoE(SPARSE, 6)),
        lambda: keras.Sequential([keras.Input(TOKENS), moe(routers.SoftRouter(4))]),
    ],
    ids=["sparse", "groups", "soft", "block", "stack"],
)
@pytest.mark.parametrize("num_frames", [FRAMES, None])
def test_video(make, num_frames):
    layer = make()
    video = normal((BATCH, FRAMES, *TOKENS))
    inputs = keras.Input((num_frames, *TOKENS))
    outputs = keras.layers.TimeDistributed(layer)(inputs)
    assert outputs.shape == inputs.shape
    actual = keras.Model(inputs, outputs).predict(video, verbose=0)
    by_frame = [to_numpy(layer(video[:, i])) for i in range(FRAMES)]
    assert_near(actual, np.stack(by_frame, 1), rtol=1e-5, atol=1e-6)


def test_frames_are_like_images_of_a_batch():
    layer, video = moe(), normal((BATCH, FRAMES, *TOKENS))
    actual = to_numpy(keras.layers.TimeDistributed(layer)(video))
    images = to_numpy(layer(video.reshape(-1, *TOKENS)))
    assert_near(actual, images.reshape(video.shape), rtol=1e-5, atol=1e-6)


class Twice(keras.layers.Wrapper):
    """Calls a layer twice."""

    def call(self, inputs):
        return self.layer(self.layer(inputs))

    def compute_output_shape(self, inputs_shape):
        return self.layer.compute_output_shape(inputs_shape)


@pytest.mark.parametrize(
    "wrapper, shape, calls",
    [
        (keras.layers.TimeDistributed, (FRAMES, *TOKENS), FRAMES),
        (Twice, TOKENS, 2),
        (lambda layer: keras.Sequential([layer]), TOKENS, 1),
    ],
    ids=["video", "twice", "stack"],
)
def test_each_call_adds_its_loss(wrapper, shape, calls):
    inputs = keras.Input(shape)
    model = keras.Model(inputs, wrapper(moe())(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = normal((BATCH, *shape)), normal((BATCH, *shape), 1)
    error = np.mean((model.predict(x, verbose=0) - y) ** 2)
    loss = model.fit(x, y, shuffle=False, verbose=0).history["loss"][0]
    np.testing.assert_allclose(loss, error + calls * Z_LOSS, rtol=1e-5)
    # Outside of training there is none.
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), error, rtol=1e-5)


def test_masks_of_frames():
    layer = moe()
    video = normal((BATCH, FRAMES, *TOKENS))
    # (B, T, S)
    mask = np.random.default_rng(0).random(video.shape[:-1]) < 0.6
    wrapper = keras.layers.TimeDistributed(layer)
    actual = to_numpy(wrapper(video, mask=keras.ops.convert_to_tensor(mask)))
    for i in range(FRAMES):
        expected = to_numpy(layer(video[:, i], mask=mask[:, i]))
        assert_near(actual[:, i], expected, rtol=1e-5, atol=1e-6)
    assert (actual[~mask] == 0).all()


def test_output_shapes():
    for name, cls in vars(layers).items():
        if isinstance(cls, type) and issubclass(cls, keras.Layer):
            own = cls.compute_output_shape
            assert own is not keras.Layer.compute_output_shape, name
    shapes = {"image": (None, 4, 8), "text": (2, 3, 8)}
    for layer in (moe(), layers.SoftMoE(4, 6), layers.EncoderBlock(2, layers.MLP(6))):
        assert layer.compute_output_shape((None, *TOKENS)) == (None, *TOKENS)
        assert layer.compute_output_shape((2, 3, 4, 8)) == (2, 3, 4, 8)
        assert layer.compute_output_shape(shapes) == shapes
    for bias in (None, 0.0):
        scale = ContrastiveScale(bias=bias)
        outputs = scale(np.zeros((3, 8)))
        expected = {name: tuple(x.shape) for name, x in outputs.items()}
        assert scale.compute_output_shape((3, 8)) == expected
